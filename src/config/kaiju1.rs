//! The recipe's knobs of the KAIJU1 codec: a preset or settings of one's own, for all experts alike or, by rungs, for each
//! the one that the layer's budget is spent on best.
//!
//! Values that a recipe leaves to its preset are filled in as it is read, so that equal settings are equal JSON.

use serde::{Deserialize, Serialize};

use super::recipe::{Decimal, Rational};
use crate::error::{Refusal, refuse};

/// Most rungs: each is three encodes an expert.
const MAX_RUNGS: usize = 16;

/// A named pair of code width and side-band.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kaiju1Preset {
    /// 56-bit codes, a tenth of the channels in the side-band.
    V1,
    /// 64-bit codes, a fortieth of them.
    #[default]
    V2,
}

impl Kaiju1Preset {
    /// Its setting.
    pub fn setting(self) -> Kaiju1Setting {
        match self {
            Self::V1 => Kaiju1Setting { code_bits: 56, hi_frac: Decimal(0.10) },
            Self::V2 => Kaiju1Setting { code_bits: 64, hi_frac: Decimal(0.025) },
        }
    }

    /// Its name in recipes and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V2 => "v2",
        }
    }
}

/// What decides a tensor's rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kaiju1Setting {
    /// Bits of a block's code: 56 or 64.
    pub code_bits: u32,
    /// Share of the input channels that are stored as int8, rounded up; 0 to below 1.
    pub hi_frac: Decimal,
}

impl std::fmt::Display for Kaiju1Setting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "p{} hi {}", self.code_bits, self.hi_frac.0)
    }
}

/// The knobs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "Given")]
pub struct Kaiju1 {
    /// Where the values that a recipe does not give come from.
    pub preset: Kaiju1Preset,
    /// Bits of a block's code.
    pub code_bits: u32,
    /// Share of the input channels in the side-band.
    pub hi_frac: Decimal,
    /// Whether a block's error is fed forward to those after it, by the full covariance.
    pub feedback: bool,
    /// Settings that each expert's is chosen from; none where all experts have that of the fields above, which is
    /// otherwise one of them.
    pub rungs: Vec<Kaiju1Setting>,
    /// With rungs: most bits a weight of a layer's payloads.
    pub target: Option<Rational>,
}

/// The knobs as a recipe may give them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Given {
    #[serde(default)]
    preset: Kaiju1Preset,
    code_bits: Option<u32>,
    hi_frac: Option<Decimal>,
    feedback: Option<bool>,
    #[serde(default)]
    rungs: Vec<Kaiju1Setting>,
    target: Option<Rational>,
}

impl From<Given> for Kaiju1 {
    fn from(given: Given) -> Self {
        let own = Self::of(given.preset);
        Self {
            code_bits: given.code_bits.unwrap_or(own.code_bits),
            hi_frac: given.hi_frac.unwrap_or(own.hi_frac),
            feedback: given.feedback.unwrap_or(own.feedback),
            rungs: given.rungs,
            target: given.target,
            ..own
        }
    }
}

impl Default for Kaiju1 {
    fn default() -> Self {
        Self::of(Kaiju1Preset::default())
    }
}

impl Kaiju1 {
    /// A preset as it is.
    pub fn of(preset: Kaiju1Preset) -> Self {
        let Kaiju1Setting { code_bits, hi_frac } = preset.setting();
        Self { preset, code_bits, hi_frac, feedback: true, rungs: Vec::new(), target: None }
    }

    /// The setting of the fields.
    pub fn setting(&self) -> Kaiju1Setting {
        Kaiju1Setting { code_bits: self.code_bits, hi_frac: self.hi_frac }
    }

    /// Every setting that an expert may have, in the order that a job's rung counts in.
    pub fn settings(&self) -> Vec<Kaiju1Setting> {
        if self.rungs.is_empty() { vec![self.setting()] } else { self.rungs.clone() }
    }

    /// Lets each expert have the setting its error is worth, within so many bits a weight of a layer: out of both presets,
    /// wider side-bands, and what lies below.
    #[must_use]
    pub fn by_expert(self, target: Rational) -> Self {
        let rung = |code_bits, hi_frac| Kaiju1Setting { code_bits, hi_frac: Decimal(hi_frac) };
        let mut rungs = vec![
            rung(56, 0.025),
            rung(56, 0.10),
            rung(64, 0.025),
            rung(64, 0.05),
            rung(64, 0.10),
            rung(64, 0.20),
        ];
        if !rungs.contains(&self.setting()) {
            rungs.push(self.setting());
        }
        Self { rungs, target: Some(target), ..self }
    }

