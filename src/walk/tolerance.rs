//! Tolerances as the audits record them, beside the values a walk should have.

use serde::{Deserialize, Serialize};

use crate::config::recipe::Decimal;

/// Share of its promise by which a finished expert's held-out loss may exceed it.
pub const INTERACTION_RELATIVE: f64 = 0.25;
/// What it may exceed it by beside that, as a relative loss.
pub const INTERACTION_ABSOLUTE: f64 = 1e-4;
/// Largest absolute difference of an output of installed experts from the reference.
pub const INSTALL_MAX_ABS: f64 = 1.0 / 32.0;
/// Relative L2 error of all outputs of installed experts against the reference.
pub const INSTALL_RELATIVE_L2: f64 = 1.0 / 512.0;

/// A tolerance in force.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tolerance {
    /// Its value.
    pub value: Decimal,
    /// What it is where no recipe says otherwise.
    pub default: Decimal,
    /// Whether the value is above the default: what passed may be worse than a reader expects.
    pub loosened: bool,
}

impl Tolerance {
    /// A recipe's tolerance beside its default.
    pub fn new(value: Decimal, default: f64) -> Self {
        Self { value, default: Decimal(default), loosened: value.0 > default }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Recipe;

    #[test]
    fn a_looser_tolerance_is_flagged_and_a_tighter_one_is_not() {
        let loosened = |value: f64| Tolerance::new(Decimal(value), INSTALL_MAX_ABS).loosened;
        assert_eq!([0.01, 1.0 / 32.0, 0.031_250_1].map(loosened), [false, false, true]);
    }

    #[test]
    fn the_built_in_recipe_loosens_nothing() {
        let recipe = Recipe::built_in().unwrap();
        let (interaction, install) = (recipe.interaction_tolerance, recipe.install_tolerance);
        for (value, default) in [
            (interaction.relative, INTERACTION_RELATIVE),
            (interaction.absolute, INTERACTION_ABSOLUTE),
            (install.max_abs, INSTALL_MAX_ABS),
            (install.relative_l2, INSTALL_RELATIVE_L2),
        ] {
            assert_eq!(value.0, default);
        }
    }
}
