//! Refusals of the safetensors reader.

use walk::store::safetensors_read::SafetensorsFile;

use super::support::{raw_file, refused, root};

/// Opens `bytes` as a file and asserts the refusal.
#[track_caller]
fn refuse(bytes: &[u8], parts: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shard.safetensors");
    std::fs::write(&path, bytes).unwrap();
    let mut parts = parts.to_vec();
    parts.push("shard.safetensors");
    refused(SafetensorsFile::open(&path), &parts);
}

const GOOD: &str = r#"{"a":{"dtype":"I16","shape":[2],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[3],"data_offsets":[4,7]}}"#;

#[test]
fn the_good_file_of_this_suite_opens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ö shard.safetensors");
    std::fs::write(&path, raw_file(GOOD, &[1, 0, 2, 0, 7, 8, 9])).unwrap();
    let file = SafetensorsFile::open(&path).unwrap();
    assert_eq!(file.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(file.bytes("b").unwrap(), [7, 8, 9]);
    refused(file.bytes("c"), &["tensor c", "shard.safetensors"]);
}

#[test]
fn empty_file() {
    refuse(&[], &["0 bytes"]);
}

#[test]
fn file_shorter_than_the_length_field() {
    refuse(&[1, 2, 3], &["3 bytes"]);
}

#[test]
fn header_over_100_mb() {
    refuse(&100_000_001_u64.to_le_bytes(), &["100000001", "at most 100000000"]);
    refuse(&u64::MAX.to_le_bytes(), &["18446744073709551615"]);
}

#[test]
fn header_longer_than_the_file() {
    let mut bytes = raw_file(GOOD, &[]);
    bytes.truncate(40);
    refuse(&bytes, &["should end at byte", "ends at byte 40"]);
}

#[test]
fn header_that_is_no_object() {
    refuse(&raw_file("[]", &[]), &["does not start with `{`"]);
    refuse(&raw_file(" {}", &[]), &["does not start with `{`"]);
    refuse(&raw_file("{", &[]), &["header is wrong"]);
    refuse(&raw_file("{}x", &[]), &["header is wrong", "trailing"]);
    refuse(&raw_file("{\u{1}}", &[]), &["header is wrong"]);
}

#[test]
fn header_that_is_not_utf8() {
    let mut bytes = raw_file(r#"{"aa":{}}"#, &[]);
    bytes[10] = 0xff;
    refuse(&bytes, &["header is wrong"]);
}

#[test]
fn one_byte_short() {
    refuse(&raw_file(GOOD, &[0; 6]), &["tensor b", "cut short", "byte 7"]);
}

#[test]
fn one_byte_over() {
    refuse(&raw_file(GOOD, &[0; 8]), &["1 trailing bytes", "b"]);
}

#[test]
fn overlapping_payloads() {
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[3],"data_offsets":[3,6]}}"#;
    refuse(&raw_file(header, &[0; 6]), &["tensor b", "overlaps that of a"]);
}

#[test]
fn two_tensors_over_the_same_bytes() {
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    refuse(&raw_file(header, &[0; 4]), &["tensor b", "overlaps"]);
}

#[test]
fn a_gap_between_payloads() {
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[3],"data_offsets":[5,8]}}"#;
    refuse(&raw_file(header, &[0; 8]), &["tensor b", "1 bytes between a and its payload"]);
}

#[test]
fn a_gap_before_the_first_payload() {
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}}"#;
    refuse(&raw_file(header, &[0; 5]), &["tensor a", "between the header"]);
}

#[test]
fn a_name_twice() {
    let header = r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
    refuse(&raw_file(header, &[0; 2]), &["\"w\" occurs twice"]);
}

