//! The ranges of a recipe's values.

use super::choices::{
    AllocationRule, CodecName, Metric, PermutationPolicy, Rounding, ScaleFamily, VectorScope,
};
use super::recipe::{MARKER, Rational, Recipe};
use crate::error::{Refusal, refuse};

impl Recipe {
    /// Checks the range of every value.
    pub(super) fn validate(&self) -> Result<(), Box<Refusal>> {
        let check = |good: bool, field: &str, value: String, wanted: &str| {
            if good {
                Ok(())
            } else {
                Err(Box::new(refuse(format!("{field} is {value}")).field(field).wanted(wanted)))
            }
        };
        let word = |text: &str| {
            (1..=64).contains(&text.len())
                && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
        };
        check(
            word(&self.recipe_version),
            "recipe_version",
            format!("{:?}", self.recipe_version),
            "1 to 64 of A-Z a-z 0-9 . _ -",
        )?;
        check(word(&self.variant), "variant", format!("{:?}", self.variant), "1 to 64 of A-Z a-z 0-9 . _ -")?;
        check(self.marker == MARKER, "marker", format!("{:?}", self.marker), MARKER)?;

        let bits = &self.candidate_bits;
        let consecutive = bits.first() == Some(&self.floor_bits)
            && bits.windows(2).all(|pair| pair[1].checked_sub(pair[0]) == Some(1));
        check((2..=6).contains(&self.floor_bits), "floor_bits", self.floor_bits.to_string(), "2 to 6")?;
        check(
            consecutive,
            "candidate_bits",
            format!("{bits:?}"),
            "consecutive bits from floor_bits up, such as [3, 4, 5]",
        )?;
        check(
            bits.iter().all(|b| (2..=6).contains(b)),
            "candidate_bits",
            format!("{bits:?}"),
            "bits from 2 to 6",
        )?;
        let Rational { numerator, denominator } = self.target;
        let most = u128::from(bits[bits.len() - 1]);
        let (above, below) = (u128::from(numerator), u128::from(denominator));
        let within = below != 0 && above >= below * u128::from(self.floor_bits) && above <= below * most;
        check(
            within,
            "target",
            self.target.to_string(),
            "a fraction between the floor and the highest candidate",
        )?;
        let fixed = self.fixed_bits.is_none_or(|b| *bits == [b] && above == below * u128::from(b));
        check(
            fixed,
            "fixed_bits",
            self.fixed_bits.map_or("null".to_owned(), |bits| bits.to_string()),
            "the only candidate and the target, or null",
        )?;

        let within = |value: f64, most: f64| value > 0.0 && value <= most;
        check(
            within(self.sigma_reg.0, 1.0),
            "sigma_reg",
            self.sigma_reg.0.to_string(),
            "above 0 and at most 1",
        )?;
        let down = self.sigma_reg_down.map_or(self.sigma_reg.0, |sigma| sigma.0);
        check(within(down, 1.0), "sigma_reg_down", down.to_string(), "above 0 and at most 1, or null")?;
        check((1..=16).contains(&self.draws), "draws", self.draws.to_string(), "1 to 16")?;
        check(
            self.search || self.draws == 1,
            "draws",
            self.draws.to_string(),
            "1, since without a search only draw 0 is used",
        )?;
        let permutations = &self.permutations;
        check(
            permutations.first() == Some(&PermutationPolicy::Identity) && distinct(permutations),
            "permutations",
            as_json(permutations),
            "distinct policies, \"identity\" first",
        )?;
        let families = &self.scale_families;
        check(
            families.first() == Some(&ScaleFamily::Identity) && distinct(families),
            "scale_families",
            as_json(families),
            "distinct families, \"identity\" first",
        )?;
        let range = |value: usize, most: usize, field: &str| {
            check((1..=most).contains(&value), field, value.to_string(), &format!("1 to {most}"))
        };
        range(self.shared_sample_experts, 65_536, "shared_sample_experts")?;
        range(self.holdout_rows, 1 << 24, "holdout_rows")?;
        range(self.min_fit_rows, 1 << 24, "min_fit_rows")?;
        range(self.scale_sample_tiles, 65_536, "scale_sample_tiles")?;
        range(self.sketch_tiles, 65_536, "sketch_tiles")?;
        check(
            (2..=1000).contains(&self.fit_modulus),
            "fit_modulus",
            self.fit_modulus.to_string(),
            "2 to 1000",
        )?;
        let rounds = self.fixed_point_iterations;
        check((1..=64).contains(&rounds), "fixed_point_iterations", rounds.to_string(), "1 to 64")?;
        check(
            self.refinement_sweeps <= 16,
            "refinement_sweeps",
            self.refinement_sweeps.to_string(),
            "0 to 16",
        )?;

        let tolerances = [
            (self.interaction_tolerance.relative, "interaction_tolerance.relative"),
            (self.interaction_tolerance.absolute, "interaction_tolerance.absolute"),
            (self.install_tolerance.max_abs, "install_tolerance.max_abs"),
            (self.install_tolerance.relative_l2, "install_tolerance.relative_l2"),
        ];
        for (tolerance, field) in tolerances {
            check(within(tolerance.0, 10.0), field, tolerance.0.to_string(), "above 0 and at most 10")?;
        }
        self.validate_codec()
    }

