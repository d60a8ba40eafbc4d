//! Any bytes as JSON: what reads and has a canonical form has it as a fixed point.
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use walk::store::canonical;
use walk::store::strict_json::parse_json;

fuzz_target!(|bytes: &[u8]| {
    let Ok(value) = parse_json::<Value>("f.json", bytes) else { return };
    let Ok(once) = canonical(&value) else { return };
    let again: Value = parse_json("f.json", &once).unwrap();
    assert_eq!(canonical(&again).unwrap(), once, "{}", String::from_utf8_lossy(&once));
});
