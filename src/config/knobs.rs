//! Every knob of the recipe, explained: one table beside the struct.
//!
//! A test holds the table against the recipe's JSON, so that a field cannot be added without its entry.

use serde::Serialize;
use serde_json::Value;

use super::recipe::Recipe;
use crate::error::{Result, refuse};

/// What is known of a knob besides its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Knob {
    /// The field.
    pub field: &'static str,
    /// What it decides.
    pub meaning: &'static str,
    /// Values it may have.
    pub allowed: &'static str,
    /// Where it comes from.
    pub source: &'static str,
}

/// A knob with the value a recipe gives it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExplainedKnob {
    /// The field.
    pub field: &'static str,
    /// Its value.
    pub value: Value,
    /// What it decides.
    pub meaning: &'static str,
    /// Values it may have.
    pub allowed: &'static str,
    /// Where it comes from.
    pub source: &'static str,
}

const RECORD: &str = "Round 7 record";
const OURS: &str = "measured here";
const KAIJU: &str = "the owner's KAIJU1 document";

const fn knob(
    field: &'static str,
    meaning: &'static str,
    allowed: &'static str,
    source: &'static str,
) -> Knob {
    Knob { field, meaning, allowed, source }
}

/// All knobs, in the order of the struct.
pub const KNOBS: &[Knob] = &[
    knob(
        "recipe_version",
        "version of the rules, part of every seed",
        "1 to 64 of A-Z a-z 0-9 . _ -",
        RECORD,
    ),
    knob("marker", "what existing loaders look for in every manifest", "CODEX_ROUND7", RECORD),
    knob(
        "variant",
        "which variant of the model's recipe this is; keeps their identities apart",
        "1 to 64 of A-Z a-z 0-9 . _ -",
        "this program",
    ),
    knob("codec", "weight codec", "trellis or kaiju1", "EXL3, exllamav3; the owner's KAIJU1 document"),
    knob(
        "kaiju1.preset",
        "kaiju1: where values that are not given come from",
        "v1 (code_bits 56, hi_frac 0.10) or v2 (64, 0.025)",
        KAIJU,
    ),
    knob("kaiju1.code_bits", "kaiju1: bits of the code of 24 weights", "56 or 64", KAIJU),
    knob(
        "kaiju1.hi_frac",
        "kaiju1: share of the input channels that are stored as int8, rounded up",
        "0 to below 1",
        KAIJU,
    ),
    knob(
        "kaiju1.feedback",
        "kaiju1: whether a block's error is fed forward to those after it",
        "true or false",
        "QuIP, arXiv 2307.13304; GPTQ, arXiv 2210.17323",
    ),
    knob(
        "kaiju1.rungs",
        "kaiju1: settings that each expert's is chosen from by measured loss",
        "none, or 2 to 16 of {code_bits, hi_frac}, that of the fields above among them",
        "this program",
    ),
    knob(
        "kaiju1.target",
        "kaiju1: with rungs, most bits a weight of a layer, counted from bytes",
        "null, or a fraction above 0 and below 17",
        "this program",
    ),
    knob(
        "codebook",
        "trellis: computed codebook that weights are encoded with",
        "mcg",
        "exllamav3; QTIP, arXiv 2406.11235",
    ),
    knob("floor_bits", "trellis: bits every routed expert tensor has at least", "2 to 6", RECORD),
    knob(
        "candidate_bits",
        "trellis: bits a tensor may have; an upgrade is one step",
        "consecutive, from floor_bits up to 6",
        RECORD,
    ),
    knob(
        "target",
        "trellis: mean bits of a layer's tensors, met exactly",
        "a fraction from the floor to the highest candidate",
        RECORD,
    ),
    knob(
        "fixed_bits",
        "trellis: all tensors at these bits, nothing probed or allocated",
        "null, or the only candidate",
        "this program",
    ),
    knob(
        "sigma_reg",
        "share of the covariance's mean diagonal added to its diagonal before factoring",
        "above 0 and at most 1",
        "exllamav3 (0.025); Round 7 record, lever 5",
    ),
    knob(
        "sigma_reg_down",
        "the same for down",
        "above 0 and at most 1, or null for sigma_reg",
        "Round 7 record, lever 5",
    ),
    knob(
        "draws",
        "sign draws a rotation vector that the search ranks",
        "1 to 16; 1 without a search",
        RECORD,
    ),
    knob(
        "search",
        "whether vectors, orders and scales are searched",
        "true or false",
        "Round 7 record, lever 4",
    ),
    knob(
        "permutations",
        "orders of the intermediate channels that the search ranks",
        "identity first, then ldlq_visit_descending_diag, stored_descending_diag, energy_balanced, \
         energy_balanced_contiguous",
        "Round 7 record, lever 4",
    ),
    knob(
        "scale_families",
        "scales along a side that the search ranks",
        "identity first, then quarter_rms, inverse_quarter_rms, sensitivity",
        "Round 7 record, lever 6; sensitivity: measured here",
    ),
    knob(
        "sketch_tiles",
        "tiles that output-side candidates are ranked on by test-encoding",
        "1 to 65536",
        OURS,
    ),
    knob(
        "shared_sample_experts",
        "experts that a layer's shared vectors are scored on",
        "1 to 65536",
        RECORD,
    ),
    knob("holdout_rows", "most rows an expert's losses are measured on", "1 to 16777216", RECORD),
    knob(
        "min_fit_rows",
        "experts with fewer fit rows are topped up with other rows of the layer",
        "1 to 16777216",
        RECORD,
    ),
    knob("fit_modulus", "a row is held out iff its seeded hash is 0 modulo this", "2 to 1000", RECORD),
    knob(
        "fixed_point_iterations",
        "most rounds of probing and allocating; 1 allocates once",
        "1 to 64",
        RECORD,
    ),
    knob(
        "interaction_tolerance",
        "how far a finished expert's held-out loss may exceed what its probes promised",
        "relative and absolute, each above 0 and at most 10",
        RECORD,
    ),
    knob(
        "install_tolerance",
        "how far installed experts may differ from the independent reference",
        "max_abs and relative_l2, each above 0 and at most 10",
        RECORD,
    ),
    knob("refinement_sweeps", "passes over a tensor's codes after LDLQ", "0 to 16", OURS),
    knob("scale_sample_tiles", "tiles that a tensor's global scale is chosen on", "1 to 65536", "exllamav3"),
    knob(
        "down_target",
        "what down is encoded towards: the source weight, or its least-squares correction",
        "source or corrected",
        "GPTAQ, arXiv 2504.02692",
    ),
    knob(
        "down_covariance",
        "what down's covariance is built through: the reconstructed gate and up, or the source's",
        "reconstructed or source",
        RECORD,
    ),
    knob(
        "rounding",
        "how rotated weights are rounded",
        "ldlq or nearest",
        "QuIP, arXiv 2307.13304; GPTQ, arXiv 2210.17323",
    ),
    knob(
        "metric",
        "the covariance LDLQ works in: transformed by the stored suh, or by its signs alone",
        "stored or signs",
        "stored: measured here; signs: exllamav3",
    ),
    knob(
        "vectors",
        "who owns the residual-side vectors: the layer, or every tensor with channel scales",
        "shared (per_tensor: walk ablate only)",
        "Round 7 record; per_tensor: exllamav3",
    ),
    knob(
        "allocation",
        "what upgrades are spent by: measured loss, an assumed sensitivity, or the count of routed rows",
        "measured, assumed or count",
        "Round 7 record, lever 7",
    ),
    knob(
        "output_rescale",
        "pilot: svh of gate and up times the least-squares factor of each output coordinate",
        "true or false",
        "Round 7 record, lever 1",
    ),
    knob(
        "cold_diagonal_shrinkage",
        "pilot: a cold expert's input covariance with its diagonal moved towards the layer's median",
        "true or false",
        "Round 7 record, lever 5",
    ),
    knob(
        "allow_same_source_and_carrier",
        "whether source and carrier may be one directory",
        "true or false",
        "this program",
    ),
];

