//! The fixed point between probes and allocation.
//!
//! Losses are measured in the context of a map of bits, and the map follows from the losses. Probing and allocating are
//! repeated until the whole map repeats. A map seen before the last one would go round for ever, and so might a map that
//! keeps changing: both fail closed. Source: the owner's Round 7 record, "Fixed point for asymmetric bits".

use crate::error::{Result, refuse};

/// The bits of gate, up and down of every expert that a layer is probed in.
pub type Contexts = Vec<[u32; 3]>;

/// The maps tried so far.
#[derive(Debug, Clone)]
pub struct FixedPoint {
    layer: usize,
    cap: u32,
    seen: Vec<Contexts>,
}

/// What follows from an allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// The map is the layer's.
    Settled,
    /// Probe again, in the map just chosen.
    Again(Contexts),
}

impl FixedPoint {
    /// Begins with the contexts of the first round. `cap` is the recipe's `fixed_point_iterations`; 1 allocates once,
    /// whatever comes of it.
    pub fn new(layer: usize, cap: u32, first: Contexts) -> Self {
        Self { layer, cap, seen: vec![first] }
    }

    /// Takes the map that a round of probes led to.
    ///
    /// # Errors
    /// A map seen before the last one (a cycle), or none that repeats within the cap.
    pub fn step(&mut self, chosen: Contexts) -> Result<Step> {
        let round = self.seen.len();
        if self.cap == 1 || self.seen.last() == Some(&chosen) {
            return Ok(Step::Settled);
        }
        if let Some(earlier) = self.seen.iter().position(|map| *map == chosen) {
            return Err(refuse(format!(
                "the fixed point cycles: iteration {} chose the map that iteration {earlier} was probed in",
                round - 1
            ))
            .layer(self.layer)
            .field("fixed_point_iterations")
            .wanted("a map of bits that repeats")
            .check());
        }
        if round as u32 == self.cap {
            return Err(refuse(format!("no fixed point within {} iterations", self.cap))
                .layer(self.layer)
                .field("fixed_point_iterations")
                .wanted("more iterations, or 1 to allocate once")
                .check());
        }
        self.seen.push(chosen.clone());
        Ok(Step::Again(chosen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(bits: u32) -> Contexts {
        vec![[4, bits, 3], [3, 4, 5]]
    }

    #[test]
    fn it_settles_when_the_whole_map_repeats() {
        let mut point = FixedPoint::new(3, 4, map(4));
        assert_eq!(point.step(map(5)).unwrap(), Step::Again(map(5)));
        assert_eq!(point.step(map(3)).unwrap(), Step::Again(map(3)));
        assert_eq!(point.step(map(3)).unwrap(), Step::Settled);
        assert_eq!(FixedPoint::new(3, 4, map(4)).step(map(4)).unwrap(), Step::Settled);
    }

    #[test]
    fn a_cycle_fails_closed_and_names_the_map() {
        let mut point = FixedPoint::new(3, 9, map(4));
        point.step(map(5)).unwrap();
        point.step(map(3)).unwrap();
        let error = point.step(map(5)).unwrap_err();
        assert_eq!(error.exit_code(), 1);
        let said = error.to_string();
        assert!(said.contains("cycles: iteration 2") && said.contains("iteration 1"), "{said}");
        assert!(said.contains("layer 3"), "{said}");
        // The first context counts as seen too.
        let mut point = FixedPoint::new(3, 9, map(4));
        point.step(map(5)).unwrap();
        assert!(point.step(map(4)).unwrap_err().to_string().contains("iteration 0 was probed in"));
    }

    #[test]
    fn the_cap_fails_closed_and_1_allocates_once() {
        let mut point = FixedPoint::new(3, 2, map(4));
        point.step(map(5)).unwrap();
        let error = point.step(map(3)).unwrap_err();
        assert_eq!(error.exit_code(), 1);
        assert!(error.to_string().contains("no fixed point within 2 iterations"), "{error}");
        // The last round allowed may still settle.
        let mut point = FixedPoint::new(3, 2, map(4));
        point.step(map(5)).unwrap();
        assert_eq!(point.step(map(5)).unwrap(), Step::Settled);
        assert_eq!(FixedPoint::new(3, 1, map(4)).step(map(5)).unwrap(), Step::Settled);
    }
}
