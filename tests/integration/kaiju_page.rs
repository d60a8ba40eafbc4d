//! The worked examples of `docs/formats/kaiju1.md`, as they stand there.

use walk::codec::kaiju::code::CodeWidth;
use walk::codec::kaiju::{KaijuTensor, payload_bytes};

use crate::support::repository;

/// The block of the page that opens with this word.
fn block(kind: &str) -> String {
    let page = std::fs::read_to_string(repository("docs/formats/kaiju1.md")).unwrap();
    let (_, after) = page.split_once(&format!("```{kind}\n")).unwrap();
    after.split_once("```").unwrap().0.to_owned()
}

fn bytes(hex: &str) -> Vec<u8> {
    hex.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect()
}

fn numbers<T: std::str::FromStr<Err: std::fmt::Debug>>(text: &str) -> Vec<T> {
    text.split_whitespace().map(|number| number.parse().unwrap()).collect()
}

#[test]
fn the_payload_decodes_to_the_weights_beside_it() {
    let payload = bytes(&block("hex"));
    assert_eq!(payload.len(), 70);
    let tensor = KaijuTensor::parse(payload).unwrap();
    assert_eq!((tensor.rows(), tensor.cols(), tensor.code()), (2, 26, CodeWidth::P64));
    let wanted: Vec<f32> = numbers(&block("weights"));
    assert_eq!(tensor.dense().data, wanted);
    let mut row = [0.0; 26];
    tensor.dequantize_row(1, &mut row);
    assert_eq!(row, wanted[26..]);
}

#[test]
fn the_code_of_56_bits_is_the_point_beside_it() {
    let text = block("code56");
    let (code, point) = text.split_once('\n').unwrap();
    let code = CodeWidth::P56.read(&bytes(code));
    let found = CodeWidth::P56.decode(code).unwrap();
    assert_eq!(found.coordinates().to_vec(), numbers::<i32>(point));
    assert_eq!(CodeWidth::P56.encode(&found), Some(code));
}

#[test]
fn the_rates_are_those_of_the_page() {
    let page = std::fs::read_to_string(repository("docs/formats/kaiju1.md")).unwrap();
    for (preset, code, hi_frac) in [("v1", CodeWidth::P56, 0.1), ("v2 (default)", CodeWidth::P64, 0.025)] {
        let rate = |(rows, cols): (usize, usize)| {
            let bytes = payload_bytes(rows, cols, code, hi_frac).unwrap();
            format!("{:.4}", bytes as f64 * 8.0 / (rows * cols) as f64)
        };
        let rates = [(2048, 2048), (6144, 2048), (2048, 6144)].map(rate).join(" | ");
        let line = format!("| {preset} | {} | {hi_frac} | {rates} |", code.bits());
        assert!(page.contains(&line), "{line}");
    }
}
