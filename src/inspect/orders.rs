//! The order of experts' intermediate channels, as manifests beside the shards tell it.
//!
//! A walk may store the channels of an expert in another order than its source (rows of gate and up, columns of down): the
//! expert computes the same, and its weights lie elsewhere. To be compared with the source they are put back.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::checkpoint::names::{Projection, split_expert};
use crate::linalg::Matrix;

/// For every expert whose order is known and another than the source's: the stored place of each source channel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChannelOrders(BTreeMap<(usize, usize), Vec<usize>>);

impl ChannelOrders {
    /// Reads the manifests of schema v2 and v1 in `dir`. What cannot be read, or is no order, is as if it were not there.
    pub fn read(dir: &Path) -> Self {
        let mut orders = BTreeMap::new();
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let of_layer = ["r7-experts-layer-", "r7-v1-layer-"].iter().any(|stem| name.starts_with(stem));
            if !of_layer || !name.ends_with(".json") {
                continue;
            }
            let bytes = std::fs::read(entry.path()).unwrap_or_default();
            let manifest: Value = serde_json::from_slice(&bytes).unwrap_or_default();
            let source = manifest.get("source_manifest").unwrap_or(&manifest);
            let (Some(layer), Some(permutations)) =
                (source["layer"].as_u64(), source["permutations"].as_object())
            else {
                continue;
            };
            for (expert, order) in permutations {
                if let (Ok(expert), Some(places)) = (expert.parse(), places(&order["new_to_old"])) {
                    orders.insert((layer as usize, expert), places);
                }
            }
        }
        Self(orders)
    }

    /// The order of the expert that the weight is of.
    pub fn of(&self, weight: &str) -> Option<&[usize]> {
        let (layer, expert, _) = split_expert(weight.strip_suffix(".weight")?)?;
        self.0.get(&(layer, expert)).map(Vec::as_slice)
    }

    /// A routed expert's weight `[N, K]` in the source's order. What the order does not fit stays as it is.
    pub fn undo(&self, name: &str, weight: Matrix) -> Matrix {
        let module = name.strip_suffix(".weight").and_then(split_expert);
        let (Some((.., projection)), Some(places)) = (module, self.of(name)) else { return weight };
        match projection {
            Projection::Gate | Projection::Up if places.len() == weight.rows => weight.gather_rows(places),
            Projection::Down if places.len() == weight.cols => {
                let rows = weight.data.chunks_exact(weight.cols);
                let data = rows.flat_map(|row| places.iter().map(|&place| row[place])).collect();
                Matrix::new(weight.rows, weight.cols, data)
            }
            _ => weight,
        }
    }
}

/// Where each source channel is stored; `None` where that is its own place, or the list is no order.
fn places(new_to_old: &Value) -> Option<Vec<usize>> {
    let new_to_old = new_to_old.as_array()?;
    let mut places = vec![usize::MAX; new_to_old.len()];
    for (place, old) in new_to_old.iter().enumerate() {
        let slot = places.get_mut(usize::try_from(old.as_u64()?).ok()?)?;
        if std::mem::replace(slot, place) != usize::MAX {
            return None;
        }
    }
    places.iter().enumerate().any(|(at, &place)| at != place).then_some(places)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn channels_go_back_to_their_places() {
        assert_eq!(places(&json!([2, 0, 1])), Some(vec![1, 2, 0]));
        for none in [json!([0, 1]), json!([0, 0]), json!([0, 2]), json!([-1, 0]), json!("x"), json!(null)] {
            assert_eq!(places(&none), None, "{none}");
        }
        let folder = tempfile::tempdir().unwrap();
        let manifest = json!({"layer": 1, "permutations": {"0": {"new_to_old": [2, 0, 1]}, "x": {}}});
        std::fs::write(folder.path().join("r7-experts-layer-001.json"), manifest.to_string()).unwrap();
        std::fs::write(folder.path().join("r7-experts-layer-002.json"), "{").unwrap();
        let orders = ChannelOrders::read(folder.path());
        let v1 = json!({"layer": 1, "source_manifest": manifest});
        std::fs::remove_file(folder.path().join("r7-experts-layer-001.json")).unwrap();
        std::fs::write(folder.path().join("r7-v1-layer-001.json"), v1.to_string()).unwrap();
        assert_eq!(ChannelOrders::read(folder.path()), orders);

        // Stored rows 20, 00, 10 are source rows 2, 0, 1.
        let name = |projection: &str| format!("model.layers.1.mlp.experts.0.{projection}.weight");
        let gate = Matrix::new(3, 2, vec![20., 21., 0., 1., 10., 11.]);
        let back = orders.undo(&name("gate_proj"), gate.clone());
        assert_eq!(back.data, [0., 1., 10., 11., 20., 21.]);
        let down = orders.undo(&name("down_proj"), gate.transposed());
        assert_eq!(down.transposed(), back);
        assert_eq!(orders.undo("model.layers.1.mlp.experts.1.gate_proj.weight", gate.clone()), gate);
    }
}
