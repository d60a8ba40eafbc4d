//! Canonical JSON (RFC 8785) and hashes over it.
//!
//! RFC 8785 writes every number as an IEEE double, so an integer beyond 2^53 would silently become its neighbour:
//! [`canonical`] refuses it, and such integers are stored as decimal strings. Floats that are hashed are stored as the
//! 17-significant-digit strings of [`float17`], which read back to the same bits in every language.

use serde::Serialize;

use super::canonical_check::Check;
use super::hash::{Hash, sha256_hex};
use crate::error::{Result, refuse};

/// The largest integer canonical JSON can carry as a number: 2^53.
pub const MAX_INTEGER: u64 = 1 << 53;

/// `value` as RFC 8785 bytes, without a trailing newline.
///
/// # Errors
/// When an integer is beyond ±2^53, a float is not finite or would be written as such an integer, or a map key is not a
/// string; names the JSON path of an offending number.
pub fn canonical(value: &(impl Serialize + ?Sized)) -> Result<Vec<u8>> {
    value.serialize(Check).map_err(|fault| {
        let refusal =
            refuse(fault.what()).wanted("finite numbers, and integers beyond 2^53 as decimal strings");
        if fault.path().is_empty() { refusal } else { refusal.field(fault.path()) }
    })?;
    Ok(serde_jcs::to_vec(value)
        .map_err(|error| refuse(format!("value has no canonical JSON form: {error}")))?)
}

/// `value` as a file has it: RFC 8785 bytes and a newline.
///
/// # Errors
/// As [`canonical`].
pub fn canonical_file(value: &(impl Serialize + ?Sized)) -> Result<Vec<u8>> {
    let mut bytes = canonical(value)?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// SHA-256 of the canonical bytes of `value`.
///
/// # Errors
/// As [`canonical`].
pub fn canonical_hash(value: &(impl Serialize + ?Sized)) -> Result<Hash> {
    Ok(sha256_hex(&canonical(value)?))
}

/// `value` with 17 significant digits (`0.025` gives `2.5000000000000001e-2`): the exact double, as text. A value that
/// is not finite gives `NaN`, `inf` or `-inf`, which [`parse_float17`] refuses.
#[must_use]
pub fn float17(value: f64) -> String {
    format!("{value:.16e}")
}

/// Reads a decimal string (in particular one of [`float17`]) back.
///
/// # Errors
/// When it is no finite decimal number.
pub fn parse_float17(text: &str) -> Result<f64> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() => Ok(value),
        _ => refuse(format!("{text:?} is no finite number"))
            .wanted("a decimal number such as \"2.5e-2\"")
            .err(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn keys_are_sorted_by_utf16_and_numbers_follow_ecmascript() {
        // The sorting example of RFC 8785, 3.2.3, and number forms of its appendix B.
        let value =
            json!({"\u{20ac}": 1, "\r": 2, "\u{fb33}": 3, "1": 4, "\u{1f600}": 5, "\u{80}": 6, "\u{f6}": 7});
        let text = String::from_utf8(canonical(&value).unwrap()).unwrap();
        assert_eq!(
            text,
            "{\"\\r\":2,\"1\":4,\"\u{80}\":6,\"\u{f6}\":7,\"\u{20ac}\":1,\"\u{1f600}\":5,\"\u{fb33}\":3}"
        );
        let numbers = json!([333_333_333.333_333_3, 1e30, 4.50, 2e-3, 1e-27, -0.0, 1]);
        assert_eq!(canonical(&numbers).unwrap(), b"[333333333.3333333,1e+30,4.5,0.002,1e-27,0,1]");
    }

    #[test]
    fn integers_are_exact_or_refused_by_path() {
        assert_eq!(canonical(&json!([MAX_INTEGER, -9_007_199_254_740_992_i64])).unwrap().len(), 36);
        let error = canonical(&json!({"a": [0, {"b": MAX_INTEGER + 1}]})).unwrap_err().to_string();
        assert!(error.contains("a[1].b") && error.contains("9007199254740993"), "{error}");
        assert!(canonical(&json!(i64::MIN)).is_err());
    }

    #[test]
    fn a_float_that_is_not_finite_is_refused_not_nulled() {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let error = canonical(&json_like(value)).unwrap_err().to_string();
            assert!(error.contains("a[1]"), "{error}");
            assert!(parse_float17(&float17(value)).is_err());
        }
    }

    /// What was written can be read and written again, to the same bytes.
    #[test]
    fn a_float_that_would_read_back_as_too_large_an_integer_is_refused() {
        for value in [9_007_199_254_740_994.0, -1e16, 1e20, 999_999_999_999_999_900_000.0] {
            let error = canonical(&json_like(value)).unwrap_err().to_string();
            assert!(error.contains("a[1]") && error.contains("beyond 2^53"), "{error}");
        }
        for value in [9_007_199_254_740_992.0, 1e21, -1e300, 0.1] {
            let bytes = canonical(&json_like(value)).unwrap();
            let read: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
            assert_eq!(canonical(&read).unwrap(), bytes);
        }
    }

    fn json_like(value: f64) -> std::collections::BTreeMap<&'static str, Vec<f64>> {
        [("a", vec![0.5, value])].into()
    }

    #[test]
    fn seventeen_digits_read_back_to_the_same_bits() {
        assert_eq!(float17(0.025), "2.5000000000000001e-2");
        for value in [0.1, 1.0 / 3.0, f64::MIN_POSITIVE, 5e-324, f64::MAX, -0.0, 123_456_789.123_456_78] {
            assert_eq!(parse_float17(&float17(value)).unwrap().to_bits(), value.to_bits());
        }
        assert!(parse_float17("0x10").is_err());
    }
}
