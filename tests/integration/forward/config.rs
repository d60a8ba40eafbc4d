//! What a config may say, and what it may not: each trap of the geometry as a test.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};
use walk::checkpoint::structure::{check_layers, check_tied_head};
use walk::checkpoint::{CheckpointDir, Reconstruction};
use walk::config::Geometry;
use walk::store::{TensorData, write_safetensors};
use walk::walk::preflight::check_tensors;

use crate::support::{FileWeights, repository};

fn config(path: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(repository(path)).unwrap()).unwrap()
}

fn tiny() -> Value {
    config("models/tiny/config.json")
}

/// The tiny config with fields replaced; `null` stands for an absent field.
fn with(changes: &[(&str, Value)]) -> Value {
    let mut config = tiny();
    for (field, value) in changes {
        config[*field] = value.clone();
    }
    config
}

fn read(config: &Value) -> walk::Result<Geometry> {
    Geometry::from_json(config, Path::new("config.json"))
}

/// Must be refused as bad input, naming the file and `field`.
fn refused(changes: &[(&str, Value)], field: &str) {
    let error = read(&with(changes)).expect_err(&format!("{changes:?} was taken"));
    let text = error.to_string();
    assert!(text.contains("config.json") && text.contains(&format!("`{field}`")), "{changes:?}: {text}");
    assert!(text.contains("wanted: "), "{text}");
    assert_eq!(error.exit_code(), 2);
}

fn full_layers(config: &Value) -> Vec<usize> {
    let geometry = read(config).unwrap();
    (0..geometry.num_hidden_layers).filter(|layer| geometry.indexer_is_full(*layer)).collect()
}

#[test]
fn glm52_reads_as_published() {
    let geometry = Geometry::read(&repository("models/glm52/config.json")).unwrap();
    assert_eq!((geometry.hidden_size, geometry.num_hidden_layers, geometry.vocab_size), (6144, 78, 154880));
    assert_eq!((geometry.n_routed_experts, geometry.num_experts_per_tok), (256, 8));
    assert_eq!(geometry.moe_layers(), (3..78).collect::<Vec<_>>());
    assert_eq!((geometry.first_moe_layer(), geometry.mtp_layer()), (3, 78));
    assert!(!geometry.is_moe(78) && !geometry.indexer_is_full(78), "the MTP block is no decoder layer");
    assert_eq!((0..78).filter(|layer| geometry.indexer_is_full(*layer)).count(), 21);
    assert_eq!(geometry.rope.theta, 8e6);
    assert_eq!((geometry.qk_rope_head_dim, geometry.qk_head_dim()), (64, 256));
    assert_eq!(geometry.rms_norm_eps, 1e-5);
}

#[test]
fn the_golden_configs_read_although_they_lack_switches() {
    for case in ["base", "groups", "short"] {
        Geometry::read(&repository(&format!("tests/golden/forward/{case}/config.json"))).unwrap();
    }
}

#[test]
fn head_dim_is_not_the_rotary_width() {
    let geometry = read(&tiny()).unwrap();
    assert_eq!(read(&with(&[("head_dim", json!(64))])).unwrap(), geometry);
    assert_eq!(read(&with(&[("head_dim", Value::Null)])).unwrap(), geometry);
}

#[test]
fn switches_say_what_is_computed_or_nothing() {
    for (field, other) in [
        ("scoring_func", json!("softmax")),
        ("topk_method", json!("greedy")),
        ("hidden_act", json!("gelu")),
        ("mlp_bias", json!(true)),
        ("rope_interleave", json!(false)),
        ("indexer_rope_interleave", json!(false)),
        ("moe_router_dtype", json!("bfloat16")),
    ] {
        read(&with(&[(field, Value::Null)])).unwrap();
        refused(&[(field, other)], field);
        refused(&[(field, json!(7))], field);
    }
    refused(&[("model_type", json!("deepseek_v3"))], "model_type");
    refused(&[("model_type", Value::Null)], "model_type");
}

