//! Any bytes as a recipe: refused by name, or a recipe that survives its canonical form.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use walk::config::Recipe;
use walk::store::canonical;

fuzz_target!(|bytes: &[u8]| {
    let path = Path::new("recipe.json");
    match Recipe::parse(path, bytes) {
        Ok(recipe) => {
            assert_eq!(Recipe::parse(path, &canonical(&recipe).unwrap()).unwrap(), recipe);
            recipe.explain().unwrap();
            recipe.identity_hash().unwrap();
            for tensors in [0, 6, 24, 768, u64::MAX] {
                if let Err(error) = recipe.upgrades(tensors) {
                    assert!(error.to_string().starts_with("recipe.json"));
                }
            }
            recipe.clone().fast().checked().unwrap();
            for bits in [2, 3, 6, 7, u32::MAX] {
                let _ = recipe.clone().uniform(bits);
            }
        }
        Err(error) => assert!(error.to_string().starts_with("recipe.json")),
    }
});
