//! `FEASIBILITY_LAYER_NNN.json`: what a pilot took, and what the whole walk would take if all layers were like its own.
//!
//! It tells of times, so it is not sealed; it names the journal it was written beside.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::driver::{LayerOutcome, Outcome, Walk};
use super::sealed_files::FEASIBILITY_PREFIX;
use crate::error::{IoContext, Result};
use crate::estimate::project::{MeasuredLayer, Projection, ROLLING, project};
use crate::store::atomic::write_json_atomic;
use crate::store::hash::Hash;

/// A layer's stages in order: as they are timed, and how the names of their seals begin.
const STAGES: [(&str, &str); 8] = [
    ("capture", "capture"),
    ("search", "search"),
    ("probe", "probe-iter-"),
    ("allocation", "allocation-iter-"),
    ("final encode", "final-experts"),
    ("audit", "interaction-audit"),
    ("emit", "emit"),
    ("forward", "forward"),
];

/// The report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Feasibility {
    /// Always `walk-feasibility-v1`.
    pub schema: String,
    /// The layer the pilot stopped after.
    pub layer: usize,
    /// The journal's chain at that point.
    pub journal_head_sha256: Hash,
    /// SHA-256 of the recipe.
    pub recipe_sha256: String,
    /// Threads.
    pub threads: usize,
    /// Seconds of the stages outside layers.
    pub once_seconds: Vec<(String, f64)>,
    /// The layers walked so far.
    pub layers: Vec<PilotLayer>,
    /// The whole walk, projected from the stages that this run did in full; none where it did none.
    pub projection: Option<Projection>,
}

/// One layer of the pilot.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PilotLayer {
    /// The layer.
    pub layer: usize,
    /// Seconds this run spent, by stage.
    pub stage_seconds: Vec<(String, f64)>,
    /// Stages that an earlier run had sealed.
    pub resumed: Vec<String>,
    /// Stages that count in the projection: those this run did from beginning to end.
    pub counted: Vec<String>,
    /// Bytes it left, by kind.
    pub bytes: BTreeMap<String, u64>,
}

/// Where the report on a pilot lies, relative to the work directory.
pub fn feasibility_path(layer: usize) -> PathBuf {
    PathBuf::from(format!("{FEASIBILITY_PREFIX}{layer:03}.json"))
}

/// Makes the report of a pilot that stopped after `layer` and publishes it, unless it has no projection and there is an
/// earlier one; gives it and its path.
///
/// # Errors
/// Names the file that cannot be read or written.
pub fn write_feasibility(walk: &Walk, outcome: &Outcome, layer: usize) -> Result<(Feasibility, PathBuf)> {
    let mut layers = Vec::new();
    let mut measured = Vec::new();
    for done in &outcome.layers {
        let counted = counted(done);
        let bytes = bytes_of(walk, done.layer)?;
        let seconds =
            done.stage_seconds.iter().filter(|(stage, _)| counted.contains(stage)).cloned().collect();
        if !counted.is_empty() {
            measured.push(MeasuredLayer { layer: done.layer, stage_seconds: seconds, bytes: bytes.clone() });
        }
        layers.push(PilotLayer {
            layer: done.layer,
            stage_seconds: done.stage_seconds.clone(),
            resumed: done.resumed.clone(),
            counted,
            bytes,
        });
    }
    let in_layers = |stage: &str| STAGES.iter().any(|(name, _)| *name == stage);
    let once: Vec<(String, f64)> =
        outcome.stage_seconds.iter().filter(|(stage, _)| !in_layers(stage)).cloned().collect();
    let report = Feasibility {
        schema: "walk-feasibility-v1".to_owned(),
        layer,
        journal_head_sha256: walk.journal().head_sha256().clone(),
        recipe_sha256: walk.identity().get("recipe_sha256").cloned().unwrap_or_default(),
        threads: rayon::current_num_threads(),
        projection: match measured.is_empty() {
            true => None,
            false => Some(project(&walk.geometry, &once, &measured)?),
        },
        once_seconds: once,
        layers,
    };
    let path = walk.work().join(feasibility_path(layer));
    // A repeated command has nothing to say that the first one did not say better.
    if report.projection.is_some() || !path.exists() {
        write_json_atomic(&path, &report)?;
    }
    Ok((report, path))
}

