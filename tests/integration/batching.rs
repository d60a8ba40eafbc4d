//! What a capture says of a prompt does not depend on the prompts beside it, and masses are sums of integers: neither the
//! order of the plan nor the size of a batch may show in them.

use std::path::Path;

use serde_json::{Value, json};
use walk::corpus::SealedPrompt;
use walk::corpus::batch::{BATCH_TOKENS, batches};
use walk::walk::capture::LayerCapture;

use crate::support::mini::noise;
use crate::support::repository;
use crate::support::stage::Stage;

fn stage(folder: &Path, prompts: &[Value]) -> Stage {
    let plan = folder.join("plan.json");
    std::fs::write(&plan, json!({"version": 1, "prompts": prompts}).to_string()).unwrap();
    Stage::new(&repository("models/tiny"), &plan, |_| {})
}

/// The bits of a prompt's rows in a capture made with prompts in this order.
fn rows(capture: &LayerCapture, order: &[&SealedPrompt], id: &str) -> Vec<u32> {
    let at = order.iter().position(|prompt| prompt.id == id).unwrap();
    let start: usize = order[..at].iter().map(|prompt| prompt.token_ids.len()).sum();
    let rows = start..start + order[at].token_ids.len();
    rows.flat_map(|row| capture.mlp_in.row(row).iter().map(|value| value.to_bits())).collect()
}

#[test]
fn mass_and_routing_do_not_depend_on_order_or_batches() {
    let folder = tempfile::tempdir().unwrap();
    let lengths = [70, 1, 130, 33, 64, 9];
    let prompts: Vec<Value> = lengths
        .iter()
        .enumerate()
        .map(|(i, &length)| noise(&format!("p{i}"), "calibrate", i as u64, length))
        .collect();
    let first = stage(folder.path(), &prompts);
    let plan_order = first.prompts();
    let whole = first.capture();
    assert!(
        whole.mass.units.iter().collect::<std::collections::BTreeSet<_>>().len() > 4,
        "masses that differ"
    );
    let (mut reversed, mut rotated) = (plan_order.clone(), plan_order.clone());
    reversed.reverse();
    rotated.rotate_left(2);
    let mut counts = Vec::new();
    for order in [&plan_order, &reversed, &rotated] {
        for limit in [1, 140, BATCH_TOKENS] {
            counts.push(batches(order, limit).len());
            let capture = first.capture_of(order, limit);
            // Masses, rows an expert, and by prompt the hashes of routing and of the experts' input.
            assert_eq!(capture.record, whole.record, "limit {limit}");
            assert_eq!(capture.mass, whole.mass);
            for prompt in order {
                let id = &prompt.id;
                assert_eq!(rows(&capture, order, id), rows(&whole, &plan_order, id), "prompt {id}");
            }
        }
    }
    counts.sort_unstable();
    counts.dedup();
    assert!(counts.len() >= 3, "the limits make different batches: {counts:?}");

    // The whole way from another plan: embeddings and dense layers in another order too.
    let other: Vec<Value> = [3, 5, 0, 4, 2, 1].map(|at: usize| prompts[at].clone()).to_vec();
    let capture = stage(folder.path(), &other).capture();
    assert_eq!(capture.record, whole.record);
    assert_ne!(capture.ids, whole.ids, "rows are in plan order");
}