#[test]
fn sizes_are_there_positive_and_bounded() {
    for field in [
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
        "n_shared_experts",
        "moe_intermediate_size",
        "num_attention_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "max_position_embeddings",
    ] {
        for value in [Value::Null, json!(0), json!(-1), json!(1.5), json!("8"), json!(1u64 << 40)] {
            refused(&[(field, value)], field);
        }
    }
    for field in ["rms_norm_eps", "routed_scaling_factor"] {
        for value in [Value::Null, json!(0), json!(-1.0), json!("1"), json!(1e40)] {
            refused(&[(field, value)], field);
        }
    }
    assert!(read(&json!([])).is_err());
}

#[test]
fn related_sizes_agree() {
    refused(&[("num_key_value_heads", json!(2))], "num_key_value_heads");
    refused(&[("qk_head_dim", json!(64))], "qk_head_dim");
    refused(&[("qk_rope_head_dim", json!(15)), ("qk_head_dim", json!(47))], "qk_rope_head_dim");
    refused(&[("index_head_dim", json!(8))], "qk_rope_head_dim");
    refused(&[("n_group", json!(3))], "n_group");
    refused(&[("n_group", json!(8))], "n_group");
    refused(&[("topk_group", json!(2))], "topk_group");
    refused(&[("n_group", json!(4)), ("num_experts_per_tok", json!(3))], "num_experts_per_tok");
}

#[test]
fn dense_layers_are_listed_or_counted() {
    let dense = json!(["dense", "sparse", "dense", "sparse", "dense"]);
    assert_eq!(read(&with(&[("mlp_layer_types", dense)])).unwrap().moe_layers(), [1, 3], "the list decides");
    let counted = |count: usize| [("mlp_layer_types", Value::Null), ("first_k_dense_replace", json!(count))];
    assert_eq!(read(&with(&counted(0))).unwrap().moe_layers(), [0, 1, 2, 3, 4]);
    assert_eq!(read(&with(&counted(4))).unwrap().first_moe_layer(), 4);
    refused(&counted(5), "mlp_layer_types");
    refused(
        &[("mlp_layer_types", Value::Null), ("first_k_dense_replace", Value::Null)],
        "first_k_dense_replace",
    );
    refused(&[("mlp_layer_types", json!(["dense", "sparse"]))], "mlp_layer_types");
    refused(&[("mlp_layer_types", json!(["dense", "moe", "sparse", "sparse", "sparse"]))], "mlp_layer_types");
    refused(&[("mlp_layer_types", Value::Null), ("moe_layer_freq", json!(2))], "moe_layer_freq");
}

#[test]
fn the_indexer_schedule_is_listed_or_a_pattern_or_computed() {
    let types = json!(["full", "shared", "full", "shared", "shared"]);
    let listed = with(&[("indexer_types", types), ("index_topk_pattern", json!("FFFFF"))]);
    assert_eq!(full_layers(&listed), [0, 2], "the list decides");
    let pattern = with(&[("indexer_types", Value::Null), ("index_topk_pattern", json!("FSSFS"))]);
    assert_eq!(full_layers(&pattern), [0, 3], "then the pattern");
    let computed = |frequency: Value, offset: Value| {
        let changes = [("index_topk_freq", frequency), ("index_skip_topk_offset", offset)];
        let mut config = with(&[("indexer_types", Value::Null)]);
        for (field, value) in changes {
            config[field] = value;
        }
        full_layers(&config)
    };
    // Layer i is full iff max(i - offset + 1, 0) is a multiple of the frequency.
    assert_eq!(computed(json!(2), json!(3)), [0, 1, 2, 4]);
    assert_eq!(computed(json!(4), json!(3)), [0, 1, 2]);
    assert_eq!(computed(json!(2), Value::Null), [0, 1, 3], "the default offset is 2");
    assert_eq!(computed(Value::Null, json!(3)), [0, 1, 2, 3, 4], "the default frequency is 1");
    assert_eq!(computed(json!(0), json!(3)), [0, 1, 2, 3, 4], "a frequency of 0 counts as 1");
    // The published list of GLM-5.2 is what its frequency and offset give.
    let mut glm52 = config("models/glm52/config.json");
    let published = full_layers(&glm52);
    glm52["indexer_types"] = Value::Null;
    assert_eq!(full_layers(&glm52), published);
}

