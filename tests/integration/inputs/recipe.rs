//! Refusals of recipes.

use serde_json::{Value, json};
use walk::config::Recipe;

use super::support::{refused, root};

/// The tiny model's recipe with `field` (a path with dots) set to `value`, or taken out where that is null.
fn with(field: &str, value: Value) -> walk::Result<Recipe> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("my recipe.json");
    let mut recipe: Value =
        serde_json::from_slice(&std::fs::read(root().join("models/tiny/recipe.json")).unwrap()).unwrap();
    let (parents, key) = field.rsplit_once('.').map_or((None, field), |(parents, key)| (Some(parents), key));
    let object = match parents {
        Some(parent) => &mut recipe[parent],
        None => &mut recipe,
    };
    if value.is_null() {
        object.as_object_mut().unwrap().remove(key).unwrap();
    } else {
        object[key] = value;
    }
    std::fs::write(&path, recipe.to_string()).unwrap();
    Recipe::choose(path.to_str().unwrap(), None)
}

#[track_caller]
fn refuse(field: &str, value: Value, parts: &[&str]) {
    let mut parts = parts.to_vec();
    parts.push("my recipe.json");
    refused(with(field, value), &parts);
}

#[test]
fn the_shipped_recipes_load_with_the_pinned_values() {
    let glm52 = Recipe::load(root().join("models/glm52/recipe.json")).unwrap();
    assert_eq!((glm52.fixed_point_iterations, glm52.holdout_rows, glm52.min_fit_rows), (4, 4096, 1024));
    assert_eq!((glm52.floor_bits, &glm52.candidate_bits[..], glm52.fit_modulus), (3, &[3, 4, 5][..], 5));
    assert_eq!(glm52.sigma_reg.0, 0.025);
    assert_eq!(glm52.install_tolerance.max_abs.0, 2.0_f64.powi(-5));
    assert_eq!(glm52.install_tolerance.relative_l2.0, 2.0_f64.powi(-9));
    assert!(!glm52.allow_same_source_and_carrier);
    assert_eq!(glm52, Recipe::built_in().unwrap());
    let tiny = Recipe::load(root().join("models/tiny/recipe.json")).unwrap();
    assert!(tiny.allow_same_source_and_carrier);
    assert_eq!(tiny.upgrades(24).unwrap(), 12);
}

#[test]
fn every_choice_of_the_command_line_is_understood() {
    let path = root().join("models/tiny/recipe.json");
    let choose = |choice: &str| Recipe::choose(choice, Some(&path)).unwrap();
    assert_eq!(choose("default"), choose(path.to_str().unwrap()));
    let fast = choose("fast");
    assert_eq!((fast.draws, fast.fixed_point_iterations, fast.refinement_sweeps), (1, 1, 0));
    for bits in 3..=5 {
        let uniform = choose(&format!("uniform-{bits}"));
        assert_eq!((uniform.fixed_bits, uniform.upgrades(7).unwrap()), (Some(bits), 0));
        assert!(uniform.allow_same_source_and_carrier);
    }
}

#[test]
fn an_unknown_choice() {
    refused(Recipe::choose("uniform-9", None), &["--recipe", "uniform-9", "uniform-3", "recipe.json"]);
}

