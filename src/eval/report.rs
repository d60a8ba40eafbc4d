//! The report at the end of a walk, for a terminal and as JSON.
//!
//! Everything that was not done as the recipe wants it (rows dropped, experts without enough rows, a slow search) is a
//! counted line under `fallbacks`: a silent fallback would be a defect. Nothing here is hashed: floats are plain JSON
//! numbers, and times and thread counts may stand beside them.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde::ser::Serializer;

use super::metrics::Scores;
use super::table::{aligned, figure};
use super::{Evaluation, Perplexity};

/// What a walk did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WalkReport {
    /// Name of the model.
    pub model: String,
    /// Name of the recipe.
    pub recipe: String,
    /// Name of the codec.
    pub codec: String,
    /// Name of the search that ran, by instruction set.
    pub search_engine: String,
    /// Threads at work.
    pub threads: usize,
    /// Mean over all replaced weights.
    pub bits_per_weight: f64,
    /// The replaced layers in order.
    pub layers: Vec<LayerReport>,
    /// Wall-clock seconds by stage, in order.
    #[serde(serialize_with = "by_stage")]
    pub stage_seconds: Vec<(String, f64)>,
    /// What was done otherwise than the recipe wants, and how often. Empty when nothing was.
    #[serde(serialize_with = "by_kind")]
    pub fallbacks: Vec<(String, u64)>,
    /// Source against result, where the plan has prompts for it.
    pub evaluation: Option<Evaluation>,
    /// Where the result lies.
    pub output_dir: String,
}

/// What a walk did to one layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerReport {
    /// Index of the decoder layer.
    pub layer: usize,
    /// Tensors by their bits; none of a KAIJU1 layer.
    pub bit_counts: BTreeMap<u32, usize>,
    /// Of a KAIJU1 layer: experts by setting.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub setting_counts: BTreeMap<String, usize>,
    /// Mean over the layer's replaced weights.
    pub bits_per_weight: f64,
    /// Error of the experts' outputs on held-out rows: squared error over squared output, experts weighted by their
    /// routed mass.
    pub heldout_error: f64,
    /// Wall-clock seconds.
    pub seconds: f64,
}

impl LayerReport {
    /// The report of a layer; bits a weight follow from the counts.
    pub fn new(layer: usize, bit_counts: BTreeMap<u32, usize>, heldout_error: f64, seconds: f64) -> Self {
        let bits_per_weight = bits_per_weight([&bit_counts]);
        Self { layer, bit_counts, setting_counts: BTreeMap::new(), bits_per_weight, heldout_error, seconds }
    }

    /// The report of a KAIJU1 layer, its bits a weight counted from payloads.
    pub fn of_settings(
        layer: usize,
        (setting_counts, bits_per_weight): (BTreeMap<String, usize>, f64),
        heldout_error: f64,
        seconds: f64,
    ) -> Self {
        Self { layer, bit_counts: BTreeMap::new(), setting_counts, bits_per_weight, heldout_error, seconds }
    }
}

/// Bits a weight over layers, from how many tensors have how many bits. Routed expert tensors all have the same number
/// of weights, so that the mean over tensors is the mean over weights. NaN for no tensors.
pub fn bits_per_weight<'a>(layers: impl IntoIterator<Item = &'a BTreeMap<u32, usize>>) -> f64 {
    let (mut bits, mut tensors) = (0u64, 0u64);
    for (&each, &count) in layers.into_iter().flatten() {
        bits += u64::from(each) * count as u64;
        tensors += count as u64;
    }
    bits as f64 / tensors as f64
}

impl WalkReport {
    /// The report as aligned plain text.
    pub fn render_table(&self) -> String {
        let threads = if self.threads == 1 { "1 thread".into() } else { format!("{} threads", self.threads) };
        let mut sections = vec![
            format!(
                "model {}, recipe {}, codec {}, search {}, {threads}\n{} bits a weight in the replaced experts\n",
                self.model,
                self.recipe,
                self.codec,
                self.search_engine,
                figure(self.bits_per_weight, 4),
            ),
            self.stage_table(),
            self.layer_table(),
        ];
        sections.push(match &self.evaluation {
            Some(evaluation) => evaluation.render_table(),
            None => "evaluation: none\n".into(),
        });
        sections.push(self.fallback_table());
        sections.push(format!("written to {}\n", self.output_dir));
        sections.join("\n")
    }