#[test]
fn the_first_layer_is_full_and_every_layer_is_named() {
    let shared = json!(["shared", "full", "full", "full", "full"]);
    refused(&[("indexer_types", shared)], "indexer_types");
    refused(&[("indexer_types", json!(["full"]))], "indexer_types");
    refused(&[("indexer_types", json!(["full", "full", "full", "full", "half"]))], "indexer_types");
    for pattern in ["SFFFF", "FFFF", "FFFFFF", "FFXFF", "fffff"] {
        refused(
            &[("indexer_types", Value::Null), ("index_topk_pattern", json!(pattern))],
            "index_topk_pattern",
        );
    }
    let offset = [("index_skip_topk_offset", json!(0)), ("index_topk_freq", json!(2))];
    let mut changes = vec![("indexer_types", Value::Null)];
    changes.extend(offset);
    refused(&changes, "index_topk_freq");
}

#[test]
fn rope_theta_is_nested_or_at_top_level_and_never_two_things() {
    let theta = |changes: &[(&str, Value)]| read(&with(changes)).unwrap().rope.theta;
    assert_eq!(theta(&[]), 1e4);
    assert_eq!(theta(&[("rope_parameters", Value::Null), ("rope_theta", json!(5e5))]), 5e5);
    assert_eq!(theta(&[("rope_theta", json!(10000))]), 1e4, "twice the same is fine");
    refused(&[("rope_theta", json!(5e5))], "rope_parameters.rope_theta");
    refused(&[("rope_parameters", Value::Null)], "rope_theta");
    refused(&[("rope_parameters", json!("default"))], "rope_parameters");
}

#[test]
fn rope_objects_of_two_spellings_say_the_same_or_are_refused() {
    let yarn = json!({"rope_type": "yarn", "factor": 4, "mscale_all_dim": 1.0, "rope_theta": 1e4,
        "original_max_position_embeddings": 1024});
    let both = |old: Value| [("rope_parameters", yarn.clone()), ("rope_scaling", old)];
    read(&with(&both(json!({"type": "yarn", "factor": 4.0})))).unwrap();
    refused(&both(json!({"type": "yarn", "factor": 8.0})), "rope_scaling.factor");
    refused(&both(json!({"type": "default"})), "rope_scaling.type");
    refused(&both(json!({"rope_type": "linear"})), "rope_scaling.rope_type");
    refused(&both(json!({"rope_theta": 5e5})), "rope_scaling.rope_theta");
    refused(&both(json!([])), "rope_scaling");
    // A stretch without a type would be left out without a word.
    refused(&[("rope_scaling", json!({"factor": 4.0}))], "rope_scaling.factor");
    let untyped = json!({"rope_theta": 1e4, "factor": 4.0});
    refused(&[("rope_parameters", untyped)], "rope_parameters.factor");
    refused(&[("rope_parameters", json!({}))], "rope_theta");
    let error = read(&with(&[("rope_theta", json!(5e5))])).unwrap_err().to_string();
    assert!(error.ends_with("wanted: what the file says elsewhere, 500000"), "{error}");
}

