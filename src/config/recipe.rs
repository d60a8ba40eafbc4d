//! The recipe: every choice of a walk that reaches bytes, as `models/<name>/recipe.json`.
//!
//! Its canonical hash is part of the run's identity, so nothing that may change on resume (threads, progress) is in
//! here. Fractions that are hashed are held as exact rationals or as 17-digit strings. Unknown keys are refused: a
//! mistyped knob would otherwise be a silent default. Sources: the "Round 7" record for the pinned values, the QTIP
//! paper (arXiv 2406.11235) and exllamav3 for `sigma_reg`.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use super::choices::{
    AllocationRule, CodebookName, CodecName, DownCovariance, DownTarget, Metric, PermutationPolicy, Rounding,
    ScaleFamily, VectorScope,
};
use super::kaiju1::Kaiju1;
use crate::error::{Result, refuse};
use crate::store::canonical_json::{canonical_hash, float17, parse_float17};
use crate::store::hash::Hash;
use crate::store::strict_json::{parse_json, read_file};

/// The marker every manifest of this lineage carries.
pub const MARKER: &str = "CODEX_ROUND7";

/// The recipe of a model that brings none: the values pinned for GLM-5.2.
const BUILT_IN: &str = include_str!("../../models/glm52/recipe.json");

/// A float that is hashed: read from a JSON number or a decimal string, written as a 17-digit string.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decimal(pub f64);

impl Serialize for Decimal {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&float17(self.0))
    }
}

impl<'de> Deserialize<'de> for Decimal {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Number;
        impl Visitor<'_> for Number {
            type Value = Decimal;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number or a decimal string")
            }
            fn visit_f64<E: de::Error>(self, value: f64) -> Result<Decimal, E> {
                Ok(Decimal(value))
            }
            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Decimal, E> {
                Ok(Decimal(value as f64))
            }
            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Decimal, E> {
                Ok(Decimal(value as f64))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Decimal, E> {
                parse_float17(text).map(Decimal).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Number)
    }
}

/// An exact fraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rational {
    /// Above the line.
    pub numerator: u64,
    /// Below it.
    pub denominator: u64,
}

impl fmt::Display for Rational {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.numerator, self.denominator)
    }
}

/// How far the finished expert's holdout loss may exceed what its probes promised.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InteractionTolerance {
    /// As a share of the promise.
    pub relative: Decimal,
    /// In units of relative loss.
    pub absolute: Decimal,
}

/// How far the installed experts may differ from the independently accumulated reference.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InstallTolerance {
    /// Largest absolute difference of an output.
    pub max_abs: Decimal,
    /// Relative L2 error of all outputs.
    pub relative_l2: Decimal,
}

/// Where a recipe was read: named in refusals, and no part of what it is. All origins are equal.
#[derive(Debug, Clone)]
pub struct Origin(PathBuf);

impl Default for Origin {
    fn default() -> Self {
        Self(PathBuf::from("recipe"))
    }
}

