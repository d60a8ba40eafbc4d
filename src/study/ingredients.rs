//! The ingredients of a recipe that can be switched off one at a time, and what is left without each.

use crate::config::Recipe;
use crate::config::choices::{
    AllocationRule, DownCovariance, DownTarget, Metric, PermutationPolicy, Rounding, ScaleFamily, VectorScope,
};
use crate::error::{Result, refuse};

/// One ingredient.
pub struct Ingredient {
    /// What `--only` calls it.
    pub name: &'static str,
    /// What is compared: with against without.
    pub question: &'static str,
    switch: fn(&Recipe) -> Switch,
}

/// What becomes of a recipe when an ingredient is switched.
enum Switch {
    /// Switched off: the recipe without it.
    Off(Box<Recipe>),
    /// The base lacks it: recipes with it, by a word for each.
    On(Vec<(&'static str, Recipe)>),
    /// Nothing would change, and why.
    Same(&'static str),
}

/// A recipe to run beside the base.
#[derive(Debug, Clone)]
pub struct Variant {
    /// Name of its folder and of its row: the ingredient's, and a word more where there are several.
    pub name: String,
    /// The ingredient.
    pub ingredient: &'static str,
    /// Whether the ingredient is added to a base that lacks it, rather than taken out.
    pub added: bool,
    /// The recipe.
    pub recipe: Recipe,
}

/// An ingredient that is not run.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Skipped {
    /// The ingredient.
    pub ingredient: &'static str,
    /// Why its switch would change nothing.
    pub why: &'static str,
}

/// All of them, in the order they are run and reported.
pub const INGREDIENTS: &[Ingredient] = &[
    Ingredient {
        name: "search",
        question: "vectors, orders and scales searched, or draw 0 as it is",
        switch: |base| match base.search {
            true => off(Recipe { search: false, draws: 1, ..base.clone() }),
            false => Switch::Same("the base recipe does not search"),
        },
    },
    Ingredient {
        name: "permutation",
        question: "intermediate channels put in a searched order, or left in the source's",
        switch: |base| match (base.search, base.permutations.len()) {
            (false, _) => Switch::Same("the base recipe does not search"),
            (true, 0..=1) => Switch::Same("the base recipe permutes nothing"),
            _ => off(Recipe { permutations: vec![PermutationPolicy::Identity], ..base.clone() }),
        },
    },
    Ingredient {
        name: "scales",
        question: "searched block scales, or none",
        switch: |base| match (base.search, base.scale_families.len()) {
            (false, _) => Switch::Same("the base recipe does not search"),
            (true, 0..=1) => Switch::Same("the base recipe scales no blocks"),
            _ => off(Recipe { scale_families: vec![ScaleFamily::Identity], ..base.clone() }),
        },
    },
    Ingredient {
        name: "draws",
        question: "the best of several sign draws, or draw 0",
        switch: |base| match (base.search, base.draws) {
            (false, _) => Switch::Same("the base recipe does not search"),
            (true, 1) => Switch::Same("the base recipe has one draw"),
            _ => off(Recipe { draws: 1, ..base.clone() }),
        },
    },
    Ingredient {
        name: "allocation-count",
        question: "mass-weighted measured allocation, or the same bits by count of routed rows",
        switch: |base| allocation(base, AllocationRule::Count),
    },
    Ingredient {
        name: "allocation-assumed",
        question: "measured sensitivity, or an assumed one",
        switch: |base| allocation(base, AllocationRule::Assumed),
    },
    Ingredient {
        name: "rounding",
        question: "LDLQ, or plain rounding",
        switch: |base| match base.rounding {
            Rounding::Ldlq => off(Recipe { rounding: Rounding::Nearest, ..base.clone() }),
            Rounding::Nearest => Switch::Same("the base recipe rounds plainly"),
        },
    },
    Ingredient {
        name: "sweeps",
        question: "refinement sweeps after LDLQ, or none",
        switch: |base| match (base.rounding, base.refinement_sweeps) {
            (Rounding::Nearest, _) => Switch::Same("plain rounding has nothing to refine"),
            (_, 0) => {
                let with = |sweeps| Recipe { refinement_sweeps: sweeps, ..base.clone() };
                Switch::On(vec![("1", with(1)), ("2", with(2))])
            }
            _ => off(Recipe { refinement_sweeps: 0, ..base.clone() }),
        },
    },
    Ingredient {
        name: "metric",
        question: "LDLQ in the metric of the stored vector, or of its signs",
        switch: |base| match (base.rounding, base.metric) {
            (Rounding::Nearest, _) => Switch::Same("plain rounding uses no metric"),
            (_, Metric::Signs) => Switch::Same("the base recipe has the metric of the signs"),
            (_, Metric::Stored) => off(Recipe { metric: Metric::Signs, ..base.clone() }),
        },
    },
    Ingredient {
        name: "vectors",
        question: "vectors the layer shares, or the older recipe's own two with channel scales for every tensor",
        switch: |base| match base.vectors {
            // What chooses among shared vectors has no say over a tensor's own.
            VectorScope::Shared => off(Recipe {
                vectors: VectorScope::PerTensor,
                search: false,
                draws: 1,
                permutations: vec![PermutationPolicy::Identity],
                scale_families: vec![ScaleFamily::Identity],
                ..base.clone()
            }),
            VectorScope::PerTensor => Switch::Same("the base recipe gives every tensor its own"),
        },
    },
    Ingredient {
        name: "down-covariance",
        question: "down's covariance through the reconstructed gate and up, or through the source's",
        switch: |base| match base.down_covariance {
            DownCovariance::Reconstructed => {
                off(Recipe { down_covariance: DownCovariance::Source, ..base.clone() })
            }
            DownCovariance::Source => Switch::Same("the base recipe goes through the source"),
        },
    },
    Ingredient {
        name: "down-target",
        question: "down encoded towards its corrected weight, or towards the source's",
        switch: |base| match base.down_target {
            DownTarget::Corrected => off(Recipe { down_target: DownTarget::Source, ..base.clone() }),
            DownTarget::Source => Switch::Same("the base recipe has the source weight as its target"),
        },
    },
    Ingredient {
        name: "fixed-point",
        question: "probes and allocation to a fixed point, or once",
        switch: |base| match (base.fixed_bits, base.fixed_point_iterations) {
            (Some(_), _) => Switch::Same("the base recipe fixes the bits"),
            (None, 1) => Switch::Same("the base recipe allocates once"),
            _ => off(Recipe { fixed_point_iterations: 1, ..base.clone() }),
        },
    },
];

fn off(recipe: Recipe) -> Switch {
    Switch::Off(Box::new(recipe))
}

fn allocation(base: &Recipe, rule: AllocationRule) -> Switch {
    match (base.fixed_bits, base.allocation) {
        (Some(_), _) => Switch::Same("the base recipe fixes the bits"),
        (None, AllocationRule::Measured) => off(Recipe { allocation: rule, ..base.clone() }),
        (None, _) => Switch::Same("the base recipe does not allocate by measured loss"),
    }
}

/// The variants of a base recipe by ingredient, those of `only` where it is given, and the ingredients whose switch
/// would change nothing.
///
/// # Errors
/// A name in `only` that is no ingredient, and a variant whose values are out of range.
pub fn variants(base: &Recipe, only: Option<&[String]>) -> Result<(Vec<Variant>, Vec<Skipped>)> {
    if let Some(stranger) =
        only.and_then(|only| only.iter().find(|name| !INGREDIENTS.iter().any(|known| known.name == **name)))
    {
        let names: Vec<&str> = INGREDIENTS.iter().map(|ingredient| ingredient.name).collect();
        return refuse(format!("no ingredient is called {stranger:?}"))
            .field("--only")
            .wanted(names.join(", "))
            .err();
    }
    let (mut variants, mut skipped) = (Vec::new(), Vec::new());
    for ingredient in INGREDIENTS {
        if only.is_some_and(|only| !only.iter().any(|name| name == ingredient.name)) {
            continue;
        }
        let mut add = |name: String, added: bool, recipe: Recipe| -> Result<()> {
            let recipe = Recipe { variant: format!("ablate-{name}"), ..recipe }.checked()?;
            variants.push(Variant { name, ingredient: ingredient.name, added, recipe });
            Ok(())
        };
        match (ingredient.switch)(base) {
            Switch::Off(recipe) => add(ingredient.name.to_owned(), false, *recipe)?,
            Switch::On(recipes) => {
                for (word, recipe) in recipes {
                    add(format!("{}-{word}", ingredient.name), true, recipe)?;
                }
            }
            Switch::Same(why) => skipped.push(Skipped { ingredient: ingredient.name, why }),
        }
    }
    Ok((variants, skipped))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_changes_one_thing_or_says_that_it_would_change_nothing() {
        let base = Recipe::built_in().unwrap();
        let (all, skipped) = variants(&base, None).unwrap();
        assert!(all.len() + skipped.len() >= INGREDIENTS.len());
        for variant in &all {
            let same = Recipe { variant: base.variant.clone(), ..variant.recipe.clone() };
            assert_ne!(same, base, "{}", variant.name);
        }
        let mut names: Vec<&str> = all.iter().map(|variant| variant.name.as_str()).collect();
        names.dedup();
        assert_eq!(names.len(), all.len());
    }

    #[test]
    fn a_searching_recipe_can_lose_each_part_of_its_search() {
        let base = Recipe {
            search: true,
            draws: 8,
            permutations: vec![PermutationPolicy::Identity, PermutationPolicy::EnergyBalanced],
            scale_families: vec![ScaleFamily::Identity, ScaleFamily::QuarterRms],
            refinement_sweeps: 1,
            ..Recipe::built_in().unwrap()
        };
        let only = ["search", "permutation", "scales", "draws", "sweeps"].map(str::to_owned);
        let (all, skipped) = variants(&base, Some(&only)).unwrap();
        let names: Vec<&str> = all.iter().map(|variant| variant.name.as_str()).collect();
        assert_eq!((names, skipped), (only.iter().map(String::as_str).collect(), vec![]));
        assert_eq!((all[0].recipe.search, all[3].recipe.search, all[3].recipe.draws), (false, true, 1));
        assert_eq!(all[4].recipe.refinement_sweeps, 0);
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        let error = variants(&Recipe::built_in().unwrap(), Some(&["serach".to_owned()])).err().unwrap();
        let said = error.to_string();
        assert!(said.contains("\"serach\"") && said.contains("search, permutation"), "{said}");
    }
}
