//! The GGUF reader: what Candle writes is read, what is broken is refused by name.

use std::io::Cursor;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use walk::store::gguf::GgufFile;

use crate::support::gguf::{Gguf, text};

fn open(bytes: &[u8]) -> walk::Result<GgufFile> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    std::fs::write(&path, bytes).unwrap();
    GgufFile::open(path)
}

#[track_caller]
fn refused(bytes: &[u8], parts: &[&str]) {
    let said = open(bytes).unwrap_err();
    assert_eq!(said.exit_code(), 2);
    let said = said.to_string();
    for part in ["x.gguf"].iter().chain(parts) {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
}

fn good() -> Gguf {
    let values: Vec<f32> = (0..12).map(|x| x as f32).collect();
    Gguf::imatrix().experts("e", &values, &[1.0, 2.0, 3.0]).entry("d", &[0.5, 0.25], 4.0)
}

#[test]
fn what_another_writer_makes_is_read() {
    let values: Vec<f32> = (0..12).map(|x| x as f32 / 3.0).collect();
    let tensor = Tensor::from_vec(values.clone(), (3, 4), &Device::Cpu).unwrap();
    let tensor = QTensor::quantize(&tensor, GgmlDType::F32).unwrap();
    let keys = [
        ("general.type", Value::String("imatrix".into())),
        ("texts", Value::Array(vec![Value::String("a".into()), Value::String("bc".into())])),
        ("numbers", Value::Array(vec![Value::U64(1), Value::U64(2)])),
        ("flag", Value::Bool(true)),
    ];
    let keys: Vec<(&str, &Value)> = keys.iter().map(|(key, value)| (*key, value)).collect();
    let mut bytes = Cursor::new(Vec::new());
    gguf_file::write(&mut bytes, &keys, &[("t", &tensor), ("u", &tensor)]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    std::fs::write(&path, bytes.into_inner()).unwrap();
    let file = GgufFile::open(path).unwrap();
    assert_eq!((file.text("general.type"), file.text("texts")), (Some("imatrix"), None));
    assert_eq!(file.names().collect::<Vec<_>>(), ["t", "u"]);
    let place = file.tensor("u").unwrap();
    assert_eq!((place.cols, place.rows), (4, 3));
    assert_eq!(file.rows("u", 1, 2).unwrap(), values[4..]);
    // And the other way round: what the tests make is what Candle reads.
    let made = gguf_file::Content::read(&mut Cursor::new(good().bytes())).unwrap();
    assert_eq!(made.tensor_infos["e.in_sum2"].shape.dims(), [3, 4]);
    let read = made.tensor(&mut Cursor::new(good().bytes()), "d.in_sum2", &Device::Cpu).unwrap();
    let read = read.dequantize(&Device::Cpu).unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(read, [0.5, 0.25]);
}

#[test]
fn rows_that_are_not_there_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    good().write(&path);
    let file = GgufFile::open(&path).unwrap();
    assert_eq!(file.rows("e.in_sum2", 2, 1).unwrap(), [8.0, 9.0, 10.0, 11.0]);
    for (name, row, what) in [("e.in_sum2", 3, "at most 3 rows"), ("gone", 0, "no such tensor")] {
        let said = file.rows(name, row, 1).unwrap_err().to_string();
        assert!(said.contains(&format!("tensor {name}")) && said.contains(what), "{said}");
    }
    // A file that was cut after it was opened.
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 4]).unwrap();
    assert!(file.rows("d.counts", 0, 1).is_err());
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let bytes = good().bytes();
    assert!(open(&bytes).is_ok());
    for length in 0..bytes.len() {
        let said = open(&bytes[..length]).unwrap_err();
        assert!(said.exit_code() == 2 && said.to_string().contains("x.gguf"), "{length}: {said}");
    }
}

#[test]
fn a_byte_changed_anywhere_is_refused_or_read() {
    // Nothing may panic, hang or take much memory.
    let bytes = good().bytes();
    for at in 0..good().head().len() {
        for change in [0x01, 0x80, 0xff] {
            let mut bytes = bytes.clone();
            bytes[at] ^= change;
            if let Ok(file) = open(&bytes) {
                assert!(file.names().count() <= 4);
            }
        }
    }
}

#[test]
fn each_refusal_names_its_place() {
    refused(b"GGML", &["no GGUF file"]);
    refused(b"", &["field `magic`"]);
    let version = |version: u32| Gguf { version, ..good() }.bytes();
    refused(&version(1), &["GGUF of version 1", "2 or 3"]);
    refused(&version(3u32.swap_bytes()), &["version 50331648", "little-endian"]);
    let count = |at: usize| {
        let mut bytes = good().bytes();
        bytes[at..at + 8].fill(0xff);
        bytes
    };
    refused(&count(8), &["field `tensors`", "run past the end"]);
    refused(&count(16), &["field `metadata`", "run past the end"]);
    let key = |key: &str, kind: u32, value: &[u8]| {
        let mut gguf = good();
        gguf.keys.push((key.to_owned(), kind, value.to_vec()));
        gguf.bytes()
    };
    let alignment = |alignment: u32| key("general.alignment", 4, &alignment.to_le_bytes());
    refused(&alignment(0), &["general.alignment", "an alignment of 0", "power of two"]);
    refused(&alignment(48), &["an alignment of 48"]);
    refused(&key("a", 13, &[]), &["field `a`", "type 13"]);
    let list = |kind: u32, count: u64| [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
    refused(&key("nested", 9, &list(9, 1)), &["field `nested`", "type 9"]);
    refused(&key("long", 9, &list(10, 1 << 61)), &["field `long`", "run past the end"]);
    refused(&key("texts", 9, &list(8, u64::MAX)), &["field `texts`", "run past the end"]);
    refused(&key("text", 8, &u64::MAX.to_le_bytes()), &["field `text`", "a text of"]);
    refused(&key("t", 8, &[&1u64.to_le_bytes()[..], &[0xff]].concat()), &["field `t`", "UTF-8"]);
    let mut name = good();
    name.tensors[0].name = "n".repeat(5000);
    refused(&name.bytes(), &["tensor name", "5000 bytes"]);
    let with = |change: fn(&mut crate::support::gguf::Tensor)| {
        let mut gguf = good();
        change(&mut gguf.tensors[0]);
        gguf.bytes()
    };
    refused(&with(|t| t.name = "e.counts".into()), &["tensor e.counts", "twice"]);
    refused(&with(|t| t.extents = vec![]), &["tensor e.in_sum2", "0 dimensions"]);
    refused(&with(|t| t.extents = vec![1; 5]), &["5 dimensions"]);
    refused(&with(|t| t.extents = vec![1 << 40, 1 << 40]), &["its size overflows"]);
    refused(&with(|t| t.extents = vec![1 << 62, 3]), &["run past the end"]);
    refused(&with(|t| t.extents = vec![4, 300]), &["tensor e.in_sum2", "run past the end"]);
    refused(&with(|t| t.shift = 4), &["its offset is 4", "a multiple of 32"]);
    refused(&with(|t| t.shift = 1 << 40), &["run past the end"]);
    assert_eq!(text("ab"), [2, 0, 0, 0, 0, 0, 0, 0, b'a', b'b']);
}