impl PartialEq for Origin {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl AsRef<Path> for Origin {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

/// Everything that decides the bytes of a walk, besides model and corpus.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// The file it was read from.
    #[serde(skip)]
    pub origin: Origin,
    /// Version of the rules; part of every seed. Changes whenever equal knobs would give other bytes.
    pub recipe_version: String,
    /// Always [`MARKER`]; existing loaders look for it.
    pub marker: String,
    /// Which variant of the model's recipe this is: `default`, `fast`, `uniform-N`. Keeps their identities apart.
    #[serde(default = "default_variant")]
    pub variant: String,
    /// Weight codec.
    pub codec: CodecName,
    /// Knobs of the KAIJU1 codec; none with another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kaiju1: Option<Kaiju1>,
    /// Codebook of the trellis codec.
    pub codebook: CodebookName,
    /// Bits every routed expert tensor has at least.
    pub floor_bits: u32,
    /// Bits a tensor may have: consecutive, from the floor up. An upgrade is one step.
    pub candidate_bits: Vec<u32>,
    /// Mean bits of a layer's tensors, met exactly.
    pub target: Rational,
    /// Set by `uniform-N`: all tensors have these bits, nothing is probed or allocated.
    #[serde(default)]
    pub fixed_bits: Option<u32>,
    /// Share of the covariance's mean diagonal added to its diagonal before factoring (exllamav3's default 0.025).
    pub sigma_reg: Decimal,
    /// The same for down; null means `sigma_reg`.
    #[serde(default)]
    pub sigma_reg_down: Option<Decimal>,
    /// Sign draws a rotation vector that the search ranks (8 to 16; 1 takes draw 0 as it is).
    pub draws: u32,
    /// Whether vectors, permutations and scales are searched. If not: draw 0, identity permutation, unit scales.
    #[serde(default)]
    pub search: bool,
    /// Orders of the intermediate channels that the search ranks; `identity` is always one of them.
    #[serde(default = "default_permutations")]
    pub permutations: Vec<PermutationPolicy>,
    /// Scale families that the search ranks; `identity` is always one of them.
    #[serde(default = "default_scale_families")]
    pub scale_families: Vec<ScaleFamily>,
    /// Tiles of the seeded sample that output-side candidates are ranked on by test-encoding.
    #[serde(default = "default_scale_sample_tiles")]
    pub sketch_tiles: usize,
    /// Experts of the mass-stratified sample that shared vectors are scored on; a layer with fewer uses all.
    pub shared_sample_experts: usize,
    /// Most holdout rows an expert's losses are measured on, lowest seeded hash first.
    pub holdout_rows: usize,
    /// Experts with fewer fit rows are topped up with other rows of the layer.
    pub min_fit_rows: usize,
    /// A row is holdout iff its seeded hash is 0 modulo this (5: 80/20).
    pub fit_modulus: u64,
    /// Most rounds of probing and allocating before a walk fails closed; 1 allocates once.
    pub fixed_point_iterations: u32,
    /// Of the interaction audit.
    pub interaction_tolerance: InteractionTolerance,
    /// Of the install audit.
    pub install_tolerance: InstallTolerance,
    /// Passes over the finished codes of a tensor after LDLQ.
    #[serde(default)]
    pub refinement_sweeps: u32,
    /// Tiles of the seeded sample that the global scale is chosen on.
    #[serde(default = "default_scale_sample_tiles")]
    pub scale_sample_tiles: usize,
    /// What down is encoded towards.
    #[serde(default)]
    pub down_target: DownTarget,
    /// What down's covariance is built through.
    #[serde(default)]
    pub down_covariance: DownCovariance,
    /// How rotated weights are rounded.
    #[serde(default)]
    pub rounding: Rounding,
    /// The metric LDLQ works in.
    #[serde(default)]
    pub metric: Metric,
    /// Who owns the rotation vectors.
    #[serde(default)]
    pub vectors: VectorScope,
    /// What the upgrades are spent by.
    #[serde(default)]
    pub allocation: AllocationRule,
    /// Pilot: multiply `svh` of gate and up by the least-squares factor of each output coordinate on the fit rows.
    #[serde(default)]
    pub output_rescale: bool,
    /// Pilot: move a cold expert's covariance diagonal towards the layer's median by its fallback share.
    #[serde(default)]
    pub cold_diagonal_shrinkage: bool,
    /// Whether source and carrier may be one directory (plain BF16 models).
    #[serde(default)]
    pub allow_same_source_and_carrier: bool,
}

fn default_variant() -> String {
    "default".to_owned()
}

fn default_permutations() -> Vec<PermutationPolicy> {
    vec![PermutationPolicy::Identity]
}

fn default_scale_families() -> Vec<ScaleFamily> {
    vec![ScaleFamily::Identity]
}

fn default_scale_sample_tiles() -> usize {
    24
}

impl Recipe {
    /// The recipe that `--recipe CHOICE` means: `default`, `fast`, `uniform-3`, `uniform-4`, `uniform-5` (variants of the
    /// model's own recipe, or of the built-in one if the model brings none) or the path of a recipe file.
    ///
    /// # Errors
    /// Names the choice, or file and field of what is wrong in it.
    pub fn choose(choice: &str, model_recipe: Option<&Path>) -> Result<Self> {
        let own = || match model_recipe {
            Some(path) => Self::load(path),
            None => Self::built_in(),
        };
        match choice {
            "default" => own(),
            "fast" => Ok(own()?.fast()),
            "uniform-3" => own()?.uniform(3),
            "uniform-4" => own()?.uniform(4),
            "uniform-5" => own()?.uniform(5),
            path if Path::new(path).is_file() => Self::load(path),
            other => refuse(format!("there is no recipe {other:?}"))
                .field("--recipe")
                .wanted("default, fast, uniform-3, uniform-4, uniform-5 or the path of a recipe.json")
                .err(),
        }
    }

