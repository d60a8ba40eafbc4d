//! Refusals of corpus plans and sealed plans.

use std::path::Path;

use serde_json::{Value, json};
use walk::corpus::{CorpusPlan, Plan, SealContext, TextEncoder, seal};

use super::support::{refused, root};

fn encoder() -> TextEncoder {
    TextEncoder::from_file(root().join("models/tiny/tokenizer.json")).unwrap()
}

fn seal_in(folder: &Path, text: &str, default: Option<&[String]>) -> walk::Result<CorpusPlan> {
    let path = folder.join("my plan.json");
    std::fs::write(&path, text).unwrap();
    let encoder = encoder();
    let context = SealContext {
        encoder: &encoder,
        vocab_size: 2048,
        max_position_embeddings: 64,
        default_prefix: default,
    };
    seal(&Plan::load(&path)?, &context)
}

/// Seals a plan of these entries in a folder that holds `a.txt` ("zeile ä\nzwei\ndrei") and `sub/b.txt`.
fn seal_entries(entries: &Value) -> walk::Result<CorpusPlan> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("sub")).unwrap();
    std::fs::write(dir.path().join("a.txt"), "zeile ä\nzwei\ndrei").unwrap();
    std::fs::write(dir.path().join("sub/b.txt"), "one\n%%\ntwo").unwrap();
    std::fs::write(dir.path().join("latin1.txt"), b"caf\xe9").unwrap();
    let plan = json!({"version": 1, "prompts": entries});
    seal_in(dir.path(), &plan.to_string(), Some(&["<|endoftext|>".into()]))
}

/// A calibration entry with these fields over (or instead of) a text.
fn entry(fields: Value) -> Value {
    let mut entry = json!({"id": "p1", "axis": "prose", "use": "calibrate", "text": "hello world"});
    for (key, value) in fields.as_object().unwrap() {
        if value.is_null() {
            entry.as_object_mut().unwrap().remove(key);
        } else {
            entry[key] = value.clone();
        }
    }
    entry
}

#[track_caller]
fn refuse_entry(fields: Value, parts: &[&str]) {
    let mut parts = parts.to_vec();
    parts.push("my plan.json");
    refused(seal_entries(&json!([entry(fields)])), &parts);
}

fn text_of(fields: Value) -> Vec<u32> {
    seal_entries(&json!([entry(fields)])).unwrap().prompts[0].token_ids[1..].to_vec()
}

#[test]
fn ranges_select_what_they_say() {
    let encoder = encoder();
    let lines = |lines: Value| text_of(json!({"text": null, "file": "a.txt", "lines": lines}));
    assert_eq!(lines(json!([1, 1])), encoder.encode("zeile ä\n").unwrap());
    assert_eq!(lines(json!([2, 3])), encoder.encode("zwei\ndrei").unwrap());
    let bytes = text_of(json!({"text": null, "file": "sub/../a.txt", "bytes": [6, 8]}));
    assert_eq!(bytes, encoder.encode("ä").unwrap());
}

#[test]
fn a_split_entry_is_one_document_a_piece() {
    let sealed =
        seal_entries(&json!([entry(json!({"text": null, "file": "sub/b.txt", "split": "\n%%\n"}))])).unwrap();
    let ids: Vec<_> = sealed.prompts.iter().map(|prompt| prompt.id.as_str()).collect();
    assert_eq!(ids, ["p1.000", "p1.001"]);
    assert_eq!(sealed.files_sha256.keys().collect::<Vec<_>>(), ["sub/b.txt"]);
}

#[test]
fn token_ids_get_the_prefix_unless_it_is_switched_off() {
    let ids = |prefix: Value| {
        let fields = json!({"text": null, "token_ids": [5, 6], "prefix_tokens": prefix});
        let sealed = seal_entries(&json!([entry(fields)])).unwrap();
        (sealed.prompts[0].prefix_length, sealed.prompts[0].token_ids.clone())
    };
    assert_eq!(ids(Value::Null), (1, vec![0, 5, 6]));
    assert_eq!(ids(json!([])), (0, vec![5, 6]));
    assert_eq!(ids(json!([7, "<|endoftext|>"])), (2, vec![7, 0, 5, 6]));
}

