//! The codec on the command line: what is said beside `--recipe`.

use clap::{Args, ValueEnum};

use crate::config::Recipe;
use crate::config::choices::CodecName;
use crate::config::kaiju1::{Kaiju1, Kaiju1Preset};
use crate::config::recipe::{Decimal, Rational};
use crate::error::{Result, refuse};

/// Codecs offered on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Codec {
    /// EXL3: rotated, error-corrected, 2 to 6 bits a tensor.
    Trellis,
    /// KAIJU1: the Leech lattice in blocks of 24 weights, an int8 side-band.
    Kaiju1,
}

/// Presets offered on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Preset {
    /// 56-bit codes, a tenth of the channels at 8 bits.
    V1,
    /// 64-bit codes, a fortieth of the channels at 8 bits.
    V2,
}

/// Which codec, and the settings of KAIJU1.
#[derive(Debug, Args)]
#[command(next_help_heading = "Codec")]
pub struct CodecArgs {
    /// Weight codec, instead of the recipe's. The knobs below belong to kaiju1.
    #[arg(long, value_name = "NAME", value_enum)]
    codec: Option<Codec>,

    /// Code width and side-band of kaiju1 by name [default: v2].
    #[arg(long, value_name = "NAME", value_enum)]
    preset: Option<Preset>,

    /// Bits of the code of 24 weights, 56 or 64, instead of the preset's.
    #[arg(long, value_name = "BITS")]
    code_bits: Option<u32>,

    /// Share of the input channels in the int8 side-band, 0 to below 1, instead of the preset's.
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true)]
    hi_frac: Option<f64>,

    /// Do not feed a block's error forward to those after it.
    #[arg(long)]
    no_feedback: bool,

    /// Choose each expert's setting by measured loss, within so many bits a weight of a layer, such as 3.1.
    #[arg(long, value_name = "BITS")]
    target_bpw: Option<String>,
}

impl CodecArgs {
    /// The recipe with the codec that is asked for.
    ///
    /// # Errors
    /// A knob of kaiju1 with another codec, a value out of range, and what [`Recipe::with_kaiju1`] refuses.
    pub fn apply(&self, recipe: Recipe) -> Result<Recipe> {
        let knobs = [
            ("--preset", self.preset.is_some()),
            ("--code-bits", self.code_bits.is_some()),
            ("--hi-frac", self.hi_frac.is_some()),
            ("--no-feedback", self.no_feedback),
            ("--target-bpw", self.target_bpw.is_some()),
        ];
        let given = knobs.iter().find(|(_, given)| *given).map(|(knob, _)| *knob);
        let codec = match self.codec {
            Some(Codec::Trellis) => CodecName::Trellis,
            Some(Codec::Kaiju1) => CodecName::Kaiju1,
            None => recipe.codec,
        };
        match (codec, given) {
            (CodecName::Trellis, Some(knob)) => {
                return refuse("a setting of kaiju1 for another codec")
                    .field(knob)
                    .wanted("--codec kaiju1")
                    .err();
            }
            (CodecName::Trellis, None) if recipe.codec != CodecName::Trellis => {
                return refuse("the recipe is one of kaiju1")
                    .file(&recipe.origin)
                    .field("--codec")
                    .wanted("a recipe of the trellis codec")
                    .err();
            }
            (CodecName::Trellis, None) => return Ok(recipe),
            (CodecName::Kaiju1, None) if recipe.codec == CodecName::Kaiju1 => return Ok(recipe),
            (CodecName::Kaiju1, _) => {}
        }
        let preset = self.preset.map(|preset| match preset {
            Preset::V1 => Kaiju1Preset::V1,
            Preset::V2 => Kaiju1Preset::V2,
        });
        let mut kaiju1 = match (preset, &recipe.kaiju1) {
            (None, Some(own)) => own.clone(),
            (preset, _) => Kaiju1::of(preset.unwrap_or_default()),
        };
        kaiju1.code_bits = self.code_bits.unwrap_or(kaiju1.code_bits);
        // Adding 0 turns -0 into it: one share has one spelling.
        kaiju1.hi_frac = self.hi_frac.map_or(kaiju1.hi_frac, |share| Decimal(share + 0.0));
        kaiju1.feedback &= !self.no_feedback;
        if let Some(target) = &self.target_bpw {
            kaiju1 = kaiju1.by_expert(parse_target(target)?);
        }
        // By itself first, so that no recipe's file is blamed for a flag.
        kaiju1.validate().map_err(|refusal| *refusal)?;
        recipe.with_kaiju1(kaiju1)
    }
}

/// A decimal number as an exact fraction in lowest terms.
fn parse_target(text: &str) -> Result<Rational> {
    let (whole, digits) = text.split_once('.').unwrap_or((text, ""));
    let plain = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let fraction = (plain(whole) && plain(digits) && (1..=9).contains(&(whole.len() + digits.len())))
        .then(|| Some((format!("{whole}{digits}").parse::<u64>().ok()?, 10u64.pow(digits.len() as u32))))
        .flatten();
    let Some((numerator, denominator)) = fraction else {
        return refuse(format!("{text:?} is no number of bits"))
            .field("--target-bpw")
            .wanted("a decimal number of up to 9 digits, such as 3.1")
            .err();
    };
    let (mut a, mut b) = (numerator, denominator);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    Ok(Rational { numerator: numerator / a, denominator: denominator / a })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none() -> CodecArgs {
        CodecArgs {
            codec: None,
            preset: None,
            code_bits: None,
            hi_frac: None,
            no_feedback: false,
            target_bpw: None,
        }
    }

    #[test]
    fn targets_are_exact() {
        for (text, numerator, denominator) in [("3.1", 31, 10), ("3", 3, 1), ("2.750", 11, 4), (".5", 1, 2)] {
            assert_eq!(parse_target(text).unwrap(), Rational { numerator, denominator }, "{text}");
        }
        for text in ["", ".", "-3", "3e1", "3.1.2", "12345678.90"] {
            assert!(parse_target(text).unwrap_err().to_string().contains("--target-bpw"), "{text}");
        }
    }

    #[test]
    fn flags_make_the_recipe_that_a_file_would() {
        let trellis = Recipe::built_in().unwrap();
        assert_eq!(none().apply(trellis.clone()).unwrap(), trellis);
        let kaiju1 = CodecArgs { codec: Some(Codec::Kaiju1), ..none() };
        let recipe = kaiju1.apply(trellis.clone()).unwrap();
        assert_eq!(recipe.kaiju1, Some(Kaiju1::default()));
        assert_eq!(kaiju1.apply(recipe.clone()).unwrap(), recipe);
        let other =
            CodecArgs { hi_frac: Some(0.05), no_feedback: true, ..none() }.apply(recipe.clone()).unwrap();
        let own = other.kaiju1.unwrap();
        assert_eq!((own.code_bits, own.hi_frac, own.feedback), (64, Decimal(0.05), false));
        let by_expert =
            CodecArgs { target_bpw: Some("3.1".into()), ..kaiju1 }.apply(trellis.clone()).unwrap();
        assert_eq!(
            (by_expert.variant.as_str(), by_expert.kaiju1.unwrap().rungs.len()),
            ("kaiju1-by-expert", 6)
        );
        for (args, recipe) in [
            (CodecArgs { preset: Some(Preset::V1), ..none() }, trellis),
            (CodecArgs { codec: Some(Codec::Trellis), ..none() }, recipe),
        ] {
            assert!(args.apply(recipe).is_err(), "{args:?}");
        }
    }
}