impl Recipe {
    /// Every knob that the recipe has, with its value, in the order of [`KNOBS`]: those of another codec are left out.
    ///
    /// # Errors
    /// None in a sound build.
    pub fn explain(&self) -> Result<Vec<ExplainedKnob>> {
        let json = serde_json::to_value(self).map_err(|error| refuse(format!("recipe as JSON: {error}")))?;
        let explained = KNOBS.iter().filter_map(|knob| {
            let value = knob.field.split('.').try_fold(&json, |value, key| value.get(key))?;
            Some(ExplainedKnob {
                field: knob.field,
                value: value.clone(),
                meaning: knob.meaning,
                allowed: knob.allowed,
                source: knob.source,
            })
        });
        Ok(explained.collect())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::config::kaiju1::Kaiju1;

    #[test]
    fn every_field_has_an_entry_and_every_entry_a_field() {
        let trellis = Recipe::built_in().unwrap();
        let kaiju1 = trellis.clone().with_kaiju1(Kaiju1::default()).unwrap();
        let mut fields = BTreeSet::new();
        for (key, value) in serde_json::to_value(&kaiju1).unwrap().as_object().unwrap() {
            match value.as_object().filter(|_| key == "kaiju1") {
                Some(nested) => fields.extend(nested.keys().map(|inner| format!("{key}.{inner}"))),
                None => assert!(fields.insert(key.clone())),
            }
        }
        let knobs: BTreeSet<String> = KNOBS.iter().map(|knob| knob.field.to_owned()).collect();
        assert_eq!(fields, knobs);
        assert_eq!(knobs.len(), KNOBS.len(), "a knob is explained twice");
        for knob in KNOBS {
            assert!([knob.meaning, knob.allowed, knob.source].iter().all(|text| text.len() > 2), "{knob:?}");
        }
        assert_eq!(kaiju1.explain().unwrap().len(), KNOBS.len());
        let own = KNOBS.iter().filter(|knob| !knob.field.starts_with("kaiju1."));
        let explained = trellis.explain().unwrap();
        assert!(explained.iter().map(|knob| knob.field).eq(own.map(|knob| knob.field)));
    }
}