    /// The recipe of a model that brings none.
    ///
    /// # Errors
    /// Never, unless the build is broken.
    pub fn built_in() -> Result<Self> {
        Self::parse(Path::new("built-in recipe"), BUILT_IN.as_bytes())
    }

    /// Reads a recipe file.
    ///
    /// # Errors
    /// Names file and field, and line and column where the JSON itself is wrong.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::parse(path, &read_file(path)?)
    }

    /// Reads the `bytes` of a recipe; `path` is named in refusals.
    ///
    /// # Errors
    /// As [`Recipe::load`].
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let mut recipe: Self = parse_json(path, bytes)?;
        if recipe.codec == CodecName::Kaiju1 {
            recipe.kaiju1.get_or_insert_default();
        }
        Self { origin: Origin(path.to_path_buf()), ..recipe }.checked()
    }

    /// One draw, one round, no sweeps, no search: a quick look, with an identity of its own.
    #[must_use]
    pub fn fast(self) -> Self {
        Self {
            variant: "fast".to_owned(),
            draws: 1,
            search: false,
            permutations: default_permutations(),
            scale_families: default_scale_families(),
            fixed_point_iterations: 1,
            refinement_sweeps: 0,
            ..self
        }
    }

    /// Every tensor at `bits`, nothing probed or allocated.
    ///
    /// # Errors
    /// When no tensor can have `bits`.
    pub fn uniform(self, bits: u32) -> Result<Self> {
        let recipe = Self {
            variant: format!("uniform-{bits}"),
            floor_bits: bits,
            candidate_bits: vec![bits],
            target: Rational { numerator: u64::from(bits), denominator: 1 },
            fixed_bits: Some(bits),
            ..self
        };
        recipe.checked()
    }

    /// The same walk with the KAIJU1 codec: rates by its settings, no rotation, order of channels or scale to search.
    ///
    /// # Errors
    /// A recipe of uniform trellis bits; settings out of range.
    pub fn with_kaiju1(self, kaiju1: Kaiju1) -> Result<Self> {
        let rate = if kaiju1.rungs.is_empty() { kaiju1.preset.as_str() } else { "by-expert" };
        let recipe = Self {
            variant: format!("kaiju1-{rate}"),
            codec: CodecName::Kaiju1,
            kaiju1: Some(kaiju1),
            refinement_sweeps: 0,
            ..self.fast()
        };
        recipe.checked()
    }

    /// SHA-256 of the canonical JSON: the recipe's part of a run's identity.
    ///
    /// # Errors
    /// None for a validated recipe.
    pub fn identity_hash(&self) -> Result<Hash> {
        canonical_hash(self)
    }

    /// One-bit upgrades over the floor that `tensors` equal tensors of a layer share out to meet the target exactly.
    ///
    /// # Errors
    /// Shows the arithmetic when the target is no whole number of upgrades, or not within reach.
    pub fn upgrades(&self, tensors: u64) -> Result<u64> {
        let Rational { numerator, denominator } = self.target;
        let floor = u128::from(self.floor_bits) * u128::from(tensors);
        let product = u128::from(numerator) * u128::from(tensors);
        let sum = format!("{tensors} tensors x {}", self.target);
        if denominator == 0 || product % u128::from(denominator) != 0 {
            return refuse(format!(
                "the target is no whole number of upgrades: {sum} = {product}/{denominator} bits, \
                 less {tensors} x {} = {floor} of the floor",
                self.floor_bits
            ))
            .file(&self.origin)
            .field("target")
            .wanted("a target whose denominator divides the layer's tensor count times its numerator")
            .err();
        }
        let total = product / u128::from(denominator);
        let most =
            u128::from(self.candidate_bits.last().copied().unwrap_or(self.floor_bits)) * u128::from(tensors);
        if total < floor || total > most {
            return refuse(format!(
                "the target is out of reach: {sum} = {total} bits, not within {floor} to {most}"
            ))
            .file(&self.origin)
            .field("target")
            .wanted("a target between the floor and the highest candidate")
            .err();
        }
        u64::try_from(total - floor)
            .map_err(|_| refuse(format!("{sum} is too much")).file(&self.origin).field("target").into())
    }

    /// Share of the mean diagonal added to a covariance: gate and up, or down.
    pub fn sigma(&self, down: bool) -> f64 {
        match self.sigma_reg_down {
            Some(sigma) if down => sigma.0,
            _ => self.sigma_reg.0,
        }
    }

    /// The recipe itself, its values in range: for one that was changed in memory.
    ///
    /// # Errors
    /// Names file and field of what is out of range.
    pub fn checked(self) -> Result<Self> {
        self.validate().map_err(|refusal| refusal.file(&self.origin))?;
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn glm52_spends_exactly_384_upgrades_of_768_tensors() {
        let recipe = Recipe::built_in().unwrap();
        assert_eq!(recipe.upgrades(768).unwrap(), 384);
        assert_eq!(recipe.upgrades(24).unwrap(), 12);
        assert_eq!(recipe.upgrades(0).unwrap(), 0);
        for bits in [3, 4, 5] {
            assert_eq!(recipe.clone().uniform(bits).unwrap().upgrades(768).unwrap(), 0);
        }
    }

    #[test]
    fn a_target_that_does_not_come_out_shows_the_arithmetic() {
        let error = Recipe::built_in().unwrap().upgrades(9).unwrap_err().to_string();
        assert!(error.contains("9 tensors x 7/2 = 63/2 bits") && error.contains("9 x 3 = 27"), "{error}");
    }

    #[test]
    fn every_variant_has_an_identity_of_its_own_and_numbers_and_strings_are_one() {
        let recipe = Recipe::built_in().unwrap();
        let mut hashes =
            vec![recipe.identity_hash().unwrap(), recipe.clone().fast().identity_hash().unwrap()];
        hashes.extend([3, 4, 5].map(|b| recipe.clone().uniform(b).unwrap().identity_hash().unwrap()));
        hashes.sort();
        hashes.dedup();
        assert_eq!(hashes.len(), 5);
        let number: Decimal = serde_json::from_str("0.025").unwrap();
        let text: Decimal = serde_json::from_str("\"2.5e-2\"").unwrap();
        assert_eq!(number, text);
        assert_eq!(serde_json::to_string(&number).unwrap(), "\"2.5000000000000001e-2\"");
    }

    #[test]
    fn kaiju1_is_a_recipe_of_its_own_and_knows_no_knob_of_the_trellis() {
        let trellis = Recipe::built_in().unwrap();
        // Its hash is that of a recipe that has never heard of another codec.
        assert!(!serde_json::to_string(&trellis).unwrap().contains("kaiju1"));
        let recipe = trellis.clone().with_kaiju1(Kaiju1::default()).unwrap();
        assert_eq!(recipe.variant, "kaiju1-v2");
        let bytes = crate::store::canonical(&recipe).unwrap();
        assert_eq!(Recipe::parse(Path::new("x"), &bytes).unwrap(), recipe);
        assert_ne!(recipe.identity_hash().unwrap(), trellis.clone().fast().identity_hash().unwrap());
        let parse = |change: &dyn Fn(&mut serde_json::Value)| {
            let mut json = serde_json::to_value(&recipe).unwrap();
            change(&mut json);
            Recipe::parse(Path::new("x"), json.to_string().as_bytes()).map_err(|error| error.to_string())
        };
        let plain = parse(&|json| _ = json.as_object_mut().unwrap().remove("kaiju1"));
        assert_eq!(plain.unwrap(), recipe);
        for (field, value) in [
            ("search", true.into()),
            ("fixed_point_iterations", 2.into()),
            ("refinement_sweeps", 1.into()),
            ("rounding", "nearest".into()),
            ("vectors", "per_tensor".into()),
            ("allocation", "count".into()),
            ("output_rescale", true.into()),
            ("permutations", serde_json::json!(["identity", "energy_balanced"])),
        ] {
            let value: serde_json::Value = value;
            let error = parse(&|json| json[field] = value.clone()).unwrap_err();
            assert!(error.contains(field) && error.contains("kaiju1 has no use for it"), "{error}");
        }
        let error = parse(&|json| json["codec"] = "trellis".into()).unwrap_err();
        assert!(error.contains("nothing, with the codec trellis"), "{error}");
        let uniform = trellis.uniform(4).unwrap().with_kaiju1(Kaiju1::default()).unwrap_err().to_string();
        assert!(uniform.contains("fixed_bits"), "{uniform}");
    }

    #[test]
    fn a_recipe_survives_its_own_canonical_form() {
        let recipe = Recipe::built_in().unwrap();
        let bytes = crate::store::canonical(&recipe).unwrap();
        assert_eq!(Recipe::parse(Path::new("x"), &bytes).unwrap(), recipe);
    }
}