    /// Checks the range of every value.
    pub(crate) fn validate(&self) -> Result<(), Box<Refusal>> {
        let wrong = |field: &str, value: String, wanted: &str| {
            Err(Box::new(
                refuse(format!("kaiju1.{field} is {value}")).field(format!("kaiju1.{field}")).wanted(wanted),
            ))
        };
        let settings = [self.setting()].into_iter().chain(self.rungs.iter().copied());
        for (at, setting) in settings.enumerate() {
            let field =
                |name: &str| if at == 0 { name.to_owned() } else { format!("rungs[{}].{name}", at - 1) };
            if ![56, 64].contains(&setting.code_bits) {
                return wrong(&field("code_bits"), setting.code_bits.to_string(), "56 or 64");
            }
            if !(0.0..1.0).contains(&setting.hi_frac.0) {
                return wrong(&field("hi_frac"), setting.hi_frac.0.to_string(), "0 to below 1");
            }
        }
        if self.rungs.is_empty() {
            return match self.target {
                None => Ok(()),
                Some(target) => wrong("target", target.to_string(), "null where there are no rungs"),
            };
        }
        let twice = (1..self.rungs.len()).find(|&at| self.rungs[..at].contains(&self.rungs[at]));
        if let Some(at) = twice {
            return wrong("rungs", format!("{} twice", self.rungs[at]), "distinct settings");
        }
        if !(2..=MAX_RUNGS).contains(&self.rungs.len()) || !self.rungs.contains(&self.setting()) {
            let listed: Vec<String> = self.rungs.iter().map(Kaiju1Setting::to_string).collect();
            return wrong(
                "rungs",
                listed.join(", "),
                &format!("2 to {MAX_RUNGS} settings, {} among them, or none", self.setting()),
            );
        }
        match self.target {
            Some(Rational { numerator, denominator })
                if denominator != 0 && numerator / denominator <= 16 && numerator != 0 =>
            {
                Ok(())
            }
            target => wrong(
                "target",
                target.map_or("null".to_owned(), |target| target.to_string()),
                "bits a weight as a fraction, above 0 and below 17",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_recipe_leaves_out_is_its_presets() {
        let read = |text: &str| serde_json::from_str::<Kaiju1>(text);
        assert_eq!(read("{}").unwrap(), Kaiju1::default());
        assert_eq!(read(r#"{"preset":"v1"}"#).unwrap(), Kaiju1::of(Kaiju1Preset::V1));
        assert_eq!(read(r#"{"code_bits":64,"hi_frac":"0.025"}"#).unwrap(), Kaiju1::default());
        let other = read(r#"{"preset":"v1","hi_frac":0.05,"feedback":false}"#).unwrap();
        assert_eq!((other.code_bits, other.hi_frac, other.feedback), (56, Decimal(0.05), false));
        assert_eq!(read(&serde_json::to_string(&other).unwrap()).unwrap(), other);
        assert!(read(r#"{"hi":0.05}"#).unwrap_err().to_string().contains("hi"));
    }

    #[test]
    fn values_out_of_range_are_refused_by_their_field() {
        let target = Rational { numerator: 3, denominator: 1 };
        let rungs = Kaiju1::default().by_expert(target);
        rungs.validate().unwrap();
        assert_eq!(rungs.settings().len(), 6);
        assert_eq!(Kaiju1 { hi_frac: Decimal(0.0), ..Kaiju1::default() }.by_expert(target).rungs.len(), 7);
        let zero = Rational { numerator: 3, denominator: 0 };
        let own = Kaiju1::default();
        for (bad, field) in [
            (Kaiju1 { code_bits: 57, ..own.clone() }, "kaiju1.code_bits"),
            (Kaiju1 { hi_frac: Decimal(1.0), ..own.clone() }, "kaiju1.hi_frac"),
            (Kaiju1 { hi_frac: Decimal(f64::NAN), ..own.clone() }, "kaiju1.hi_frac"),
            (Kaiju1 { target: Some(target), ..own.clone() }, "kaiju1.target"),
            (Kaiju1 { target: None, ..rungs.clone() }, "kaiju1.target"),
            (Kaiju1 { target: Some(zero), ..rungs.clone() }, "kaiju1.target"),
            (Kaiju1 { rungs: rungs.rungs[..2].to_vec(), ..rungs.clone() }, "kaiju1.rungs"),
            (Kaiju1 { rungs: [&rungs.rungs[..], &rungs.rungs[..1]].concat(), ..rungs.clone() }, "twice"),
            (
                Kaiju1 {
                    rungs: vec![own.setting(), Kaiju1Setting { code_bits: 8, ..own.setting() }],
                    ..rungs.clone()
                },
                "kaiju1.rungs[1].code_bits",
            ),
        ] {
            let refusal = bad.validate().unwrap_err();
            assert!(refusal.to_string().contains(field), "{field}: {refusal}");
        }
    }
}
