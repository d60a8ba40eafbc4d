//! Typed reading of `config.json` fields, each refusal naming file and field.

use std::path::Path;

use serde_json::{Map, Value};

use super::geometry::MAX_SIZE;
use crate::error::{Refusal, Result, refuse};

/// A JSON object together with what it is called in refusals. A field that is `null` counts as absent.
pub(super) struct Fields<'a> {
    object: &'a Map<String, Value>,
    origin: &'a Path,
    prefix: &'a str,
}

impl<'a> Fields<'a> {
    pub(super) fn new(value: &'a Value, origin: &'a Path) -> Result<Self> {
        match value {
            Value::Object(object) => Ok(Self { object, origin, prefix: "" }),
            _ => refuse("not a JSON object").file(origin).wanted("a model's config.json").err(),
        }
    }

    /// The object in field `name`, whose own fields are then reported as `name.field`.
    pub(super) fn nested(&self, name: &'a str) -> Result<Option<Self>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Self { object, origin: self.origin, prefix: name })),
            Some(other) => self.wrong(name, other).wanted("an object").err(),
        }
    }

    fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    /// Starts a refusal at field `name`.
    pub(super) fn at(&self, what: impl Into<String>, name: &str) -> Refusal {
        let field = if self.prefix.is_empty() { name.into() } else { format!("{}.{name}", self.prefix) };
        refuse(what).file(self.origin).field(field)
    }

    fn wrong(&self, name: &str, value: &Value) -> Refusal {
        let mut text = value.to_string();
        if text.len() > 80 {
            text = text.chars().take(77).chain("...".chars()).collect();
        }
        self.at(format!("value {text}"), name)
    }

    fn required<T>(&self, name: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.at("missing", name).wanted("a config with this field").into())
    }

    /// Refuses field `name` unless `condition` holds.
    pub(super) fn must(&self, name: &str, condition: bool, wanted: impl FnOnce() -> String) -> Result<()> {
        if condition {
            return Ok(());
        }
        let refusal = match self.get(name) {
            Some(value) => self.wrong(name, value),
            None => self.at("missing, and its default does not fit", name),
        };
        refusal.wanted(wanted()).err()
    }

    /// Refuses a field that `other` has as well, with another value. Both are objects of one file.
    pub(super) fn same_where_shared(&self, other: &Self) -> Result<()> {
        for (name, value) in self.object {
            let (Some(mine), Some(theirs)) = (self.get(name), other.get(name)) else { continue };
            // 4 and 4.0 are one number.
            let same = mine == theirs || mine.as_f64().is_some_and(|mine| theirs.as_f64() == Some(mine));
            if !same {
                return self
                    .wrong(name, value)
                    .wanted(format!("what `{}.{name}` says, {theirs}", other.prefix))
                    .err();
            }
        }
        Ok(())
    }

    fn integer(&self, name: &str, least: u64) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_u64() {
            Some(number) if number >= least && number <= MAX_SIZE as u64 => Ok(Some(number as usize)),
            _ => self.wrong(name, value).wanted(format!("a whole number from {least} to {MAX_SIZE}")).err(),
        }
    }

    /// A required positive whole number.
    pub(super) fn size(&self, name: &str) -> Result<usize> {
        self.required(name, self.integer(name, 1)?)
    }

    /// A positive whole number with a default.
    pub(super) fn size_or(&self, name: &str, default: usize) -> Result<usize> {
        Ok(self.integer(name, 1)?.unwrap_or(default))
    }

    /// A required whole number that may be 0.
    pub(super) fn count(&self, name: &str) -> Result<usize> {
        self.required(name, self.integer(name, 0)?)
    }

    /// A whole number that may be 0, with a default.
    pub(super) fn count_or(&self, name: &str, default: usize) -> Result<usize> {
        Ok(self.integer(name, 0)?.unwrap_or(default))
    }

    /// A positive finite number, if present. The square of it is finite in f32 too.
    pub(super) fn number(&self, name: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number > 1e-30 && number < 1e30 => Ok(Some(number)),
            _ => self.wrong(name, value).wanted("a positive number").err(),
        }
    }

    /// A required positive finite number.
    pub(super) fn positive(&self, name: &str) -> Result<f64> {
        self.required(name, self.number(name)?)
    }

    /// A switch, if present.
    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => self.wrong(name, other).wanted("true or false").err(),
        }
    }

    /// A switch with a default.
    pub(super) fn flag_or(&self, name: &str, default: bool) -> Result<bool> {
        Ok(self.flag(name)?.unwrap_or(default))
    }

    /// A text, if present.
    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => self.wrong(name, other).wanted("a text").err(),
        }
    }

    /// A text that may have one value only.
    pub(super) fn fixed_text(&self, name: &str, only: &str, required: bool) -> Result<()> {
        match self.text(name)? {
            None if required => self.required(name, None),
            None => Ok(()),
            Some(text) => self.must(name, text == only, || format!("{only:?}, the only one computed here")),
        }
    }

    /// A switch that may have one setting only.
    pub(super) fn fixed_flag(&self, name: &str, only: bool) -> Result<()> {
        let flag = self.flag_or(name, only)?;
        self.must(name, flag == only, || format!("{only}, the only setting computed here"))
    }

    /// One of two words per layer; true where it is `yes`.
    pub(super) fn per_layer(
        &self,
        name: &str,
        layers: usize,
        yes: &str,
        no: &str,
    ) -> Result<Option<Vec<bool>>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let words: Option<Vec<&str>> =
            value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        let Some(words) = words else {
            return self.wrong(name, value).wanted("a list of texts").err();
        };
        self.choices(name, layers, &words, yes, no).map(Some)
    }

    /// One of two letters per layer; true where it is `yes`.
    pub(super) fn pattern(
        &self,
        name: &str,
        layers: usize,
        yes: char,
        no: char,
    ) -> Result<Option<Vec<bool>>> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        let letters: Vec<String> = text.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        self.choices(name, layers, &letters, &yes.to_string(), &no.to_string()).map(Some)
    }

    fn choices(&self, name: &str, layers: usize, words: &[&str], yes: &str, no: &str) -> Result<Vec<bool>> {
        if words.len() != layers {
            return self
                .at(format!("{} entries", words.len()), name)
                .wanted(format!("{layers}, one a layer"))
                .err();
        }
        let choice = |(layer, word): (usize, &&str)| match *word {
            word if word == yes => Ok(true),
            word if word == no => Ok(false),
            word => self
                .at(format!("entry {word:?}"), name)
                .layer(layer)
                .wanted(format!("{yes:?} or {no:?}"))
                .err(),
        };
        words.iter().enumerate().map(choice).collect()
    }
}
