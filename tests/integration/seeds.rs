//! The whole layer against the thin one over five recipe seeds, declared here before any was run. KL divergence on a small
//! model is tail-driven: one seed says little, and choosing one by its KL would be cheating. Twenty minutes, so it runs on
//! demand: `cargo test --release -- --ignored --nocapture five_seeds`.

use serde_json::json;

use super::tiny_walk::{plain, recipe, walk};

/// The recipe version is a part of every seed.
const VERSIONS: [&str; 5] = ["round7-1", "round7-1.s1", "round7-1.s2", "round7-1.s3", "round7-1.s4"];

#[test]
#[ignore = "twenty minutes"]
fn five_seeds_of_the_whole_layer_are_not_worse_than_of_the_thin_one() {
    let folder = tempfile::tempdir().unwrap();
    let (mut changes, mut logs) = (Vec::new(), Vec::new());
    for (number, version) in VERSIONS.iter().enumerate() {
        let run = |kind: &str, mut fields: serde_json::Value| {
            let name = format!("{kind}-{number}");
            fields["recipe_version"] = json!(version);
            walk(&folder.path().join(&name), &recipe(folder.path(), &format!("{name}-recipe"), fields), "2")
        };
        let (thin, whole) = (run("thin", plain()), run("whole", json!({})));
        changes.push(whole.score("kl_mean") - thin.score("kl_mean"));
        logs.extend(whole.heldout().iter().zip(thin.heldout()).map(|(a, b)| (a / b).ln()));
    }
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let change = mean(&changes);
    let variance = changes.iter().map(|x| (x - change).powi(2)).sum::<f64>() / (changes.len() - 1) as f64;
    let error = (variance / changes.len() as f64).sqrt();
    // Student's t with four degrees of freedom, both sides 95 %.
    println!("KL, whole less thin: {change:.6} ± {error:.6} (95 % interval ± {:.6})", 2.776 * error);
    println!("held-out error, whole over thin, geometric mean: {:.4}", mean(&logs).exp());
    assert!(mean(&logs).exp() <= 0.92);
    assert!(change <= error, "{change} ± {error}");
}
