//! The first place where two JSON values differ, by its path.
//!
//! For refusals of records that carry many hashes: `experts[3].inputs.fit_row_ids_sha256` says more than "not equal".

use serde_json::Value;

/// A place that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Fields joined by dots, places of arrays in brackets.
    pub path: String,
    /// What is there, as JSON; `nothing` where the field is absent.
    pub found: String,
    /// What should be there.
    pub wanted: String,
}

impl Difference {
    /// A difference at `path`, of values that can be shown.
    pub fn new(path: impl Into<String>, found: impl ToString, wanted: impl ToString) -> Self {
        Self { path: path.into(), found: found.to_string(), wanted: wanted.to_string() }
    }
}

/// Compares depth first: fields in alphabetical order, arrays of equal length place by place. `path` is where the values
/// are themselves.
pub fn first_difference(found: &Value, wanted: &Value, path: &str) -> Option<Difference> {
    match (found, wanted) {
        (Value::Object(a), Value::Object(b)) => {
            let mut fields: Vec<&String> = a.keys().chain(b.keys()).collect();
            fields.sort_unstable();
            fields.dedup();
            fields.into_iter().find_map(|field| {
                let path = format!("{path}.{field}");
                match (a.get(field), b.get(field)) {
                    (Some(found), Some(wanted)) => first_difference(found, wanted, &path),
                    (found, wanted) => Some(Difference::new(path, show(found), show(wanted))),
                }
            })
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            a.iter().zip(b).enumerate().find_map(|(place, (found, wanted))| {
                first_difference(found, wanted, &format!("{path}[{place}]"))
            })
        }
        _ if found == wanted => None,
        _ => Some(Difference::new(path, found, wanted)),
    }
}

fn show(value: Option<&Value>) -> String {
    value.map_or("nothing".to_owned(), Value::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_innermost_place_is_named() {
        let whole = json!({"a": [{"b": 1, "c": "x"}, {"b": 2}], "d": null});
        assert_eq!(first_difference(&whole, &whole, "r"), None);
        let mut changed = whole.clone();
        changed["a"][0]["c"] = json!("y");
        let difference = first_difference(&changed, &whole, "r").unwrap();
        assert_eq!(difference, Difference::new("r.a[0].c", "\"y\"", "\"x\""));
        let mut shorter = whole.clone();
        shorter["a"].as_array_mut().unwrap().pop();
        assert_eq!(first_difference(&shorter, &whole, "r").unwrap().path, "r.a");
        let mut without = whole.clone();
        without.as_object_mut().unwrap().remove("d");
        assert_eq!(first_difference(&without, &whole, "r"), Some(Difference::new("r.d", "nothing", "null")));
        assert_eq!(first_difference(&whole, &without, "r"), Some(Difference::new("r.d", "null", "nothing")));
    }
}
