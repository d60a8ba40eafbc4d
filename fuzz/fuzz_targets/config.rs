//! Any bytes as a model's config: refused by name, or a geometry that holds what its page promises.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use walk::config::Geometry;
use walk::config::geometry::MAX_SIZE;

fuzz_target!(|bytes: &[u8]| {
    let path = Path::new("config.json");
    match Geometry::parse(path, bytes) {
        Ok(geometry) => {
            let layers = geometry.num_hidden_layers;
            assert!((1..=MAX_SIZE).contains(&layers) && geometry.first_moe_layer() < layers);
            assert!(
                geometry.indexer_is_full(0) && !geometry.is_moe(layers) && !geometry.indexer_is_full(layers)
            );
            assert!(!geometry.moe_layers().is_empty());
            assert!(geometry.rope.theta.is_finite() && !geometry.rope.to_string().is_empty());
            assert!(geometry.qk_head_dim() > 0 && geometry.shared_intermediate_size() > 0);
            // Reading is deterministic.
            assert_eq!(Geometry::parse(path, bytes).unwrap(), geometry);
        }
        Err(error) => assert!(error.to_string().starts_with("config.json")),
    }
});
