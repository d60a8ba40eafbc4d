//! Finds the numbers canonical JSON would change: integers beyond 2^53 (they would be rounded), floats that are not
//! finite (`serde_json` writes them as null, which reads back as something else), and whole floats beyond 2^53 that are
//! written without an exponent (they read back as integers, which have no canonical form).
//!
//! A serializer without output, because only the value itself, not its JSON tree, still shows what a number was.

use std::fmt::{self, Display};

use serde::ser::{self, Serialize, Serializer};

use super::canonical_json::MAX_INTEGER;

/// What is wrong, and the JSON path to it, innermost part first.
#[derive(Debug)]
pub(super) struct Fault {
    what: String,
    path: Vec<String>,
}

impl Fault {
    fn new(what: String) -> Self {
        Self { what, path: Vec::new() }
    }

    fn below(mut self, part: String) -> Self {
        self.path.push(part);
        self
    }

    /// What is wrong.
    pub(super) fn what(&self) -> &str {
        &self.what
    }

    /// The JSON path, such as `prompts[3].weight`.
    pub(super) fn path(&self) -> String {
        let joined: String = self.path.iter().rev().map(String::as_str).collect();
        joined.trim_start_matches('.').to_owned()
    }
}

impl Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Fault {}

impl ser::Error for Fault {
    fn custom<T: Display>(message: T) -> Self {
        Self::new(message.to_string())
    }
}

/// The checking serializer.
pub(super) struct Check;

/// Position within a sequence or map.
#[derive(Default)]
pub(super) struct Inside {
    index: usize,
    key: String,
}

fn integer(number: i128) -> Result<(), Fault> {
    if number.unsigned_abs() > u128::from(MAX_INTEGER) {
        return Err(Fault::new(format!(
            "integer {number} is beyond 2^53 and would be rounded; it has to be a string"
        )));
    }
    Ok(())
}

fn float(number: f64) -> Result<(), Fault> {
    if !number.is_finite() {
        return Err(Fault::new(format!("{number} is no JSON number")));
    }
    // From 1e21 on a number is written with an exponent.
    if number.abs() > MAX_INTEGER as f64 && number.abs() < 1e21 {
        return Err(Fault::new(format!(
            "float {number} is written as an integer beyond 2^53; it has to be a string"
        )));
    }
    Ok(())
}

macro_rules! scalars {
    ($($method:ident($type:ty) => $check:expr;)*) => {
        $(fn $method(self, value: $type) -> Result<(), Fault> {
            $check(value)
        })*
    };
}

impl Serializer for Check {
    type Ok = ();
    type Error = Fault;
    type SerializeSeq = Inside;
    type SerializeTuple = Inside;
    type SerializeTupleStruct = Inside;
    type SerializeTupleVariant = Inside;
    type SerializeMap = Inside;
    type SerializeStruct = Inside;
    type SerializeStructVariant = Inside;

    scalars! {
        serialize_bool(bool) => |_| Ok(());
        serialize_i8(i8) => |v| integer(i128::from(v));
        serialize_i16(i16) => |v| integer(i128::from(v));
        serialize_i32(i32) => |v| integer(i128::from(v));
        serialize_i64(i64) => |v| integer(i128::from(v));
        serialize_i128(i128) => integer;
        serialize_u8(u8) => |v| integer(i128::from(v));
        serialize_u16(u16) => |v| integer(i128::from(v));
        serialize_u32(u32) => |v| integer(i128::from(v));
        serialize_u64(u64) => |v| integer(i128::from(v));
        serialize_u128(u128) => |v| integer(i128::try_from(v).unwrap_or(i128::MAX));
        serialize_f32(f32) => |v| float(f64::from(v));
        serialize_f64(f64) => float;
        serialize_char(char) => |_| Ok(());
        serialize_str(&str) => |_| Ok(());
    }

    fn serialize_bytes(self, _: &[u8]) -> Result<(), Fault> {
        Ok(())
    }
    fn serialize_none(self) -> Result<(), Fault> {
        Ok(())
    }
    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), Fault> {
        value.serialize(self)
    }
    fn serialize_unit(self) -> Result<(), Fault> {
        Ok(())
    }
    fn serialize_unit_struct(self, _: &'static str) -> Result<(), Fault> {
        Ok(())
    }
    fn serialize_unit_variant(self, _: &'static str, _: u32, _: &'static str) -> Result<(), Fault> {
        Ok(())
    }
    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        value: &T,
    ) -> Result<(), Fault> {
        value.serialize(self)
    }
    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<(), Fault> {
        value.serialize(self).map_err(|fault| fault.below(format!(".{variant}")))
    }
    fn serialize_seq(self, _: Option<usize>) -> Result<Inside, Fault> {
        Ok(Inside::default())
    }
    fn serialize_tuple(self, _: usize) -> Result<Inside, Fault> {
        Ok(Inside::default())
    }
    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Inside, Fault> {
        Ok(Inside::default())
    }
    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Inside, Fault> {
        Ok(Inside::default())
    }
    fn serialize_map(self, _: Option<usize>) -> Result<Inside, Fault> {
        Ok(Inside::default())
    }
    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Inside, Fault> {
        Ok(Inside::default())
    }
    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Inside, Fault> {
        Ok(Inside::default())
    }
}

macro_rules! sequences {
    ($($kind:ident::$method:ident;)*) => {
        $(impl ser::$kind for Inside {
            type Ok = ();
            type Error = Fault;
            fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Fault> {
                self.index += 1;
                value.serialize(Check).map_err(|fault| fault.below(format!("[{}]", self.index - 1)))
            }
            fn end(self) -> Result<(), Fault> {
                Ok(())
            }
        })*
    };
}

sequences! {
    SerializeSeq::serialize_element;
    SerializeTuple::serialize_element;
    SerializeTupleStruct::serialize_field;
    SerializeTupleVariant::serialize_field;
}

macro_rules! structs {
    ($($kind:ident;)*) => {
        $(impl ser::$kind for Inside {
            type Ok = ();
            type Error = Fault;
            fn serialize_field<T: Serialize + ?Sized>(&mut self, key: &'static str, value: &T) -> Result<(), Fault> {
                value.serialize(Check).map_err(|fault| fault.below(format!(".{key}")))
            }
            fn end(self) -> Result<(), Fault> {
                Ok(())
            }
        })*
    };
}

structs! {
    SerializeStruct;
    SerializeStructVariant;
}

impl ser::SerializeMap for Inside {
    type Ok = ();
    type Error = Fault;
    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Fault> {
        self.key = serde_json::to_value(key)
            .map_err(ser::Error::custom)?
            .as_str()
            .map_or_else(|| "?".to_owned(), str::to_owned);
        Ok(())
    }
    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Fault> {
        value.serialize(Check).map_err(|fault| fault.below(format!(".{}", self.key)))
    }
    fn end(self) -> Result<(), Fault> {
        Ok(())
    }
}