/// The stages this run did from beginning to end: a stage that was sealed before is none of them, and neither is the one
/// that was in hand, whose first units may have been adopted.
fn counted(done: &LayerOutcome) -> Vec<String> {
    let ran = |stage: &str| done.stage_seconds.iter().any(|(name, _)| name == stage);
    let stages: Vec<&(&str, &str)> = STAGES.iter().filter(|(name, _)| ran(name)).collect();
    let sealed = |prefix: &str| done.resumed.iter().any(|stage| stage.starts_with(prefix));
    let first = match done.resumed.is_empty() {
        true => 0,
        false => stages.iter().rposition(|(_, prefix)| sealed(prefix)).map_or(1, |last| last + 2),
    };
    stages.into_iter().skip(first).map(|(name, _)| (*name).to_owned()).collect()
}

/// Bytes of the files that a layer's seals name, by kind; of the state after it as [`ROLLING`].
fn bytes_of(walk: &Walk, layer: usize) -> Result<BTreeMap<String, u64>> {
    let (prefix, mut bytes) = (format!("layer-{layer:03}/"), BTreeMap::new());
    for seal in walk.journal().seals().iter().filter(|seal| seal.stage.starts_with(&prefix)) {
        for name in seal.outputs.keys() {
            let path = walk.work().join(name);
            // A state that was followed by another is gone.
            if path.exists() {
                let length = std::fs::metadata(&path).at(&path)?.len();
                *bytes.entry(kind(Path::new(name)).to_owned()).or_insert(0) += length;
            }
        }
    }
    Ok(bytes)
}

fn kind(path: &Path) -> &'static str {
    let parts: Vec<&str> = path.iter().filter_map(|part| part.to_str()).collect();
    match parts[..] {
        ["states", ..] => ROLLING,
        ["v2", ..] => "v2",
        ["kaiju1", ..] => "kaiju1",
        [_, "routing", _] => "routing",
        [_, "final-experts", _] => "final experts",
        _ => "records",
    }
}

impl Feasibility {
    /// As text for people.
    pub fn render(&self) -> String {
        let mut text =
            format!("layer {} is sealed: the command without --pilot-stop-after-layer goes on\n", self.layer);
        match &self.projection {
            None => text.push_str(
                "no stage of a layer was done from beginning to end in this run: nothing to project from\n",
            ),
            Some(whole) => {
                let [low, high] = whole.hours_range;
                text.push_str(&format!(
                    "{}: {:.2} hours for the whole walk ({low:.2} to {high:.2}), {:.2} GB on disk; from {} of its {} layers\n",
                    whole.status,
                    whole.hours,
                    whole.bytes_in_all as f64 / 1e9,
                    whole.layers_measured,
                    whole.layers
                ));
                let known = |stage: &str| whole.stages.iter().any(|projected| projected.stage == stage);
                let mut missing: Vec<&str> =
                    STAGES.iter().map(|(stage, _)| *stage).filter(|stage| !known(stage)).collect();
                missing.push("the evaluation");
                text.push_str(&format!("not in these hours: {}\n", missing.join(", ")));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(resumed: &[&str]) -> LayerOutcome {
        LayerOutcome {
            layer: 3,
            rates: crate::walk::outcome::LayerRates::Bits(BTreeMap::new()),
            heldout_error: 0.0,
            seconds: 0.0,
            stage_seconds: STAGES.map(|(name, _)| (name.to_owned(), 1.0)).to_vec(),
            resumed: resumed.iter().map(|stage| (*stage).to_owned()).collect(),
        }
    }

    #[test]
    fn what_was_resumed_or_in_hand_does_not_count() {
        assert_eq!(counted(&done(&[])).len(), STAGES.len());
        let found = counted(&done(&["capture", "search", "probe-iter-00"]));
        assert_eq!(found, ["final encode", "audit", "emit", "forward"]);
        assert_eq!(counted(&done(&["capture", "emit", "install-audit"])), [""; 0]);
        // Without a search the probes come right after the capture.
        let mut plain = done(&["capture", "cold-experts"]);
        plain.stage_seconds.retain(|(stage, _)| stage != "search");
        assert_eq!(counted(&plain)[0], "allocation");
    }

    #[test]
    fn files_are_told_by_kind() {
        let found = [
            "states/004/p.safetensors",
            "v2/a.json",
            "layer-003/routing/p",
            "layer-003/capture.json",
            "search/layer-003.json",
        ]
        .map(|path| kind(Path::new(path)));
        assert_eq!(found, [ROLLING, "v2", "routing", "records", "records"]);
    }
}
