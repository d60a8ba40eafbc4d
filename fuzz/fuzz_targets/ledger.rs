//! Any bytes as each of the JSON records a work directory holds: refused by name, or one that survives its canonical
//! form.
#![no_main]

use std::fmt::Debug;
use std::path::Path;

use libfuzzer_sys::fuzz_target;
use walk::checkpoint::inventory::Inventory;
use walk::corpus::CorpusPlan;
use walk::store::canonical;
use walk::store::strict_json::parse_json;
use walk::walk::capture::CaptureRecord;
use walk::walk::finals::{FinalExpert, FinalLayer};
use walk::walk::probing::{AllocationRecord, ProbeLedger};
use walk::walk::search_record::SearchRecord;
use walk::walk::state::StateManifest;

fn record<T>(bytes: &[u8])
where
    T: serde::Serialize + serde::de::DeserializeOwned + PartialEq + Debug,
{
    let path = Path::new("record.json");
    match parse_json::<T>(path, bytes) {
        // Integers beyond 2^53 can be read and not be written: no walk wrote them.
        Ok(record) => {
            if let Ok(bytes) = canonical(&record) {
                assert_eq!(parse_json::<T>(path, &bytes).unwrap(), record);
            }
        }
        Err(error) => assert!(error.to_string().starts_with("record.json")),
    }
}

fuzz_target!(|bytes: &[u8]| {
    record::<ProbeLedger>(bytes);
    record::<AllocationRecord>(bytes);
    record::<SearchRecord>(bytes);
    record::<FinalExpert>(bytes);
    record::<FinalLayer>(bytes);
    record::<CaptureRecord>(bytes);
    record::<StateManifest>(bytes);
    record::<Inventory>(bytes);
    if let Err(error) = CorpusPlan::parse(Path::new("record.json"), bytes) {
        assert!(error.to_string().starts_with("record.json"));
    }
});
