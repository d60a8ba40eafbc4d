//! Any bytes as `JOURNAL.json`: refused by name, or a journal that is written back to the same bytes.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use walk::store::canonical;
use walk::walk::journal::JournalRecord;

fuzz_target!(|bytes: &[u8]| match JournalRecord::parse(Path::new("JOURNAL.json"), bytes) {
    Ok(record) => {
        let mut written = canonical(&record).unwrap();
        written.push(b'\n');
        assert_eq!(written, bytes);
    }
    Err(error) => assert!(error.to_string().starts_with("JOURNAL.json")),
});
