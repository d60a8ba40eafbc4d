//! Rotary position parameters of a config: `rope_parameters`, or `rope_theta` and `rope_scaling` of older files.
//!
//! Plain RoPE and YaRN with `mscale_all_dim` are read; every other `rope_type` is refused. A value given twice must be
//! the same both times.

use std::fmt;

use super::fields::Fields;
use crate::error::Result;

/// Rotary positions.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Long-context stretching; `None` for `rope_type: default`.
    pub yarn: Option<Yarn>,
}

/// YaRN (arXiv 2309.00071) as Transformers parametrises it.
#[derive(Debug, Clone, PartialEq)]
pub struct Yarn {
    /// Stretch of the context.
    pub factor: f64,
    /// Positions of the unstretched model.
    pub original_max_position_embeddings: usize,
    /// Rotations above which a frequency is kept.
    pub beta_fast: f64,
    /// Rotations below which a frequency is divided by `factor`.
    pub beta_slow: f64,
    /// Numerator coefficient of the factor on cosines and sines.
    pub mscale: Option<f64>,
    /// Coefficient of the factor on the attention scale, and the denominator's on cosines and sines.
    pub mscale_all_dim: f64,
    /// The factor on cosines and sines itself, where given.
    pub attention_factor: Option<f64>,
    /// Whether the corrected range is rounded outwards to whole pairs.
    pub truncate: bool,
}

impl fmt::Display for Rope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "theta {}", self.theta)?;
        let Some(yarn) = &self.yarn else { return Ok(()) };
        write!(
            f,
            ", yarn of factor {} from {} positions (beta {} to {}, mscale_all_dim {}, truncate {}",
            yarn.factor,
            yarn.original_max_position_embeddings,
            yarn.beta_slow,
            yarn.beta_fast,
            yarn.mscale_all_dim,
            yarn.truncate
        )?;
        for (name, value) in [("mscale", yarn.mscale), ("attention_factor", yarn.attention_factor)] {
            if let Some(value) = value {
                write!(f, ", {name} {value}")?;
            }
        }
        f.write_str(")")
    }
}

impl Yarn {
    /// `0.1 · mscale · ln(factor) + 1`, and 1 for a factor that stretches nothing.
    pub fn get_mscale(&self, mscale: f64) -> f64 {
        if self.factor <= 1.0 { 1.0 } else { 0.1 * mscale * self.factor.ln() + 1.0 }
    }
}

/// Reads whichever spelling the file uses.
pub(super) fn read_rope(fields: &Fields) -> Result<Rope> {
    let new = fields.nested("rope_parameters")?;
    let old = fields.nested("rope_scaling")?;
    let mut theta = fields.number("rope_theta")?;
    let mut kind = None;
    let elsewhere = |what: String| format!("what the file says elsewhere, {what}");
    for nested in [&new, &old].into_iter().flatten() {
        if let Some(value) = nested.number("rope_theta")? {
            let known = *theta.get_or_insert(value);
            nested.must("rope_theta", known == value, || elsewhere(known.to_string()))?;
        }
        for name in ["rope_type", "type"] {
            if let Some(value) = nested.text(name)? {
                let known = *kind.get_or_insert(value);
                nested.must(name, known == value, || elsewhere(format!("{known:?}")))?;
            }
        }
    }
    if let (Some(new), Some(old)) = (&new, &old) {
        old.same_where_shared(new)?;
    }
    let Some(theta) = theta else {
        return fields.at("missing", "rope_theta").wanted("it, at top level or in rope_parameters").err();
    };
    for nested in [&new, &old].into_iter().flatten() {
        let typed = nested.text("rope_type")?.or(nested.text("type")?).is_some();
        let stretch = nested.number("factor")?.is_some();
        nested.must("factor", typed || !stretch, || "a rope_type beside it".into())?;
    }
    let kind = kind.unwrap_or("default");
    if kind == "default" {
        return Ok(Rope { theta, yarn: None });
    }
    // The type came from one of the two objects; its parameters are read from the newer spelling first.
    let Some(nested) = new.or(old) else { return Ok(Rope { theta, yarn: None }) };
    nested.must("rope_type", kind == "yarn", || "\"default\", or \"yarn\" with mscale_all_dim".into())?;
    let Some(mscale_all_dim) = nested.number("mscale_all_dim")? else {
        return nested.at("missing for a yarn rope_type", "mscale_all_dim").wanted("a positive number").err();
    };
    let yarn = Yarn {
        factor: nested.positive("factor")?,
        original_max_position_embeddings: nested.size("original_max_position_embeddings")?,
        beta_fast: nested.number("beta_fast")?.unwrap_or(32.0),
        beta_slow: nested.number("beta_slow")?.unwrap_or(1.0),
        mscale: nested.number("mscale")?,
        mscale_all_dim,
        attention_factor: nested.number("attention_factor")?,
        truncate: nested.flag_or("truncate", true)?,
    };
    Ok(Rope { theta, yarn: Some(yarn) })
}