#[test]
fn other_rope_types_are_refused_but_yarn_with_mscale_all_dim() {
    let rope = |rope: Value| [("rope_parameters", rope)];
    for kind in ["linear", "dynamic", "llama3", "longrope"] {
        let parameters = json!({"rope_theta": 1e4, "rope_type": kind, "factor": 2.0, "mscale_all_dim": 1.0});
        refused(&rope(parameters), "rope_parameters.rope_type");
    }
    refused(
        &rope(json!({"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0})),
        "rope_parameters.mscale_all_dim",
    );
    refused(&rope(json!({"rope_theta": 1e4, "rope_type": 3})), "rope_parameters.rope_type");
    let old = [("rope_parameters", Value::Null), ("rope_theta", json!(1e4))];
    let mut linear = old.to_vec();
    linear.push(("rope_scaling", json!({"type": "linear", "factor": 2.0})));
    refused(&linear, "rope_scaling.rope_type");
    let yarn = json!({"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024});
    let rope = read(&with(&rope(yarn))).unwrap().rope;
    assert_eq!(rope.yarn.unwrap().factor, 4.0);
}

#[test]
fn indexer_tensors_agree_with_the_schedule_layer_by_layer() {
    let folder = repository("models/tiny");
    let weights = FileWeights::open(&folder);
    read(&tiny()).unwrap().check_indexer_tensors(&weights).unwrap();
    // As many full layers, but another one: counting would not see it. The MTP block's indexer is not looked at.
    let moved = json!(["full", "full", "full", "full", "shared"]);
    let geometry = read(&with(&[("indexer_types", moved)])).unwrap();
    let error = geometry.check_indexer_tensors(&weights).unwrap_err().to_string();
    assert!(error.contains("layer 3") && error.contains("missing"), "{error}");
    let fewer = json!(["full", "full", "shared", "shared", "full"]);
    let geometry = read(&with(&[("indexer_types", fewer)])).unwrap();
    let error = geometry.check_indexer_tensors(&weights).unwrap_err().to_string();
    assert!(error.contains("layer 2") && error.contains("present"), "{error}");
    // One of the five tensors is enough to be noticed.
    let mut weights = weights;
    weights.0.remove("model.layers.4.self_attn.indexer.k_norm.bias").unwrap();
    let error = read(&tiny()).unwrap().check_indexer_tensors(&weights).unwrap_err().to_string();
    assert!(error.contains("layer 4") && error.contains("k_norm.bias"), "{error}");
}

#[test]
fn a_file_that_is_no_config_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    assert!(Geometry::read(&path).unwrap_err().to_string().contains("config.json"));
    std::fs::write(&path, "{").unwrap();
    assert!(Geometry::read(&path).unwrap_err().to_string().contains("not JSON"));
    // Longer than any config: not read at all.
    std::fs::File::create(&path).unwrap().set_len((16 << 20) + 1).unwrap();
    assert!(Geometry::read(&path).unwrap_err().to_string().contains("at most 16777216 bytes"));
}

#[test]
fn a_config_that_is_no_object_or_says_a_thing_twice() {
    let refused = |bytes: &[u8], part: &str| {
        let error = Geometry::parse(Path::new("config.json"), bytes).unwrap_err();
        assert!(
            error.to_string().starts_with("config.json: ") && error.to_string().contains(part),
            "{error}"
        );
        assert_eq!(error.exit_code(), 2);
    };
    for text in ["[]", "[{}]", "null", "5", "\"glm_moe_dsa\""] {
        refused(text.as_bytes(), "not a JSON object");
    }
    refused(b"", "not JSON");
    refused(b"{\"model_type\": \"\xff\"}", "not JSON");
    refused("[".repeat(100_000).as_bytes(), "not JSON");
    let twice = tiny().to_string().replacen('{', "{\"num_hidden_layers\": 4,", 1);
    refused(twice.as_bytes(), "\"num_hidden_layers\" occurs twice");
    let whole = tiny().to_string();
    for length in 0..whole.len() {
        refused(&whole.as_bytes()[..length], "not JSON");
    }
}

/// The lists decide, as in Transformers; the tensors then have to be those of the lists.
#[test]
fn a_list_that_contradicts_the_tensors_is_named_by_layer() {
    let checkpoint = Reconstruction::open(repository("models/tiny")).unwrap();
    let check = |changes: &[(&str, Value)]| {
        check_tensors(&read(&with(changes)).unwrap(), &checkpoint).unwrap_err().to_string()
    };
    check_tensors(&read(&tiny()).unwrap(), &checkpoint).unwrap();
    let types = |words: [&str; 5]| [("mlp_layer_types", json!(words))];
    let error = check(&types(["dense", "dense", "dense", "sparse", "sparse"]));
    assert!(error.contains("model.layers.2.mlp.gate_proj.weight"), "{error}");
    let error = check(&types(["dense", "sparse", "sparse", "sparse", "sparse"]));
    assert!(error.contains("model.layers.1.mlp."), "{error}");
    let counted = [("mlp_layer_types", Value::Null), ("first_k_dense_replace", json!(3))];
    assert!(check(&counted).contains("model.layers.2.mlp.gate_proj.weight"));
    // A width that the trap of `head_dim` would give.
    let error = check(&[("qk_rope_head_dim", json!(8)), ("qk_head_dim", json!(40))]);
    assert!(error.contains("model.layers.0.self_attn."), "{error}");
}

#[test]
fn the_mtp_block_is_never_a_decoder_layer_and_no_layer_is_left_out() {
    let checkpoint = CheckpointDir::open(repository("models/tiny")).unwrap();
    let check = |layers: usize| {
        let cut = |field: &str, fill: &str| {
            let mut words = tiny()[field].as_array().unwrap().clone();
            words.resize(layers, json!(fill));
            (field.to_owned(), Value::Array(words))
        };
        let mut config = with(&[("num_hidden_layers", json!(layers))]);
        for (field, words) in [cut("mlp_layer_types", "sparse"), cut("indexer_types", "full")] {
            config[field] = words;
        }
        check_layers(&read(&config).unwrap(), &checkpoint)
    };
    check(5).unwrap();
    let refused = |layers: usize, parts: &[&str]| {
        let error = check(layers).unwrap_err();
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        assert!(text.contains(&format!("num_hidden_layers is {layers}")), "{text}");
        assert_eq!(error.exit_code(), 2);
    };
    refused(6, &["field `num_hidden_layers`", "layer 5", "eh_proj", "MTP block", "wanted: at most 5"]);
    refused(4, &["field `num_hidden_layers`", "layer 4", "model.layers.4.", "no MTP block"]);
}

#[test]
fn a_head_beside_tied_embeddings_is_the_embeddings() {
    let tied = read(&with(&[("tie_word_embeddings", json!(true)), ("vocab_size", json!(3))])).unwrap();
    let untied = read(&with(&[("vocab_size", json!(3))])).unwrap();
    let values: Vec<half::bf16> = (0..6).map(|i| half::bf16::from_f32(i as f32)).collect();
    let check = |geometry: &Geometry, head: Option<TensorData<'_>>| {
        let dir = tempfile::tempdir().unwrap();
        let mut tensors = vec![TensorData::bf16("model.embed_tokens.weight", &[3, 2], &values)];
        tensors.extend(head);
        write_safetensors(dir.path().join("model.safetensors"), &BTreeMap::new(), &tensors).unwrap();
        check_tied_head(geometry, &CheckpointDir::open(dir.path()).unwrap())
    };
    let mut other = values.clone();
    other[5] = half::bf16::from_f32(5.5);
    let single: Vec<f32> = values.iter().map(|x| x.to_f32()).collect();
    check(&tied, None).unwrap();
    check(&tied, Some(TensorData::bf16("lm_head.weight", &[3, 2], &values))).unwrap();
    for head in [
        TensorData::bf16("lm_head.weight", &[3, 2], &other),
        TensorData::bf16("lm_head.weight", &[2, 3], &values),
        TensorData::f32("lm_head.weight", &[3, 2], &single),
    ] {
        let text = check(&tied, Some(head.clone())).unwrap_err().to_string();
        for part in ["model.safetensors", "`tie_word_embeddings`", "tensor lm_head.weight", "differs"] {
            assert!(text.contains(part), "{text}");
        }
        check(&untied, Some(head)).unwrap();
    }
}
