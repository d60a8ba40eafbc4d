//! From what single layers take to what the whole walk takes.
//!
//! The one projection of the crate: [`super::report`] feeds it seconds that a calibrated machine would need for counted
//! work, a pilot feeds it seconds and bytes that finished layers took. Either way the result is a projection and says so.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::UNVERIFIED;
use crate::config::Geometry;
use crate::error::{Result, refuse};

/// The one stage that the last MoE layer does not have.
pub const FORWARD: &str = "forward";

/// Bytes of these kinds replace one another from layer to layer, two of them at a time.
pub const ROLLING: &str = "states";

/// A stage of the whole walk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageProjection {
    /// Its name.
    pub stage: String,
    /// How often the whole walk has it.
    pub times: u64,
    /// Seconds each time, the mean of what was measured.
    pub seconds_each: f64,
    /// Hours in all.
    pub hours: f64,
}

impl StageProjection {
    /// A stage that takes so many seconds each time.
    pub fn new(stage: impl Into<String>, times: u64, seconds_each: f64) -> Self {
        Self { stage: stage.into(), times, seconds_each, hours: times as f64 * seconds_each / 3600.0 }
    }
}

/// One finished layer of a pilot.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MeasuredLayer {
    /// The layer.
    pub layer: usize,
    /// Seconds by stage, without what was adopted from an earlier run.
    pub stage_seconds: BTreeMap<String, f64>,
    /// Bytes it left on disk, by kind (`v2`, `final experts`, `routing`, `records`, ...; [`ROLLING`] for its state).
    pub bytes: BTreeMap<String, u64>,
}

/// A whole walk, projected from some of its layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Projection {
    /// Always [`UNVERIFIED`].
    pub status: String,
    /// What the projection takes for granted.
    pub assumption: String,
    /// Layers it is made from.
    pub layers_measured: u64,
    /// MoE layers of the model.
    pub layers: u64,
    /// Stages in the order given, those that happen once first.
    pub stages: Vec<StageProjection>,
    /// Hours in all.
    pub hours: f64,
    /// The same were every layer like the fastest and like the slowest one measured.
    pub hours_range: [f64; 2],
    /// Bytes on disk at the end, by kind; states at their largest, two at a time.
    pub bytes: BTreeMap<String, u64>,
    /// Their sum.
    pub bytes_in_all: u64,
}

/// Sum of the stages' hours.
pub fn hours(stages: &[StageProjection]) -> f64 {
    stages.iter().map(|stage| stage.hours).sum()
}