#[test]
fn max_tokens_counts_the_prefix_and_the_entry_goes_first() {
    let long = "a b c d e f g h i j k l";
    let sealed = seal_entries(&json!([entry(json!({"text": long, "max_tokens": 5}))])).unwrap();
    assert_eq!(sealed.prompts[0].token_ids.len(), 5);
    let whole = encoder().encode(long).unwrap().len() + 1;
    assert_eq!(sealed.prompts[0].cut_tokens, whole - 5);
}

#[test]
fn a_prompt_of_one_token() {
    let fields = json!({"text": null, "token_ids": [5], "prefix_tokens": []});
    assert_eq!(seal_entries(&json!([entry(fields)])).unwrap().calibration_rows, 1);
}

#[test]
fn row_offsets_skip_evaluation_prompts() {
    let ids = |id: &str, usage: &str, n: usize| json!({"id": id, "axis": "x", "use": usage, "token_ids": vec![9; n]});
    let entries = json!([ids("a", "calibrate", 3), ids("b", "evaluate", 5), ids("c", "calibrate", 2)]);
    let sealed = seal_entries(&entries).unwrap();
    let offsets: Vec<_> = sealed.prompts.iter().map(|prompt| prompt.row_offset).collect();
    assert_eq!(offsets, [Some(0), None, Some(4)]);
    assert_eq!(sealed.calibration_rows, 7);
    assert_eq!(sealed.domain.calibrate, ["a", "c"]);
    assert_eq!(sealed.domain.evaluate, ["b"]);
}

#[test]
fn wrong_json_gives_line_and_column() {
    let dir = tempfile::tempdir().unwrap();
    refused(seal_in(dir.path(), "{\n\"version\": 1,,\n}", None), &["my plan.json", "line 2 column"]);
    refused(seal_in(dir.path(), "", None), &["my plan.json", "line 1"]);
}

