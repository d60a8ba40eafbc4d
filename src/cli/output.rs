//! Standard output: JSON lines for machines, plain text for people.
//!
//! A line is `{"type": ..., "data": ...}`, complete and flushed, so that a reader can act on it at once. A reader that
//! goes away (`| head`) has seen enough: writing to a broken pipe is no error, and does not panic as `println!` would.

use std::io::{ErrorKind, Write};
use std::path::Path;

use serde::Serialize;

use crate::error::{Error, Result, refuse};
use crate::store::atomic::write_atomic;

/// What an output is called in errors.
const STDOUT: &str = "standard output";

#[derive(Serialize)]
struct Line<'a, T: Serialize> {
    r#type: &'a str,
    data: &'a T,
}

/// Publishes a report as a JSON file: it tells of times, so no seal names it.
///
/// # Errors
/// Names the path.
pub fn write_report(path: &Path, report: &impl Serialize) -> Result<()> {
    let mut bytes = serde_json::to_vec_pretty(report)
        .map_err(|error| refuse(format!("the report cannot be put in JSON: {error}")).file(path).check())?;
    bytes.push(b'\n');
    write_atomic(path, &bytes)?;
    Ok(())
}

/// Writes one JSON line. A value that is not finite is `null`.
///
/// # Errors
/// When `data` cannot be put in JSON, or the output fails otherwise than by a reader that went away.
pub fn emit(out: &mut impl Write, kind: &str, data: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_vec(&Line { r#type: kind, data })
        .map_err(|error| refuse(format!("{kind} cannot be put in JSON: {error}")).check())?;
    line.push(b'\n');
    write_all(out, &line)
}

/// Writes text as it is.
///
/// # Errors
/// When the output fails otherwise than by a reader that went away.
pub fn print(out: &mut impl Write, text: &str) -> Result<()> {
    write_all(out, text.as_bytes())
}

fn write_all(out: &mut impl Write, bytes: &[u8]) -> Result<()> {
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Error::io(STDOUT, error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    struct Failing(ErrorKind);

    impl Write for Failing {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Err(self.0.into())
        }
    }

    #[test]
    fn a_line_has_type_and_data() {
        let mut out = Vec::new();
        emit(&mut out, "note", &"two\nlines").unwrap();
        emit(&mut out, "figures", &[1.5, f64::NAN]).unwrap();
        let expected = concat!(
            r#"{"type":"note","data":"two\nlines"}"#,
            "\n",
            r#"{"type":"figures","data":[1.5,null]}"#,
            "\n"
        );
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }

    #[test]
    fn a_reader_that_went_away_is_no_error_and_a_full_disk_is() {
        emit(&mut Failing(ErrorKind::BrokenPipe), "note", &1).unwrap();
        print(&mut Failing(ErrorKind::BrokenPipe), "text").unwrap();
        let error = emit(&mut Failing(ErrorKind::StorageFull), "note", &1).unwrap_err();
        assert!(error.to_string().starts_with("standard output: "), "{error}");
    }

    #[test]
    fn what_is_no_json_is_an_error() {
        let by_bytes = std::collections::BTreeMap::from([(vec![1u8], 1)]);
        let error = emit(&mut Vec::new(), "map", &by_bytes).unwrap_err();
        assert!(error.to_string().contains("map cannot be put in JSON"), "{error}");
    }
}