#[test]
fn an_unknown_key_a_missing_key_and_a_key_twice() {
    refuse("sigma", json!(1), &["unknown field `sigma`", "line 1"]);
    refuse("target.x", json!(1), &["unknown field `x`"]);
    refuse("draws", Value::Null, &["missing field `draws`"]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("my recipe.json");
    std::fs::write(&path, "{\"draws\": 1,\n\"draws\": 2}").unwrap();
    refused(Recipe::load(&path), &["my recipe.json", "\"draws\" occurs twice", "line 2"]);
}

#[test]
fn every_value_out_of_range_is_named_with_its_range() {
    for (field, value, wanted) in [
        ("recipe_version", json!(""), "1 to 64"),
        ("recipe_version", json!("a/b"), "1 to 64"),
        ("marker", json!("OTHER"), "CODEX_ROUND7"),
        ("floor_bits", json!(1), "2 to 6"),
        ("floor_bits", json!(4), "consecutive"),
        ("candidate_bits", json!([3, 5]), "consecutive"),
        ("candidate_bits", json!([3, 4, 5, 6, 7]), "bits from 2 to 6"),
        ("candidate_bits", json!([]), "consecutive"),
        ("candidate_bits", json!([3, 4, 4]), "consecutive"),
        ("target", json!({"numerator": 7, "denominator": 0}), "between the floor and the highest"),
        ("target", json!({"numerator": 5, "denominator": 2}), "between the floor and the highest"),
        ("target", json!({"numerator": 11, "denominator": 2}), "between the floor and the highest"),
        ("fixed_bits", json!(3), "only candidate"),
        ("sigma_reg", json!(0), "above 0"),
        ("sigma_reg", json!("-0.1"), "above 0"),
        ("sigma_reg", json!(1.5), "at most 1"),
        ("draws", json!(0), "1 to 16"),
        ("draws", json!(17), "1 to 16"),
        ("shared_sample_experts", json!(0), "1 to"),
        ("holdout_rows", json!(0), "1 to"),
        ("min_fit_rows", json!(0), "1 to"),
        ("fit_modulus", json!(1), "2 to 1000"),
        ("fixed_point_iterations", json!(0), "1 to 64"),
        ("refinement_sweeps", json!(17), "0 to 16"),
        ("scale_sample_tiles", json!(0), "1 to"),
        ("interaction_tolerance.relative", json!(0), "above 0"),
        ("interaction_tolerance.absolute", json!(-1), "above 0"),
        ("install_tolerance.max_abs", json!("0"), "above 0"),
        ("install_tolerance.relative_l2", json!(11), "at most 10"),
    ] {
        refuse(field, value, &[field, wanted]);
    }
}

#[test]
fn values_of_the_wrong_kind() {
    refuse("sigma_reg", json!("NaN"), &["\"NaN\" is no finite number", "line 1"]);
    refuse("sigma_reg", json!([]), &["a number or a decimal string"]);
    refuse("draws", json!(-1), &["-1"]);
    refuse("draws", json!(1.5), &["1.5"]);
    refuse("codec", json!("gptq"), &["unknown variant `gptq`", "`trellis`"]);
    refuse("codebook", json!("mul1"), &["unknown variant `mul1`", "`mcg`"]);
}

#[test]
fn a_missing_recipe_file() {
    refused(Recipe::load("nowhere/recipe.json"), &["nowhere/recipe.json"]);
}

#[test]
fn huge_targets_do_not_overflow() {
    let huge = json!({"numerator": u64::MAX, "denominator": u64::MAX / 4});
    refused(with("target", huge).and_then(|recipe| recipe.upgrades(u64::MAX)), &["target"]);
}

#[test]
fn a_file_that_is_no_object() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("my recipe.json");
    for text in ["[]", "null", "5", "\"default\"", "[{}]"] {
        std::fs::write(&path, text).unwrap();
        refused(Recipe::load(&path), &["my recipe.json", "expected an object"]);
    }
    refuse("target", json!([7, 2]), &["invalid type: sequence, expected an object"]);
    refuse("interaction_tolerance", json!([0.1, 0.1]), &["invalid type: sequence, expected an object"]);
    for bytes in [&b""[..], b"\xff\xfe{", b"{\"marker\": \"\xff\"}", b"{} {}"] {
        std::fs::write(&path, bytes).unwrap();
        refused(Recipe::load(&path), &["my recipe.json", "line 1"]);
    }
}

#[test]
fn every_prefix_of_a_recipe_is_refused() {
    let whole = std::fs::read_to_string(root().join("models/tiny/recipe.json")).unwrap();
    let whole = whole.trim_end();
    for length in 0..whole.len() {
        refused(Recipe::parse("my recipe.json".as_ref(), &whole.as_bytes()[..length]), &["my recipe.json"]);
    }
}

#[test]
fn numbers_of_the_wrong_size() {
    for (field, value) in
        [("draws", "4294967296"), ("holdout_rows", "18446744073709551616"), ("sigma_reg", "1e999")]
    {
        let text = std::fs::read_to_string(root().join("models/tiny/recipe.json")).unwrap();
        let (before, after) = text.split_once(&format!("\"{field}\":")).unwrap();
        let after = &after[after.find(',').unwrap()..];
        let text = format!("{before}\"{field}\": {value}{after}");
        refused(Recipe::parse("my recipe.json".as_ref(), text.as_bytes()), &["my recipe.json", "line "]);
    }
}

/// Values are shown as the file spells them, not as this program holds them.
#[test]
fn refusals_speak_json() {
    for (field, value, shown) in [
        ("fixed_bits", json!(3), "fixed_bits is 3;"),
        ("permutations", json!(["energy_balanced"]), "permutations is [\"energy_balanced\"];"),
        ("permutations", json!(["identity", "identity"]), "permutations is [\"identity\",\"identity\"];"),
        ("scale_families", json!(["quarter_rms"]), "scale_families is [\"quarter_rms\"];"),
        ("candidate_bits", json!([3, 5]), "candidate_bits is [3, 5];"),
        ("target", json!({"numerator": 5, "denominator": 2}), "target is 5/2;"),
    ] {
        refuse(field, value, &[shown]);
    }
}

#[test]
fn what_is_wrong_with_a_good_recipe_later_names_its_file_too() {
    let recipe = with("target", json!({"numerator": 10, "denominator": 3})).unwrap();
    refused(recipe.upgrades(10), &["my recipe.json", "`target`", "no whole number of upgrades"]);
    refused(recipe.clone().uniform(7), &["my recipe.json", "`floor_bits`", "2 to 6"]);
    // Where a recipe lies is no part of what it is.
    let elsewhere = Recipe::parse("other.json".as_ref(), &walk::store::canonical(&recipe).unwrap()).unwrap();
    assert_eq!(elsewhere, recipe);
    assert_eq!(elsewhere.identity_hash().unwrap(), recipe.identity_hash().unwrap());
}