#[test]
fn a_plan_that_is_no_object() {
    let dir = tempfile::tempdir().unwrap();
    for text in ["[]", "null", "5", "\"plan\"", r#"[1, null, null, []]"#] {
        refused(seal_in(dir.path(), text, None), &["my plan.json", "expected an object", "line 1"]);
    }
    // An entry as a list of its fields in order.
    let entry = r#"["a", "x", "calibrate", "text"]"#;
    let good = entry_text("first");
    for entries in [entry.to_owned(), format!("{good}, {entry}")] {
        let plan = format!(r#"{{"version": 1, "prompts": [{entries}]}}"#);
        let place = if entries.starts_with('[') { "number 0 of the plan" } else { "number 1 of the plan" };
        refused(seal_in(dir.path(), &plan, Some(&[])), &["my plan.json", place, "expected an object"]);
    }
    for prompts in ["{}", "null", "5", "[5]", "[null]"] {
        let plan = format!(r#"{{"version": 1, "prompts": {prompts}}}"#);
        refused(seal_in(dir.path(), &plan, None), &["my plan.json", "invalid type"]);
    }
}

fn entry_text(id: &str) -> String {
    entry(json!({"id": id})).to_string()
}

#[test]
fn every_prefix_of_a_plan_is_refused_and_so_is_what_is_not_utf8() {
    let path = Path::new("my plan.json");
    let plan = json!({"version": 1, "prompts": [entry(json!({"text": "größer"}))]}).to_string();
    Plan::parse(path, plan.as_bytes()).unwrap();
    for length in 0..plan.len() {
        refused(Plan::parse(path, &plan.as_bytes()[..length]), &["my plan.json", "line 1"]);
    }
    let at = plan.find("gr").unwrap();
    let mut bytes = plan.into_bytes();
    bytes[at] = 0xff;
    refused(Plan::parse(path, &bytes), &["my plan.json", "line 1"]);
    refused(Plan::parse(path, b"\xef\xbb\xbf{}"), &["my plan.json", "line 1"]);
}

#[test]
fn numbers_that_are_too_large() {
    let dir = tempfile::tempdir().unwrap();
    let huge = "18446744073709551616";
    for field in ["\"max_tokens\"", "\"version\""] {
        let plan = format!(r#"{{"version": 1, "prompts": [{}]}}"#, entry_text("p1"));
        let plan = plan.replace("\"version\": 1", &format!("\"version\": 1, {field}: {huge}"));
        refused(seal_in(dir.path(), &plan, None), &["my plan.json", "line 1"]);
    }
    refuse_entry(json!({"max_tokens": u64::MAX}), &["\"p1\"", "`max_tokens`", "max_position_embeddings, 64"]);
    refuse_entry(json!({"max_tokens": 1e300}), &["\"p1\"", "1e+300"]);
    refuse_entry(json!({"text": null, "token_ids": [u64::MAX]}), &["\"p1\"", "18446744073709551615"]);
    refuse_entry(json!({"prefix_tokens": [u64::MAX]}), &["\"p1\"", "18446744073709551615"]);
    let with = |key: &str, range: Value| json!({"text": null, "file": "a.txt", key: range});
    refuse_entry(with("bytes", json!([0, u64::MAX])), &["\"p1\"", "`bytes`", "18 bytes"]);
    refuse_entry(with("lines", json!([u64::MAX, u64::MAX])), &["\"p1\"", "`lines`", "3 lines"]);
    refuse_entry(with("lines", json!([1])), &["\"p1\"", "line 1"]);
    refuse_entry(with("bytes", json!([0, 1, 2])), &["\"p1\"", "line 1"]);
}

#[test]
fn names_with_a_nul() {
    let file = |file: &str| json!({"text": null, "file": file});
    refuse_entry(file("a\0.txt"), &["\"p1\"", "`file`", "a\\0.txt", "cannot be read"]);
    refuse_entry(json!({"id": "p\0"}), &["`id`", "cannot name a prompt's files"]);
    refuse_entry(json!({"prefix_tokens": ["\0"]}), &["\"p1\"", "`prefix_tokens`", "no token"]);
    // In a text it is a character like any other.
    assert!(!text_of(json!({"text": "a\0b"})).is_empty());
}

#[test]
fn a_missing_plan() {
    refused(Plan::load("nowhere/plan.json"), &["nowhere/plan.json"]);
}

#[test]
fn unknown_keys_at_both_levels() {
    let dir = tempfile::tempdir().unwrap();
    refused(
        seal_in(dir.path(), r#"{"version": 1, "prompts": [], "promts": []}"#, None),
        &["my plan.json", "unknown field `promts`", "line 1", "`prompts`"],
    );
    refuse_entry(json!({"tokens": 5}), &["unknown field `tokens`", "\"p1\"", "line 1"]);
}

#[test]
fn a_key_twice() {
    let dir = tempfile::tempdir().unwrap();
    let text = r#"{"version": 1, "prompts": [{"id": "a", "axis": "x", "use": "calibrate", "text": "t", "text": "u"}]}"#;
    refused(seal_in(dir.path(), text, None), &["my plan.json", "\"text\" occurs twice"]);
}

#[test]
fn missing_keys_and_wrong_values_name_the_entry() {
    refuse_entry(json!({"axis": null}), &["\"p1\"", "missing field `axis`"]);
    refuse_entry(json!({"use": null}), &["\"p1\"", "missing field `use`"]);
    refuse_entry(json!({"use": "train"}), &["\"p1\"", "unknown variant `train`", "`evaluate`"]);
    refuse_entry(json!({"max_tokens": -1}), &["\"p1\"", "-1"]);
    refuse_entry(json!({"prefix_tokens": [1.5]}), &["\"p1\"", "a token string or a token id"]);
    refuse_entry(json!({"id": null}), &["number 0 of the plan", "missing field `id`"]);
}

#[test]
fn a_version_of_the_future_and_no_prompts() {
    let dir = tempfile::tempdir().unwrap();
    refused(seal_in(dir.path(), r#"{"version": 2, "prompts": []}"#, None), &["`version`", "2", "wanted: 1"]);
    refused(seal_in(dir.path(), r#"{"version": 1, "prompts": []}"#, None), &["`prompts`", "no prompts"]);
}

#[test]
fn no_entry_that_calibrates() {
    refuse_entry(json!({"use": "evaluate"}), &["`prompts`", "calibrate"]);
}

#[test]
fn duplicate_ids() {
    refused(
        seal_entries(&json!([entry(json!({})), entry(json!({}))])),
        &["my plan.json", "\"p1\" occurs twice"],
    );
}

#[test]
fn duplicate_ids_made_by_split() {
    let split = entry(json!({"text": "a%b", "split": "%"}));
    let plain = entry(json!({"id": "p1.001"}));
    refused(seal_entries(&json!([split, plain])), &["my plan.json", "\"p1.001\" occurs twice", "split"]);
}

#[test]
fn ids_that_cannot_name_files() {
    for id in ["", ".hidden", "../x", "a/b", "a b", "größe", &"x".repeat(101)] {
        refuse_entry(json!({"id": id}), &["`id`", "cannot name a prompt's files", "A-Z a-z 0-9"]);
    }
    refuse_entry(json!({"axis": ""}), &["`axis`", "\"p1\""]);
    refuse_entry(json!({"id": "x".repeat(98), "text": "a%b", "split": "%"}), &["`id`", "too long", "100"]);
}

#[test]
fn no_source_or_two() {
    refuse_entry(json!({"text": null}), &["\"p1\"", "exactly one of `text`, `file`, `token_ids`"]);
    refuse_entry(json!({"file": "a.txt"}), &["\"p1\"", "text and file are both given"]);
    refuse_entry(json!({"token_ids": [1]}), &["\"p1\"", "text and token_ids are both given"]);
}

#[test]
fn empty_prompts() {
    refuse_entry(json!({"text": ""}), &["\"p1\"", "`text`", "empty"]);
    refuse_entry(json!({"text": null, "token_ids": []}), &["\"p1\"", "`token_ids`", "empty"]);
    refuse_entry(json!({"text": "a%", "split": "%"}), &["\"p1.001\"", "empty"]);
}

#[test]
fn files_that_are_missing_or_outside() {
    let file = |file: &str| json!({"text": null, "file": file});
    refuse_entry(file("nowhere.txt"), &["\"p1\"", "`file`", "nowhere.txt", "existing file relative to"]);
    for outside in ["../a.txt", "/etc/hostname", "sub/../../a.txt"] {
        refuse_entry(file(outside), &["\"p1\"", "`file`", outside, "does not leave it"]);
    }
    refuse_entry(file("sub"), &["\"p1\"", "no regular file"]);
    refuse_entry(file("latin1.txt"), &["\"p1\"", "latin1.txt", "not UTF-8 at byte 3"]);
}

#[cfg(unix)]
#[test]
fn a_symbolic_link_out_of_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::os::unix::fs::symlink(secret.path(), dir.path().join("link.txt")).unwrap();
    let plan = json!({"version": 1, "prompts": [entry(json!({"text": null, "file": "link.txt"}))]});
    refused(
        seal_in(dir.path(), &plan.to_string(), Some(&[])),
        &["my plan.json", "\"p1\"", "link.txt", "symbolic link"],
    );
}

#[test]
fn ranges_outside_the_file_or_within_a_character() {
    let with = |key: &str, range: Value| json!({"text": null, "file": "a.txt", key: range});
    for range in [json!([0, 19]), json!([3, 3]), json!([5, 4]), json!([u64::MAX, 0])] {
        refuse_entry(with("bytes", range), &["\"p1\"", "`bytes`", "18 bytes", "start < end"]);
    }
    refuse_entry(with("bytes", json!([0, 7])), &["\"p1\"", "`bytes`", "byte 7", "UTF-8"]);
    for range in [json!([0, 1]), json!([2, 1]), json!([1, 4])] {
        refuse_entry(with("lines", range), &["\"p1\"", "`lines`", "3 lines", "1 <= first"]);
    }
    refuse_entry(json!({"bytes": [0, 1]}), &["\"p1\"", "`bytes`", "no file"]);
    refuse_entry(json!({"lines": [1, 1]}), &["\"p1\"", "`lines`", "no file"]);
    let both = json!({"text": null, "file": "a.txt", "bytes": [0, 1], "lines": [1, 1]});
    refuse_entry(both, &["\"p1\"", "not both"]);
}

#[test]
fn splits_that_make_no_sense() {
    refuse_entry(json!({"split": ""}), &["\"p1\"", "`split`", "empty"]);
    refuse_entry(
        json!({"text": null, "token_ids": [1], "split": "x"}),
        &["\"p1\"", "`split`", "cannot be split"],
    );
}

#[test]
fn ids_outside_the_vocabulary() {
    for id in [-1_i64, 2048, i64::MAX] {
        let ids = json!({"text": null, "token_ids": [1, id]});
        refuse_entry(ids, &["\"p1\"", "`token_ids`", &id.to_string(), "from 0 to 2047"]);
        refuse_entry(
            json!({"prefix_tokens": [id]}),
            &["\"p1\"", "`prefix_tokens`", &id.to_string(), "from 0 to 2047"],
        );
    }
    refuse_entry(json!({"text": null, "token_ids": [1.5]}), &["\"p1\"", "1.5"]);
}

#[test]
fn a_prefix_token_the_tokenizer_lacks() {
    refuse_entry(
        json!({"prefix_tokens": ["<nope>"]}),
        &["\"p1\"", "`prefix_tokens`", "<nope>", "tokenizer.json"],
    );
}

#[test]
fn no_prefix_named_anywhere() {
    let dir = tempfile::tempdir().unwrap();
    let plan = json!({"version": 1, "prompts": [entry(json!({}))]});
    refused(seal_in(dir.path(), &plan.to_string(), None), &["\"p1\"", "`prefix_tokens`", "[] for none"]);
}

#[test]
fn max_tokens_out_of_bounds() {
    refuse_entry(json!({"max_tokens": 65}), &["\"p1\"", "`max_tokens`", "65", "max_position_embeddings, 64"]);
    refuse_entry(json!({"max_tokens": 1}), &["\"p1\"", "`max_tokens`", "prefix of 1", "at least 2"]);
    refuse_entry(json!({"max_tokens": 0}), &["\"p1\"", "`max_tokens`"]);
}

#[test]
fn a_prompt_longer_than_the_positions_is_not_cut_silently() {
    let ids = json!({"text": null, "token_ids": vec![3; 64]});
    refuse_entry(ids, &["\"p1\"", "65 tokens", "max_position_embeddings, 64"]);
}

#[test]
fn a_tokenizer_that_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    refused(TextEncoder::from_file(&path), &["tokenizer.json"]);
    for text in ["", "{}", "[]", "null", "5", "{\"model\": {}}", "\u{feff}{}"] {
        std::fs::write(&path, text).unwrap();
        refused(TextEncoder::from_file(&path), &["tokenizer.json", "not a tokenizer"]);
    }
    std::fs::write(&path, b"\xff\xfe\x00").unwrap();
    refused(TextEncoder::from_file(&path), &["tokenizer.json", "not a tokenizer"]);
}

#[test]
fn a_tokenizer_that_is_cut_short() {
    let whole = std::fs::read(root().join("models/tiny/tokenizer.json")).unwrap();
    let path = Path::new("tokenizer.json");
    let end = whole.trim_ascii_end().len();
    let lengths = (0..200).chain((1..40).map(|part| end * part / 40)).chain([end - 1]);
    for length in lengths {
        refused(TextEncoder::parse(path, &whole[..length]), &["tokenizer.json", "not a tokenizer"]);
    }
}

/// A tokenizer that knows words and nothing else.
fn words(vocabulary: Value) -> TextEncoder {
    let file = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}});
    TextEncoder::parse(Path::new("words.json"), file.to_string().as_bytes()).unwrap()
}

#[test]
fn a_tokenizer_of_another_vocabulary() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("my plan.json");
    let plan = json!({"version": 1, "prefix_tokens": [], "prompts": [entry(json!({}))]});
    std::fs::write(&path, plan.to_string()).unwrap();
    let plan = Plan::load(&path).unwrap();
    let sealed = |encoder: &TextEncoder| {
        let context =
            SealContext { encoder, vocab_size: 2048, max_position_embeddings: 64, default_prefix: None };
        seal(&plan, &context)
    };
    assert_eq!(sealed(&words(json!({"hello": 0, "world": 2047}))).unwrap().prompts[0].token_ids, [0, 2047]);
    // Ids beyond the model's vocabulary, words it does not know and has no id for, and no words at all.
    refused(
        sealed(&words(json!({"hello": 0, "world": 2048}))),
        &["my plan.json", "\"p1\"", "`text`", "token id 2048", "from 0 to 2047"],
    );
    refused(sealed(&words(json!({"hello": 0}))), &["my plan.json", "\"p1\"", "`text`", "words.json"]);
    refused(sealed(&words(json!({}))), &["my plan.json", "\"p1\"", "`text`", "words.json"]);
}

#[test]
fn truncation_and_padding_of_a_tokenizer_file_are_switched_off() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    let mut file: Value =
        serde_json::from_slice(&std::fs::read(root().join("models/tiny/tokenizer.json")).unwrap()).unwrap();
    file["truncation"] =
        json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0});
    std::fs::write(&path, file.to_string()).unwrap();
    let text = "one two three four five six seven";
    let encoder_with_truncation = TextEncoder::from_file(&path).unwrap();
    assert_eq!(encoder_with_truncation.encode(text).unwrap(), encoder().encode(text).unwrap());
}

