//! Scale factors along one side of a tensor, as small integers.
//!
//! A factor is `2^(step/16)` with steps from -16 to 16, so that it lies between 1/2 and 2 and an artifact can hold one a
//! channel exactly. Factors have geometric mean 1 before rounding and clamping. Sources: the owner's Round 7 record
//! ("Rotations, multi-draw, and G-scale") for the block families; `sensitivity` minimises `Σ f²c · mean(w²/f²)`, the
//! expected output error of noise that is even in the rotated domain.

use crate::config::choices::ScaleFamily;

/// Channels of a block that shares a factor: those of a Hadamard block, so that factor and transform commute.
const BLOCK: usize = 128;
/// Steps an octave.
const OCTAVE: f64 = 16.0;
/// 2^(1/16).
const STEP: f64 = 1.044_273_782_427_413_8;

/// Factors along one side: entry i covers `n / steps.len()` channels.
pub type Steps = Vec<i8>;

/// Energies of a side's channels that families are made from.
#[derive(Debug, Clone)]
pub struct SideEnergies {
    /// Sum of squared weights a channel.
    pub weights: Vec<f64>,
    /// What a unit of squared error in a channel costs at the expert's output; only private output sides have it.
    pub costs: Option<Vec<f64>>,
}

/// The factor of a step.
pub fn factor(step: i8) -> f32 {
    // Repeated products of one constant: the same on every machine, unlike exp2.
    let magnitude = (0..step.unsigned_abs()).fold(1.0f64, |f, _| f * STEP);
    (if step < 0 { 1.0 / magnitude } else { magnitude }) as f32
}

/// Multiplies a vector by its factors.
pub fn apply(vector: &mut [f32], steps: &[i8]) {
    let each = vector.len() / steps.len();
    for (part, &step) in vector.chunks_mut(each).zip(steps) {
        let factor = factor(step);
        part.iter_mut().for_each(|x| *x *= factor);
    }
}

/// The steps of a family; `None` where the side lacks what the family is made from, or where the family leaves it as
/// `identity` does.
pub fn steps(family: ScaleFamily, side: &SideEnergies) -> Option<Steps> {
    let block_rms = |power: f64| {
        let mean = |block: &[f64]| block.iter().sum::<f64>() / block.len() as f64;
        rounded(side.weights.chunks(BLOCK).map(|block| mean(block).powf(power / 2.0)))
    };
    let steps = match family {
        ScaleFamily::Identity => return Some(vec![0]),
        ScaleFamily::QuarterRms => block_rms(0.25),
        ScaleFamily::InverseQuarterRms => block_rms(-0.25),
        ScaleFamily::Sensitivity => {
            let costs = side.costs.as_ref()?;
            rounded(side.weights.iter().zip(costs).map(|(w, c)| (w / c).sqrt().sqrt()))
        }
    };
    steps.iter().any(|&step| step != 0).then_some(steps)
}

/// Steps of factors over their geometric mean. A channel without energy or cost has no say in the mean; it takes the
/// bound its factor points to, or 1 where it points nowhere.
fn rounded(factors: impl Iterator<Item = f64>) -> Steps {
    let logs: Vec<f64> = factors.map(f64::log2).collect();
    let live: Vec<f64> = logs.iter().copied().filter(|x| x.is_finite()).collect();
    let mean = if live.is_empty() { 0.0 } else { live.iter().sum::<f64>() / live.len() as f64 };
    let step =
        |log: f64| if log.is_nan() { 0.0 } else { ((log - mean) * OCTAVE).round().clamp(-OCTAVE, OCTAVE) };
    logs.into_iter().map(|log| step(log) as i8).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_run_from_a_half_to_two() {
        assert_eq!((factor(0), factor(16), factor(-16), factor(8)), (1.0, 2.0, 0.5, 2.0f32.sqrt()));
        let mut vector = vec![1.0f32; 256];
        apply(&mut vector, &[16, -16]);
        assert_eq!((vector[127], vector[128]), (2.0, 0.5));
    }

    #[test]
    fn families_are_made_of_rms_and_cost() {
        let weights = [vec![1.0; 128], vec![256.0; 128]].concat();
        let mut side = SideEnergies { weights, costs: None };
        assert_eq!(steps(ScaleFamily::Identity, &side).unwrap(), [0]);
        // rms 1 and 16; their fourth roots 1 and 2, geometric mean √2.
        assert_eq!(steps(ScaleFamily::QuarterRms, &side).unwrap(), [-8, 8]);
        assert_eq!(steps(ScaleFamily::InverseQuarterRms, &side).unwrap(), [8, -8]);
        assert!(steps(ScaleFamily::Sensitivity, &side).is_none());
        let level = SideEnergies { weights: vec![3.0; 256], costs: None };
        assert!(steps(ScaleFamily::QuarterRms, &level).is_none());
        side.weights = vec![1.0; 256];
        side.costs = Some([vec![1.0; 128], vec![16.0; 128]].concat());
        let sensitivity = steps(ScaleFamily::Sensitivity, &side).unwrap();
        assert_eq!((sensitivity[0], sensitivity[255]), (8, -8));
    }

    #[test]
    fn channels_without_energy_or_cost_stay_within_the_bounds() {
        let side = SideEnergies { weights: vec![1.0, 0.0, 0.0, 4.0], costs: Some(vec![1.0, 1.0, 0.0, 0.0]) };
        assert_eq!(steps(ScaleFamily::Sensitivity, &side).unwrap(), [0, -16, 0, 16]);
    }
}
