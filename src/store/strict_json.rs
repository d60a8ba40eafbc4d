//! JSON reading that refuses what `serde_json` lets pass: a key that occurs twice in one object, and an array in place
//! of a struct.
//!
//! `serde_json` keeps the last of two equal keys, so a header with two tensors of one name, or a config with a second,
//! contradicting `quantization_config`, would be read without a word; and it takes `[]` for a struct of optional fields.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

use serde::de::{self, Deserialize, DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::objects::Objects;
use crate::error::{IoContext, Result, refuse};

/// A JSON object as a sorted map; a key that occurs twice is an error that names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UniqueMap<V>(pub BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
            type Value = BTreeMap<String, V>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some(key) = map.next_key::<String>()? {
                    let value = map.next_value()?;
                    if entries.contains_key(&key) {
                        return Err(de::Error::custom(format!("{key:?} occurs twice")));
                    }
                    entries.insert(key, value);
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_map(Entries(PhantomData)).map(Self)
    }
}

/// Any JSON value, all of whose objects have distinct keys.
#[derive(Debug, Clone, PartialEq)]
pub struct StrictValue(pub Value);

impl<'de> Deserialize<'de> for StrictValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Value;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON value")
            }
            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }
            fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_str<E>(self, value: &str) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
                let mut items = Vec::new();
                while let Some(StrictValue(item)) = seq.next_element()? {
                    items.push(item);
                }
                Ok(Value::Array(items))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
                let mut entries = serde_json::Map::new();
                while let Some(key) = map.next_key::<String>()? {
                    let StrictValue(value) = map.next_value()?;
                    if entries.contains_key(&key) {
                        return Err(de::Error::custom(format!("key {key:?} occurs twice")));
                    }
                    entries.insert(key, value);
                }
                Ok(Value::Object(entries))
            }
        }
        deserializer.deserialize_any(Any).map(Self)
    }
}

/// Parses `bytes` of the file `path` as a `T`; objects with a key twice, and arrays in place of structs, are refused at
/// any depth.
///
/// # Errors
/// Names the file, and line and column of the fault.
pub fn parse_json<T: DeserializeOwned>(path: impl AsRef<Path>, bytes: &[u8]) -> Result<T> {
    let wrong =
        |error: serde_json::Error| refuse(format!("not the JSON it should be: {error}")).file(path.as_ref());
    serde_json::from_slice::<StrictValue>(bytes).map_err(wrong)?;
    Ok(structs_from_objects(bytes).map_err(wrong)?)
}

/// As [`serde_json::from_slice`], but structs are taken from objects only. Keys that occur twice are left to `T`.
///
/// # Errors
/// Line and column of the fault.
pub(super) fn structs_from_objects<'de, T: Deserialize<'de>>(bytes: &'de [u8]) -> serde_json::Result<T> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = T::deserialize(Objects(&mut deserializer))?;
    deserializer.end()?;
    Ok(value)
}

/// Reads a regular file; anything else, such as a pipe that would be waited for, is refused.
///
/// # Errors
/// Names the path.
pub fn read_file(path: impl AsRef<Path>) -> Result<Vec<u8>> {
    let path = path.as_ref();
    if !std::fs::metadata(path).at(path)?.is_file() {
        return refuse("not a regular file").file(path).wanted("a file").err();
    }
    std::fs::read(path).at(path)
}

/// Reads the file `path` as [`parse_json`] does.
///
/// # Errors
/// As [`parse_json`], or when the file cannot be read.
pub fn read_json<T: DeserializeOwned>(path: impl AsRef<Path>) -> Result<T> {
    let path = path.as_ref();
    parse_json(path, &read_file(path)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_right_is_read_as_serde_json_reads_it() {
        let text = br#"{"a": [1, -2, 2.5, "x\n", null, true], "b": {"a": {}}}"#;
        let value: Value = parse_json("f.json", text).unwrap();
        assert_eq!(value, json!({"a": [1, -2, 2.5, "x\n", null, true], "b": {"a": {}}}));
    }

    #[test]
    fn a_key_twice_is_refused_at_any_depth_with_file_and_line() {
        let error =
            parse_json::<Value>("f.json", b"{\"a\": [{\"b\": 1,\n\"b\": 1}]}").unwrap_err().to_string();
        assert!(
            error.starts_with("f.json") && error.contains("\"b\" occurs twice") && error.contains("line 2"),
            "{error}"
        );
        let error = serde_json::from_str::<UniqueMap<u8>>(r#"{"k": 1, "k": 1}"#).unwrap_err().to_string();
        assert!(error.contains("\"k\" occurs twice"), "{error}");
    }

    #[derive(Debug, PartialEq, serde::Deserialize)]
    struct Point {
        #[serde(default)]
        x: Option<u8>,
        #[serde(default)]
        inner: Vec<Point>,
        #[serde(default)]
        by_name: BTreeMap<String, Point>,
        #[serde(default)]
        kind: Option<Kind>,
        #[serde(default)]
        pair: (u8, Option<Box<Point>>),
    }

    #[derive(Debug, PartialEq, serde::Deserialize)]
    enum Kind {
        Plain,
        Of(Box<Point>),
        With { x: u8 },
    }

    #[test]
    fn a_struct_is_read_from_an_object_and_nothing_else_at_any_depth() {
        let good =
            br#"{"x": 1, "inner": [{}, {"x": null}], "by_name": {"a": {}}, "kind": {"With": {"x": 1}}}"#;
        let point: Point = parse_json("f.json", good).unwrap();
        assert_eq!(point, serde_json::from_slice(good).unwrap());
        assert_eq!((point.inner.len(), point.kind), (2, Some(Kind::With { x: 1 })));
        let pair: Point = parse_json("f.json", br#"{"pair": [3, {"kind": "Plain"}]}"#).unwrap();
        assert_eq!(pair.pair.1.unwrap().kind, Some(Kind::Plain));
        for bad in [
            "[]",
            "[1]",
            "null",
            "5",
            "\"x\"",
            r#"{"inner": [[]]}"#,
            r#"{"by_name": {"a": []}}"#,
            r#"{"kind": {"Of": []}}"#,
            r#"{"kind": {"With": [1]}}"#,
            r#"{"pair": [1, []]}"#,
            "{} []",
        ] {
            let error = parse_json::<Point>("f.json", bad.as_bytes()).unwrap_err().to_string();
            let wanted = if bad == "{} []" { "trailing" } else { "expected an object" };
            assert!(error.starts_with("f.json: ") && error.contains(wanted), "{bad}: {error}");
        }
    }

    #[test]
    fn deep_nesting_is_an_error_and_no_crash() {
        let text = "[".repeat(100_000);
        assert!(parse_json::<Value>("f.json", text.as_bytes()).is_err());
    }
}