#[test]
fn a_sealed_plan_reads_back_and_any_change_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("CORPUS_PLAN.json");
    let entries = json!([entry(json!({})), entry(json!({"id": "p2", "use": "evaluate"}))]);
    let sealed = seal_entries(&entries).unwrap();
    let hash = sealed.write(&path).unwrap();
    assert_eq!(hash, walk::store::sha256_file(&path).unwrap());
    let read = CorpusPlan::load(&path).unwrap();
    assert_eq!(read, sealed);
    assert_eq!(read.hash().unwrap(), sealed.hash().unwrap());

    let text = std::fs::read_to_string(&path).unwrap();
    let mut changes: Vec<(&str, String)> = vec![
        ("canonical", format!("{text} ")),
        ("calibration_rows", text.replace("\"calibration_rows\":", "\"calibration_rows\":1")),
        ("schema", text.replace("plan-v1", "plan-v9")),
        ("token_ids_sha256", text.replacen("\"token_ids\":[0,", "\"token_ids\":[1,", 1)),
        ("row_offset", text.replace("\"row_offset\":0", "\"row_offset\":1")),
        ("domain", text.replace("\"evaluate\":[\"p2\"]", "\"evaluate\":[]")),
        ("unknown field", text.replace("\"schema\":", "\"x\":1,\"schema\":")),
        ("CORPUS_PLAN.json", text[..text.len() / 2].to_owned()),
    ];
    for (part, changed) in changes.drain(..) {
        assert_ne!(changed, text, "{part}");
        std::fs::write(&path, changed).unwrap();
        refused(CorpusPlan::load(&path), &["CORPUS_PLAN.json", part]);
    }
}