#[test]
fn metadata_twice_or_a_metadata_key_twice() {
    refuse(&raw_file(r#"{"__metadata__":{},"__metadata__":{}}"#, &[]), &["__metadata__", "twice"]);
    refuse(&raw_file(r#"{"__metadata__":{"k":"1","k":"2"}}"#, &[]), &["\"k\" occurs twice"]);
}

#[test]
fn a_field_twice() {
    let header = r#"{"w":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}"#;
    refuse(&raw_file(header, &[0]), &["\"w\"", "duplicate field `dtype`"]);
}

#[test]
fn an_unknown_field_or_a_missing_one() {
    let header = r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1}}"#;
    refuse(&raw_file(header, &[0]), &["\"w\"", "unknown field `x`"]);
    refuse(
        &raw_file(r#"{"w":{"dtype":"U8","shape":[1]}}"#, &[0]),
        &["\"w\"", "missing field `data_offsets`"],
    );
}

#[test]
fn metadata_that_is_not_strings() {
    refuse(&raw_file(r#"{"__metadata__":{"k":1}}"#, &[]), &["__metadata__", "expected a string"]);
}

#[test]
fn unknown_dtype() {
    let header = r#"{"w":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}}"#;
    refuse(&raw_file(header, &[0]), &["tensor w", "F8_E4M3", "BF16"]);
}

#[test]
fn elements_of_less_than_a_byte_and_other_foreign_types() {
    for dtype in ["F4", "F6_E2M3", "F8_E8M0", "F8_E5M2", "U4", "I4", "C64", "bf16", "", "BF16 "] {
        let header = format!(r#"{{"w":{{"dtype":"{dtype}","shape":[2],"data_offsets":[0,1]}}}}"#);
        refuse(
            &raw_file(&header, &[0]),
            &["tensor w", &format!("dtype {dtype:?} is unknown"), "one of BOOL"],
        );
    }
}

#[test]
fn entries_that_are_no_objects() {
    for entry in [r#"["U8",[1],[0,1]]"#, "[]", "null", "1", "\"U8\""] {
        refuse(&raw_file(&format!(r#"{{"w":{entry}}}"#), &[0]), &["entry \"w\"", "expected an object"]);
    }
    for metadata in ["[]", "null", "1"] {
        refuse(&raw_file(&format!(r#"{{"__metadata__":{metadata}}}"#), &[]), &["__metadata__", "an object"]);
    }
    for offsets in ["[0]", "[0,1,2]", "{}", "1"] {
        let header = format!(r#"{{"w":{{"dtype":"U8","shape":[1],"data_offsets":{offsets}}}}}"#);
        refuse(&raw_file(&header, &[0]), &["entry \"w\""]);
    }
}

#[test]
fn length_that_disagrees_with_the_shape() {
    let header = r#"{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,20]}}"#;
    refuse(&raw_file(header, &[0; 20]), &["tensor w", "span 20 bytes", "takes 24"]);
}

#[test]
fn shape_whose_size_overflows() {
    let header = r#"{"w":{"dtype":"F32","shape":[4294967296,4294967296,2],"data_offsets":[0,0]}}"#;
    refuse(&raw_file(header, &[]), &["tensor w", "overflows"]);
    for shape in ["[18446744073709551615]", "[9223372036854775808,2]", "[4294967296,0,4294967296,4294967296]"]
    {
        let header = format!(r#"{{"w":{{"dtype":"I16","shape":{shape},"data_offsets":[0,2]}}}}"#);
        refuse(&raw_file(&header, &[0; 2]), &["tensor w"]);
    }
    let header = r#"{"w":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,0]}}"#;
    refuse(&raw_file(header, &[]), &["entry \"w\""]);
}

#[test]
fn offsets_at_the_end_of_the_numbers() {
    for offsets in
        ["[18446744073709551614,18446744073709551615]", "[9223372036854775807,9223372036854775808]"]
    {
        let header = format!(r#"{{"w":{{"dtype":"U8","shape":[1],"data_offsets":{offsets}}}}}"#);
        refuse(&raw_file(&header, &[0]), &["tensor w", "cut short"]);
    }
    let header = r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551615]}}"#;
    refuse(&raw_file(header, &[0]), &["tensor w", "span 18446744073709551615 bytes"]);
}

#[test]
fn tensors_without_elements_take_no_bytes() {
    let header = r#"{"a":{"dtype":"F32","shape":[0,4294967296],"data_offsets":[0,0]},"b":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}"#;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f.safetensors");
    std::fs::write(&path, raw_file(header, &[7])).unwrap();
    let file = SafetensorsFile::open(&path).unwrap();
    assert_eq!((file.bytes("a").unwrap(), file.bytes("b").unwrap()), (&[][..], &[7][..]));
    refuse(&raw_file(&header.replace("[0,0]}", "[1,1]}"), &[7, 8]), &["trailing"]);
}

/// A name is printed as it is read, but orders nothing of a terminal.
#[test]
fn a_name_with_control_characters() {
    let header = r#"{"w\u001b[2J\n":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
    refuse(&raw_file(header, &[0; 2]), &["tensor w\\u{1b}[2J\\n: 1 bytes between the header"]);
}

#[test]
fn a_file_that_changes_its_length_while_it_is_open() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shard.safetensors");
    let bytes = raw_file(GOOD, &[1, 0, 2, 0, 7, 8, 9]);
    std::fs::write(&path, &bytes).unwrap();
    let file = SafetensorsFile::open(&path).unwrap();
    let writer = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let whole = bytes.len() as u64;
    // One byte, the payloads, nearly all, all of it: without the check the last ones are reads past the end.
    for (length, what) in
        [(whole - 1, "shortened"), (10, "shortened"), (0, "shortened"), (whole + 1, "lengthened")]
    {
        writer.set_len(length).unwrap();
        for name in ["a", "b"] {
            refused(file.bytes(name), &["shard.safetensors", what, "while it was open", &length.to_string()]);
        }
        refused(file.payload_sha256("a"), &["shard.safetensors", what]);
        refused(file.bytes_as("b", walk::store::TensorDtype::U8, &[3]), &["shard.safetensors", what]);
    }
    // As long as before and with the same bytes: as if nothing had been.
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(file.bytes("b").unwrap(), [7, 8, 9]);
}

#[test]
fn every_prefix_of_a_small_file_is_refused() {
    let bytes = raw_file(GOOD, &[1, 0, 2, 0, 7, 8, 9]);
    for length in 0..bytes.len() {
        refuse(&bytes[..length], &["wanted: "]);
    }
}

#[test]
fn negative_or_fractional_extents() {
    refuse(&raw_file(r#"{"w":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}"#, &[0]), &["\"w\"", "-1"]);
    refuse(&raw_file(r#"{"w":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}}"#, &[0]), &["\"w\"", "1.5"]);
}

#[test]
fn offsets_that_run_backwards() {
    let header = r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[2,1]}}"#;
    refuse(&raw_file(header, &[0; 2]), &["tensor w", "run backwards"]);
}

#[test]
fn a_directory_and_a_missing_file() {
    let dir = tempfile::tempdir().unwrap();
    refused(SafetensorsFile::open(dir.path()), &["regular file"]);
    refused(SafetensorsFile::open(dir.path().join("none.safetensors")), &["none.safetensors"]);
}

/// A prefix of a real shard is refused, never a panic and never accepted: cut at each byte of the header and at
/// some of the payload.
#[test]
fn every_truncation_of_a_real_file_is_refused() {
    let bytes = std::fs::read(root().join("tests/golden/forward/short/model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let path = std::path::Path::new("cut.safetensors");
    assert!(walk::store::safetensors_read::Header::parse(path, &bytes).is_ok());
    for length in (0..header.min(600)).chain([header, header + 1, bytes.len() - 1]) {
        let cut = walk::store::safetensors_read::Header::parse(path, &bytes[..length]);
        refused(cut, &["cut.safetensors"]);
    }
}

/// 3000 random changes of header bytes: each is read or refused by name, none panics.
#[test]
fn changed_header_bytes_never_panic() {
    let bytes = std::fs::read(root().join("tests/golden/forward/short/model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap());
    let path = std::path::Path::new("changed.safetensors");
    let mut generator = walk::store::SplitMix64::new(17);
    let mut refusals = 0;
    for _ in 0..3000 {
        let mut changed = bytes.clone();
        for _ in 0..=generator.below(2) {
            let at = generator.below(header) as usize;
            // Half of them digits and punctuation, which keep the header JSON more often.
            changed[at] = if generator.below(2) == 0 {
                b"0123456789[]{},:\""[generator.below(17) as usize]
            } else {
                generator.next_u64() as u8
            };
        }
        if let Err(error) = walk::store::safetensors_read::Header::parse(path, &changed) {
            assert!(error.to_string().starts_with("changed.safetensors"), "{error}");
            refusals += 1;
        }
    }
    assert!(refusals > 1500, "{refusals}");
}
