//! Exact routing mass.
//!
//! Every finite non-negative f32 is an integer number of 2^-149 units; the mass of an expert is the integer sum of its
//! router weights. Integer sums do not depend on their order, so mass is invariant to batching.

use num_bigint::BigUint;

use crate::error::{Result, refuse};

/// Exact router-weight sums, one an expert, in units of 2^-149.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mass {
    /// Units of 2^-149 by expert id.
    pub units: Vec<BigUint>,
    /// Rows routed to each expert.
    pub rows: Vec<u64>,
}

/// What the weights of one token must add up to.
#[derive(Debug, Clone, Copy)]
pub struct TokenRule {
    /// Whether the chosen scores are normalised (`norm_topk_prob`).
    pub normalised: bool,
    /// `routed_scaling_factor`.
    pub factor: f32,
}

impl Mass {
    /// No mass yet, for `experts` experts.
    pub fn new(experts: usize) -> Self {
        Self { units: vec![BigUint::ZERO; experts], rows: vec![0; experts] }
    }

    /// Audits one token's routing and adds it. `scores` are the router's unbiased scores of all experts.
    ///
    /// # Errors
    /// A repeated or unknown expert, a weight that is negative or not finite, a sum further than 4·k ulp from the
    /// declared value. The caller adds prompt, row and layer.
    pub fn add_token(&mut self, ids: &[i32], weights: &[f32], scores: &[f32], rule: TokenRule) -> Result<()> {
        for (i, &id) in ids.iter().enumerate() {
            if ids[..i].contains(&id) {
                return refuse(format!("routed to expert {id} twice")).wanted("distinct experts").err();
            }
        }
        let mut sum = 0.0f64;
        for (&id, &weight) in ids.iter().zip(weights) {
            sum += f64::from(weight);
            self.add(id, weight)?;
        }
        let chosen: f64 = ids.iter().map(|&id| f64::from(scores[id as usize])).sum();
        let declared = f64::from(rule.factor) * if rule.normalised { 1.0 } else { chosen };
        let ulp = f64::from(ulp(declared as f32));
        if (sum - declared).abs() > 4.0 * ulp * ids.len() as f64 {
            return refuse(format!("router weights add up to {sum}"))
                .wanted(format!("{declared} within {} ulp", 4 * ids.len()))
                .err();
        }
        Ok(())
    }

    /// Adds one routed weight.
    ///
    /// # Errors
    /// An unknown expert, a weight that is negative or not finite.
    pub fn add(&mut self, id: i32, weight: f32) -> Result<()> {
        let slot = usize::try_from(id).ok().filter(|&slot| slot < self.units.len());
        let Some(slot) = slot else {
            let wanted = format!("ids below {}", self.units.len());
            return refuse(format!("routed to expert {id}")).wanted(wanted).err();
        };
        let Some(units) = units(weight) else {
            let what = format!("router weight of expert {id} is {weight}");
            return refuse(what).wanted("finite, not negative").err();
        };
        self.units[slot] += units;
        self.rows[slot] += 1;
        Ok(())
    }

    /// Decimal strings, as artifacts store them.
    pub fn decimal(&self) -> Vec<String> {
        self.units.iter().map(ToString::to_string).collect()
    }

    /// The mass as a share of all mass, for reports only.
    pub fn shares(&self) -> Vec<f64> {
        let total: BigUint = self.units.iter().sum();
        let float = |x: &BigUint| x.to_string().parse::<f64>().unwrap_or(f64::INFINITY);
        let total = float(&total).max(f64::MIN_POSITIVE);
        self.units.iter().map(|u| float(u) / total).collect()
    }
}

/// A finite non-negative f32 in units of 2^-149; `None` for anything else.
pub fn units(x: f32) -> Option<BigUint> {
    if !x.is_finite() || x.is_sign_negative() && x != 0.0 {
        return None;
    }
    let (exponent, fraction) = (x.abs().to_bits() >> 23, x.to_bits() & 0x7f_ffff);
    Some(match exponent {
        0 => BigUint::from(fraction),
        _ => BigUint::from(fraction | 0x80_0000) << (exponent - 1),
    })
}

fn ulp(x: f32) -> f32 {
    f32::from_bits(x.to_bits() + 1) - x
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: TokenRule = TokenRule { normalised: true, factor: 2.5 };

    #[test]
    fn units_are_exact_at_the_edges() {
        assert_eq!(units(0.0), Some(BigUint::ZERO));
        assert_eq!(units(f32::from_bits(1)), Some(BigUint::from(1u32)));
        assert_eq!(units(f32::MIN_POSITIVE), Some(BigUint::from(1u32) << 23));
        assert_eq!(units(1.0), Some(BigUint::from(1u32) << 149));
        assert_eq!(units(f32::MAX), Some(BigUint::from(0xff_ffffu32) << 253));
        assert_eq!(units(-1.0), None);
        assert_eq!(units(f32::NAN), None);
        assert_eq!(units(f32::INFINITY), None);
    }

    #[test]
    fn the_sum_does_not_depend_on_order() {
        let tokens = [([0, 2], [1.0f32, 1.5]), ([2, 1], [1e-20 + 2.0, 0.5]), ([1, 0], [0.3, 2.2])];
        let add = |order: &[usize]| {
            let mut mass = Mass::new(3);
            for &t in order {
                mass.add_token(&tokens[t].0, &tokens[t].1, &[0.0; 3], RULE).unwrap();
            }
            mass
        };
        assert_eq!(add(&[0, 1, 2]), add(&[2, 0, 1]));
    }

    #[test]
    fn a_bad_token_is_refused() {
        let mut mass = Mass::new(3);
        let mut message = |ids: &[i32], weights: &[f32]| {
            mass.add_token(ids, weights, &[0.5; 3], RULE).unwrap_err().to_string()
        };
        assert!(message(&[1, 1], &[1.0, 1.5]).contains("twice"));
        assert!(message(&[1, 3], &[1.0, 1.5]).contains("expert 3"));
        assert!(message(&[0, 1], &[1.0, 1.4]).contains("add up to"));
        assert!(message(&[0, 1], &[f32::NAN, 1.0]).contains("NaN"));
        let unnormalised = TokenRule { normalised: false, factor: 1.0 };
        assert!(Mass::new(3).add_token(&[0, 1], &[0.5, 0.5], &[0.5; 3], unnormalised).is_ok());
    }
}