/// Projects the whole walk from finished layers. `once` are the stages outside layers (`open`, `prefix`, ...), with their
/// seconds.
///
/// A stage's seconds are the mean over the layers that have it, times the layers of the model that have it: all MoE
/// layers, one less for [`FORWARD`]. Bytes are the mean times the layers, apart from [`ROLLING`] ones, of which the
/// largest counts twice.
///
/// # Errors
/// No layers, one that is no MoE layer or comes twice, or a time that is negative or no number.
pub fn project(geometry: &Geometry, once: &[(String, f64)], layers: &[MeasuredLayer]) -> Result<Projection> {
    let moe = geometry.moe_layers();
    let count = moe.len() as u64;
    if layers.is_empty() {
        return refuse("no finished layer to project from").wanted("at least one").err();
    }
    for (place, measured) in layers.iter().enumerate() {
        let twice = layers[..place].iter().any(|other| other.layer == measured.layer);
        if twice || !moe.contains(&measured.layer) {
            let what = if twice { "the layer is given twice" } else { "not a MoE layer" };
            return refuse(what).layer(measured.layer).wanted("distinct MoE layers of the model").err();
        }
    }
    let times = once.iter().map(|(stage, seconds)| (None, stage, seconds)).chain(
        layers.iter().flat_map(|l| l.stage_seconds.iter().map(|(stage, s)| (Some(l.layer), stage, s))),
    );
    for (layer, stage, seconds) in times {
        if !seconds.is_finite() || *seconds < 0.0 {
            let refusal = refuse(format!("{seconds} seconds")).field(stage.as_str()).wanted("a time");
            return layer.into_iter().fold(refusal, |refusal, layer| refusal.layer(layer)).err();
        }
    }

    let mut stages: Vec<StageProjection> =
        once.iter().map(|(stage, seconds)| StageProjection::new(stage, 1, *seconds)).collect();
    let alone = hours(&stages);
    // A stage is named in the order of the first layer that has it.
    let mut names: Vec<&String> = Vec::new();
    for name in layers.iter().flat_map(|layer| layer.stage_seconds.keys()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let times = |stage: &str| if stage == FORWARD { count - 1 } else { count };
    let (mut fastest, mut slowest) = (alone, alone);
    for name in names {
        let seconds: Vec<f64> = layers.iter().filter_map(|l| l.stage_seconds.get(name).copied()).collect();
        let mean = seconds.iter().sum::<f64>() / seconds.len() as f64;
        let of = |seconds: f64| StageProjection::new(name, times(name), seconds).hours;
        fastest += of(seconds.iter().copied().fold(f64::INFINITY, f64::min));
        slowest += of(seconds.iter().copied().fold(0.0, f64::max));
        stages.push(StageProjection::new(name, times(name), mean));
    }

    let mut bytes: BTreeMap<String, u64> = BTreeMap::new();
    for kind in layers.iter().flat_map(|layer| layer.bytes.keys()) {
        let found: Vec<u64> = layers.iter().filter_map(|layer| layer.bytes.get(kind).copied()).collect();
        let projected = if kind == ROLLING {
            2 * found.iter().copied().max().unwrap_or(0)
        } else {
            let sum: u128 = found.iter().map(|&bytes| u128::from(bytes)).sum();
            (sum * u128::from(count) / found.len() as u128) as u64
        };
        bytes.insert(kind.clone(), projected);
    }
    Ok(Projection {
        status: UNVERIFIED.to_owned(),
        assumption: "every layer takes what the measured ones took on average: same machine, same load, as many experts whose \
                     bits change"
            .to_owned(),
        layers_measured: layers.len() as u64,
        layers: count,
        hours: hours(&stages),
        hours_range: [fastest, slowest],
        stages,
        bytes_in_all: bytes.values().sum(),
        bytes,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn geometry() -> Geometry {
        Geometry::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tiny/config.json")).unwrap()
    }

    fn layer(layer: usize, stages: &[(&str, f64)], bytes: &[(&str, u64)]) -> MeasuredLayer {
        MeasuredLayer {
            layer,
            stage_seconds: stages.iter().map(|&(stage, seconds)| (stage.to_owned(), seconds)).collect(),
            bytes: bytes.iter().map(|&(kind, bytes)| (kind.to_owned(), bytes)).collect(),
        }
    }

    #[test]
    fn layers_are_multiplied_and_the_last_is_not_forwarded() {
        let measured = [
            layer(2, &[("forward", 7200.0), ("search", 3600.0)], &[("v2", 1000), ("states", 70)]),
            layer(3, &[("forward", 3600.0), ("search", 7200.0)], &[("v2", 2000), ("states", 90)]),
        ];
        let found = project(&geometry(), &[("prefix".to_owned(), 1800.0)], &measured).unwrap();
        let stages: Vec<(&str, u64, f64)> =
            found.stages.iter().map(|s| (s.stage.as_str(), s.times, s.hours)).collect();
        // Three MoE layers, two of them forwarded.
        assert_eq!(stages, [("prefix", 1, 0.5), ("forward", 2, 3.0), ("search", 3, 4.5)]);
        assert_eq!((found.hours, found.hours_range), (8.0, [0.5 + 2.0 + 3.0, 0.5 + 4.0 + 6.0]));
        assert_eq!((found.bytes["v2"], found.bytes["states"], found.bytes_in_all), (4500, 180, 4680));
        assert_eq!((found.status.as_str(), found.layers_measured, found.layers), (UNVERIFIED, 2, 3));
    }

    #[test]
    fn a_pilot_that_never_forwarded_says_nothing_of_it() {
        let found = project(&geometry(), &[], &[layer(4, &[("probe", 10.0)], &[])]).unwrap();
        assert_eq!(found.stages, [StageProjection::new("probe", 3, 10.0)]);
        assert_eq!(found.hours_range, [found.hours, found.hours]);
    }

    #[test]
    fn what_is_no_measurement_is_refused() {
        let said = |layers: &[MeasuredLayer]| project(&geometry(), &[], layers).unwrap_err().to_string();
        assert!(said(&[]).contains("no finished layer"));
        assert!(said(&[layer(1, &[], &[])]).contains("layer 1: not a MoE layer"));
        assert!(said(&[layer(2, &[], &[]), layer(2, &[], &[])]).contains("twice"));
        for bad in [f64::NAN, -1.0, f64::INFINITY] {
            let said = said(&[layer(2, &[("probe", bad)], &[])]);
            assert!(said.contains("layer 2") && said.contains("`probe`"), "{said}");
        }
    }
}