    /// Knobs that have no meaning for the recipe's codec have the value that does nothing.
    fn validate_codec(&self) -> Result<(), Box<Refusal>> {
        let wrong = |field: &str, value: String, wanted: &str| {
            let refusal = refuse(format!("{field} is {value}")).field(field);
            Err(Box::new(refusal.wanted(wanted)))
        };
        let kaiju1 = match (self.codec, &self.kaiju1) {
            (CodecName::Trellis, None) => return Ok(()),
            (CodecName::Trellis, Some(_)) => {
                return wrong("kaiju1", "given".to_owned(), "nothing, with the codec trellis");
            }
            (CodecName::Kaiju1, None) => {
                return wrong("kaiju1", "missing".to_owned(), "the codec's settings");
            }
            (CodecName::Kaiju1, Some(kaiju1)) => kaiju1,
        };
        kaiju1.validate()?;
        let bits = self.fixed_bits.map(|bits| bits.to_string());
        let idle = [
            ("fixed_bits", bits.is_none(), bits.unwrap_or_default(), "null"),
            ("search", !self.search, self.search.to_string(), "false"),
            ("permutations", self.permutations.len() == 1, as_json(&self.permutations), "[\"identity\"]"),
            (
                "scale_families",
                self.scale_families.len() == 1,
                as_json(&self.scale_families),
                "[\"identity\"]",
            ),
            (
                "fixed_point_iterations",
                self.fixed_point_iterations == 1,
                self.fixed_point_iterations.to_string(),
                "1",
            ),
            ("refinement_sweeps", self.refinement_sweeps == 0, self.refinement_sweeps.to_string(), "0"),
            ("rounding", self.rounding == Rounding::Ldlq, as_json(&self.rounding), "\"ldlq\""),
            ("metric", self.metric == Metric::Stored, as_json(&self.metric), "\"stored\""),
            ("vectors", self.vectors == VectorScope::Shared, as_json(&self.vectors), "\"shared\""),
            (
                "allocation",
                self.allocation == AllocationRule::Measured,
                as_json(&self.allocation),
                "\"measured\"",
            ),
            ("output_rescale", !self.output_rescale, self.output_rescale.to_string(), "false"),
        ];
        match idle.into_iter().find(|(_, unused, ..)| !unused) {
            None => Ok(()),
            Some((field, _, value, wanted)) => wrong(
                field,
                value,
                &format!("{wanted}: it is the trellis codec's, and kaiju1 has no use for it"),
            ),
        }
    }
}

/// A value as the recipe's file spells it.
fn as_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

fn distinct<T: Ord + Clone>(list: &[T]) -> bool {
    let mut sorted = list.to_vec();
    sorted.sort();
    sorted.dedup();
    sorted.len() == list.len()
}
