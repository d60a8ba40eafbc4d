//! The counts and sizes of the owner's Round 7 record, and what explains where a walk's are others.
//!
//! They are looked at only for a model of the record's geometry under the default recipe. The record itself calls its sizes
//! requirements that it has not verified.

use serde::Serialize;

use super::counts::{LayerCounts, Span, TENSORS};
use super::size::{Disk, Parameters};
use crate::config::{Geometry, Recipe};
use crate::error::Result;

const GIB: f64 = (1u64 << 30) as f64;
/// Bits of the MTP layer's experts in one reading of the size.
const MTP_BITS: u64 = 6;
/// Ranks of the record's serving setup.
const RANKS: u64 = 4;

/// The record's figures.
const SEARCH: u64 = 1008;
const FIRST_PROBE: u64 = 3328;
const FOLLOW_UP_AN_EXPERT: u64 = 13;
const CHANGED: Span = Span { least: 128, most: 256 };
const FINAL: u64 = 1536;
const ALL: Span = Span { least: 7536, most: 9200 };
const ROUTED_GIB: f64 = 302.6;
const TOTAL_GIB: f64 = 322.8;

/// One figure held against the record's.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Line {
    /// What is counted.
    pub what: String,
    /// As the record has it.
    pub record: String,
    /// As counted here.
    pub counted: String,
    /// Whether they agree.
    pub equal: bool,
    /// Why not; empty where they agree.
    pub because: String,
}

/// Whether this is the model and recipe that the record is about.
///
/// # Errors
/// None in practice.
pub fn applies(geometry: &Geometry, recipe: &Recipe) -> Result<bool> {
    let sizes = (geometry.moe_layers().len(), geometry.n_routed_experts);
    let widths = (geometry.hidden_size, geometry.moe_intermediate_size);
    Ok(sizes == (75, 256)
        && widths == (6144, 2048)
        && recipe.identity_hash()? == Recipe::built_in()?.identity_hash()?)
}

/// Counts of a layer against the record's.
pub fn counts(counts: &LayerCounts) -> Vec<Line> {
    let line = |what: &str, record: Span, counted: Span, because: &str| {
        let equal = record == counted;
        Line {
            what: what.to_owned(),
            record: span(record),
            counted: span(counted),
            equal,
            because: if equal { String::new() } else { because.to_owned() },
        }
    };
    let exactly = Span::exactly;
    let most = exactly(counts.search.most);
    let planned = |follow_up: u64| most.most + counts.first_probe + follow_up + counts.final_encode;
    vec![
        line("search, at most", exactly(SEARCH), most, "see the recipe's sample and draws"),
        line(
            "first round of probes",
            exactly(FIRST_PROBE),
            exactly(counts.first_probe),
            "see candidate_bits",
        ),
        line(
            "follow-up, an expert changed",
            exactly(FOLLOW_UP_AN_EXPERT),
            exactly(counts.probe_of_an_expert),
            "see candidate_bits",
        ),
        line("experts changed", CHANGED, counts.changed, "see fixed_point_iterations"),
        line(
            "final and interaction",
            exactly(FINAL),
            exactly(counts.final_encode),
            "the interaction audit measures the finished experts themselves; the record encodes them once more for it",
        ),
        line(
            "all",
            ALL,
            Span { least: planned(counts.follow_up.least), most: planned(counts.follow_up.most) },
            "the final encodes; test encodes on sampled tiles come on top in both, see above",
        ),
    ]
}

fn span(span: Span) -> String {
    if span.least == span.most { span.most.to_string() } else { format!("{} to {}", span.least, span.most) }
}

/// One reading of a gap between sizes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Reading {
    /// What would be in the record's figure.
    pub what: String,
    /// What it adds up to, GiB.
    pub gib: f64,
    /// What is left of the gap then, GiB.
    pub left_gib: f64,
}

/// The sizes against the record's.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sizes {
    /// Routed experts, GiB, by the record.
    pub record_routed_gib: f64,
    /// Trellis words alone, GiB.
    pub trellis_gib: f64,
    /// The v2 shards to the byte, GiB.
    pub routed_gib: f64,
    /// The record's less ours, GiB.
    pub gap_gib: f64,
    /// What could explain it. None of them is known to.
    pub readings: Vec<Reading>,
    /// Whole checkpoint, GiB, by the record.
    pub record_total_gib: f64,
    /// What its two figures leave for everything carried, GiB.
    pub record_carried_gib: f64,
    /// The carried tensors in BF16 with and without the MTP layer's experts, GiB: only the carrier knows its own size.
    pub carried_bf16_gib: [f64; 2],
    /// In one sentence.
    pub verdict: String,
}

/// Holds the sizes of a walk's result against the record's.
pub fn sizes(geometry: &Geometry, recipe: &Recipe, disk: &Disk, parameters: &Parameters) -> Sizes {
    let gib = |bytes: u64| bytes as f64 / GIB;
    let experts = geometry.n_routed_experts as u64;
    let (h, i) = (geometry.hidden_size as u64, geometry.moe_intermediate_size as u64);
    let layers = geometry.moe_layers().len() as u64;
    let tensors = TENSORS * experts * layers;
    let at = |bits: u64| h * i * bits / 8;
    let target = recipe.target;
    let trellis = tensors * h * i * target.numerator / target.denominator / 8;
    // Rank slices: every rank of gate and up has suh [H] whole and of down svh [H]; the private side is cut.
    let replicated = |layers: u64| layers * experts * TENSORS * RANKS * 2 * h;
    let shared_here = layers * 2 * 2 * h;
    let one_more = trellis / layers + TENSORS * experts * 2 * i;
    let v1 = disk.v2_shards - shared_here + replicated(layers);
    let gap = ROUTED_GIB - gib(disk.v2_shards);
    let reading =
        |what: String, bytes: u64| Reading { what, gib: gib(bytes), left_gib: ROUTED_GIB - gib(bytes) };
    let readings = vec![
        reading(
            format!("the MTP layer's {} expert tensors at {MTP_BITS} bits beside them", TENSORS * experts),
            disk.v2_shards + TENSORS * experts * at(MTP_BITS),
        ),
        reading(
            format!(
                "v1 slices for {RANKS} ranks instead, which repeat the shared vectors in every expert and rank"
            ),
            v1,
        ),
        reading(
            format!(
                "v1 slices for {RANKS} ranks of {} layers: the MTP layer at the same bits too",
                layers + 1
            ),
            v1 + one_more + replicated(1),
        ),
    ];
    Sizes {
        record_routed_gib: ROUTED_GIB,
        trellis_gib: gib(trellis),
        routed_gib: gib(disk.v2_shards),
        gap_gib: gap,
        readings,
        record_total_gib: TOTAL_GIB,
        record_carried_gib: TOTAL_GIB - ROUTED_GIB,
        carried_bf16_gib: [
            gib(parameters.carried_bf16_bytes()),
            gib(parameters.carried_bf16_bytes() - 2 * parameters.mtp_routed),
        ],
        verdict: "the walked layers' experts at exactly 3.5 bits cannot take what the record says; the record calls its sizes \
                  requirements that it has not verified, and does not say what is in them"
            .to_owned(),
    }
}