    fn stage_table(&self) -> String {
        let row = |(stage, seconds): &(String, f64)| vec![stage.clone(), format!("{seconds:.2}")];
        let mut rows: Vec<Vec<String>> = self.stage_seconds.iter().map(row).collect();
        rows.push(row(&("all".into(), self.stage_seconds.iter().map(|(_, seconds)| seconds).sum())));
        aligned(&["stage", "seconds"], &rows)
    }

    fn layer_table(&self) -> String {
        let bits: BTreeSet<u32> =
            self.layers.iter().flat_map(|layer| layer.bit_counts.keys().copied()).collect();
        let settings: BTreeSet<&String> =
            self.layers.iter().flat_map(|layer| layer.setting_counts.keys()).collect();
        let titles: Vec<String> = bits.iter().map(|bits| format!("{bits}-bit")).collect();
        let mut header = vec!["layer", "bits a weight"];
        header.extend(titles.iter().chain(settings.iter().copied()).map(String::as_str));
        header.extend(["held-out error", "seconds"]);
        let row = |layer: &LayerReport| {
            let mut row = vec![layer.layer.to_string(), figure(layer.bits_per_weight, 4)];
            row.extend(bits.iter().map(|bits| layer.bit_counts.get(bits).unwrap_or(&0).to_string()));
            row.extend(settings.iter().map(|s| layer.setting_counts.get(*s).unwrap_or(&0).to_string()));
            row.extend([figure(layer.heldout_error, 6), format!("{:.2}", layer.seconds)]);
            row
        };
        aligned(&header, &self.layers.iter().map(row).collect::<Vec<_>>())
    }

    fn fallback_table(&self) -> String {
        if self.fallbacks.is_empty() {
            return "fallbacks: none\n".into();
        }
        let row = |(kind, count): &(String, u64)| vec![kind.clone(), count.to_string()];
        aligned(&["fallback", "times"], &self.fallbacks.iter().map(row).collect::<Vec<_>>())
    }
}

impl Evaluation {
    /// The figures by axis and over all, as aligned plain text.
    pub fn render_table(&self) -> String {
        let all = [("all".to_owned(), self.all)];
        let rows: Vec<Vec<String>> =
            self.axes.iter().chain(&all).map(|(axis, s)| evaluation_row(axis, s)).collect();
        let header =
            ["axis", "tokens", "ppl source", "ppl result", "mean KL ± s.e.", "median KL", "p99 KL", "top-1"];
        let state = match self.state {
            Some(state) => format!(", {state} state between layers"),
            None => String::new(),
        };
        format!(
            "evaluation: result against source{state}; KL(source || result) in nats a token\n{}",
            aligned(&header, &rows)
        )
    }
}

impl Perplexity {
    /// The figures by axis and over all, as aligned plain text.
    pub fn render_table(&self) -> String {
        let row = |axis: &super::AxisPerplexity| {
            vec![axis.axis.clone(), axis.tokens.to_string(), figure(axis.perplexity, 4)]
        };
        let rows: Vec<Vec<String>> = self.axes.iter().chain([&self.all]).map(row).collect();
        let header = ["axis", "tokens", "perplexity"];
        format!("evaluation: {} state between layers\n{}", self.state, aligned(&header, &rows))
    }
}

fn evaluation_row(axis: &str, scores: &Scores) -> Vec<String> {
    vec![
        axis.to_owned(),
        scores.tokens.to_string(),
        figure(scores.source_perplexity, 4),
        figure(scores.result_perplexity, 4),
        format!("{} ± {}", figure(scores.kl_mean, 5), figure(scores.kl_standard_error, 5)),
        figure(scores.kl_median, 6),
        figure(scores.kl_p99, 4),
        format!("{} %", figure(100.0 * scores.top1_agreement, 2)),
    ]
}

#[derive(Serialize)]
struct Stage<'a> {
    stage: &'a str,
    seconds: f64,
}

fn by_stage<S: Serializer>(rows: &[(String, f64)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(rows.iter().map(|(stage, seconds)| Stage { stage, seconds: *seconds }))
}

#[derive(Serialize)]
struct Fallback<'a> {
    fallback: &'a str,
    times: u64,
}

fn by_kind<S: Serializer>(rows: &[(String, u64)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(rows.iter().map(|(fallback, times)| Fallback { fallback, times: *times }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::StateType;

    fn scores(tokens: u64) -> Scores {
        Scores {
            tokens,
            source_perplexity: 29.0578670271017,
            result_perplexity: 29.1,
            kl_mean: 0.003104,
            kl_standard_error: 0.0002,
            kl_median: 0.000413,
            kl_p99: 0.0403,
            top1_agreement: 0.972,
        }
    }

    fn report() -> WalkReport {
        let layer = |index, three, five| {
            let counts = [(3, three), (4, 24 - three - five), (5, five)].into_iter();
            LayerReport::new(index, counts.filter(|(_, n)| *n > 0).collect(), 0.0123456, 20.126)
        };
        let layers = vec![layer(2, 14, 2), layer(3, 12, 0)];
        WalkReport {
            model: "tiny".into(),
            recipe: "tiny".into(),
            codec: "trellis".into(),
            search_engine: "scalar".into(),
            threads: 2,
            bits_per_weight: bits_per_weight(layers.iter().map(|layer| &layer.bit_counts)),
            layers,
            stage_seconds: vec![("corpus plan".into(), 0.125), ("probes".into(), 40.0)],
            fallbacks: vec![],
            evaluation: Some(Evaluation {
                state: Some(StateType::F32),
                all: scores(40604),
                axes: vec![("prose".into(), scores(10000)), ("code".into(), scores(9))],
                prompts: vec![("prose.evaluate.000".into(), scores(250))],
            }),
            output_dir: "walk-work/tiny/v2".into(),
        }
    }

    #[test]
    fn bits_are_the_mean_over_tensors() {
        let report = report();
        assert_eq!(report.layers[0].bits_per_weight, 3.5);
        assert_eq!(report.layers[1].bits_per_weight, 3.5);
        assert_eq!(report.bits_per_weight, 3.5);
        assert!(bits_per_weight([]).is_nan());
    }

    #[test]
    fn the_table_reads_as_it_should() {
        let expected = "\
model tiny, recipe tiny, codec trellis, search scalar, 2 threads
3.5000 bits a weight in the replaced experts

stage        seconds
corpus plan     0.12
probes         40.00
all            40.12

layer  bits a weight  3-bit  4-bit  5-bit  held-out error  seconds
2             3.5000     14      8      2        0.012346    20.13
3             3.5000     12     12      0        0.012346    20.13

evaluation: result against source, f32 state between layers; KL(source || result) in nats a token
axis   tokens  ppl source  ppl result     mean KL ± s.e.  median KL  p99 KL    top-1
prose   10000     29.0579     29.1000  0.00310 ± 0.00020   0.000413  0.0403  97.20 %
code        9     29.0579     29.1000  0.00310 ± 0.00020   0.000413  0.0403  97.20 %
all     40604     29.0579     29.1000  0.00310 ± 0.00020   0.000413  0.0403  97.20 %

fallbacks: none

written to walk-work/tiny/v2
";
        assert_eq!(report().render_table(), expected);
    }

    #[test]
    fn fallbacks_are_counted_and_a_missing_evaluation_is_said() {
        let fallbacks = vec![("scalar tile search".into(), 1), ("cold expert topped up".into(), 12)];
        let text = WalkReport { fallbacks, evaluation: None, ..report() }.render_table();
        assert!(text.contains("fallback               times\nscalar tile search         1\n"), "{text}");
        assert!(text.contains("evaluation: none\n"), "{text}");
    }

    #[test]
    fn json_names_its_rows() {
        let json = serde_json::to_value(report()).unwrap();
        assert_eq!(json["stage_seconds"][1]["stage"], "probes");
        assert_eq!(json["layers"][0]["bit_counts"]["3"], 14);
        assert_eq!(json["evaluation"]["axes"][0]["axis"], "prose");
        assert_eq!(json["evaluation"]["all"]["tokens"], 40604);
        assert_eq!(json["fallbacks"], serde_json::json!([]));
    }
}
