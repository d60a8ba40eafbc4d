//! The search for one expert: what it is studied by, how candidates are ranked, and full round trips of a bundle.
//!
//! Candidates are ranked by a model of the expert's output error, `noise · tr(D) · Σ svh²·c` a tensor: the variance of
//! the rounding noise in the rotated domain, what LDLQ makes of it over the inputs, and what an error in each output
//! channel costs at the expert's output (1 for down). Input-side candidates differ in tr(D), output-side ones in the noise
//! (by test-encoding a seeded sample of tiles) and in Σ svh²·c. What was promoted is measured by full round trips at the
//! middle candidate width.

use serde::{Deserialize, Serialize};

use super::expert::{Expert, Loss, decode};
use super::permutation::{order, permuted, permuted_covariance};
use super::scales::{SideEnergies, Steps, steps};
use super::vectors::{ExpertChoice, ExpertVectors, SharedVectors, VectorChoice, expert_vectors};
use crate::checkpoint::names::Projection;
use crate::codec::{Codec, EncodeJob, Vectors};
use crate::config::Recipe;
use crate::config::choices::{PermutationPolicy, ScaleFamily};
use crate::error::Result;
use crate::linalg::Matrix;
use crate::store::canonical_json::{float17, parse_float17};
use crate::store::hash::Hash;
use crate::store::seed::draw_seed;

/// A candidate's name and its score, lower is better: 17 digits.
pub type Scored<T> = Vec<(T, String)>;

/// A full round trip of one expert: three encodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoundTrip {
    /// Mean squared output error a held-out row.
    pub loss: String,
    /// The same over the mean squared output.
    pub relative_loss: String,
    /// What the ranking model predicts the loss to be, before the correction of down's target.
    pub predicted: String,
    /// Damping of down's correction; none where the source weight is its target.
    pub down_damping: Option<String>,
    /// Relative global scales of gate, up, down.
    pub scales: [String; 3],
    /// SHA-256 of the packed payloads of gate, up, down.
    pub packed_sha256: [Hash; 3],
}

impl RoundTrip {
    /// The loss as a number.
    ///
    /// # Errors
    /// A loss that is no number.
    pub fn loss(&self) -> Result<f64> {
        parse_float17(&self.loss)
    }

    /// What it settles for other round trips.
    ///
    /// # Errors
    /// A scale or damping that is no number.
    pub fn settled(&self) -> Result<Settled> {
        let [gate, up, down] = &self.scales;
        Ok(Settled {
            scales: [parse_float17(gate)?, parse_float17(up)?, parse_float17(down)?],
            damping: self.down_damping.as_deref().map(parse_float17).transpose()?,
        })
    }
}

/// What the scores of one expert say about the layer's shared vectors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedScores {
    /// Predicted loss of gate and up by candidate `suh`.
    pub gate_up_suh: Vec<String>,
    /// Predicted loss of down by candidate `svh`.
    pub down_svh: Vec<String>,
}

/// One expert's chosen order and vectors with all scores that led there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertSearch {
    /// What was chosen.
    pub choice: ExpertChoice,
    /// Orders of the intermediate channels, by predicted loss of down.
    pub policies: Scored<PermutationPolicy>,
    /// Sign draws of gate's svh, up's svh and down's suh.
    pub draws: [Scored<u32>; 3],
    /// Scale families of the same.
    pub families: [Scored<ScaleFamily>; 3],
}

/// What an error in each intermediate channel costs at the expert's output, a unit of squared error: gate and up, `[I]`.
pub struct ChannelCosts {
    /// Mean over rows of `(silu'(g)·u)²`, times the squared norm of down's row.
    pub gate: Vec<f64>,
    /// Mean over rows of `silu(g)²`, times the squared norm of down's row.
    pub up: Vec<f64>,
}

/// The channel costs on the rows that calibrate the expert.
pub fn channel_costs(expert: &Expert<'_>) -> ChannelCosts {
    let [gate, up, down] = &expert.weights.matrices;
    let rows = if expert.fit.rows > 0 { &expert.fit } else { &expert.fallback };
    let (g, u) = (rows.product(gate), rows.product(up));
    let channels = gate.cols;
    let mut costs = ChannelCosts { gate: vec![0.0; channels], up: vec![0.0; channels] };
    for (g, u) in g.data.chunks_exact(channels).zip(u.data.chunks_exact(channels)) {
        for (at, (&g, &u)) in g.iter().zip(u).enumerate() {
            let (g, u) = (f64::from(g), f64::from(u));
            let sigmoid = 1.0 / (1.0 + (-g).exp());
            let slope = sigmoid * (1.0 + g * (1.0 - sigmoid));
            let (gate, up) = ((slope * u).powi(2), (g * sigmoid).powi(2));
            // A row that is not finite says nothing about its channel.
            costs.gate[at] += if gate.is_finite() { gate } else { 0.0 };
            costs.up[at] += if up.is_finite() { up } else { 0.0 };
        }
    }
    let scale = 1.0 / rows.rows.max(1) as f64;
    for (at, energy) in row_energies(down).into_iter().enumerate() {
        costs.gate[at] *= scale * energy;
        costs.up[at] *= scale * energy;
    }
    costs
}

/// Sum of squares by row.
pub fn row_energies(m: &Matrix<f32>) -> Vec<f64> {
    m.data.chunks_exact(m.cols).map(|row| row.iter().map(|&x| f64::from(x).powi(2)).sum()).collect()
}

/// Sum of squares by column.
pub fn column_energies(m: &Matrix<f32>) -> Vec<f64> {
    let mut sums = vec![0.0f64; m.cols];
    for row in m.data.chunks_exact(m.cols) {
        sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x).powi(2));
    }
    sums
}

/// The middle candidate width, at which bundles are compared.
pub fn middle_bits(recipe: &Recipe) -> u32 {
    recipe.candidate_bits[recipe.candidate_bits.len() / 2]
}

/// The model's parts of one tensor.
struct Tensor<'a, C> {
    codec: &'a C,
    recipe: &'a Recipe,
    role: Projection,
    weight: &'a Matrix<f32>,
    covariance: &'a Matrix<f32>,
    scale: f64,
    seed: u64,
}

impl<C: Codec> Tensor<'_, C> {
    fn job<'b>(&'b self, vectors: &'b Vectors) -> EncodeJob<'b> {
        EncodeJob {
            weight: self.weight,
            covariance: self.covariance,
            sigma_reg: self.recipe.sigma(self.role == Projection::Down),
            vectors,
            bits: middle_bits(self.recipe),
            scale: self.scale,
        }
    }

    fn trace(&self, vectors: &Vectors) -> Result<f64> {
        self.codec.input_score(&self.job(vectors))
    }

    fn noise(&self, vectors: &Vectors) -> Result<f64> {
        self.codec.noise(&self.job(vectors), self.recipe.sketch_tiles, self.seed)
    }
}

/// Σ svh²·c over output channels; c is 1 where there are no costs.
fn output_weight(svh: &[f32], costs: Option<&[f64]>) -> f64 {
    let cost = |at: usize| costs.map_or(1.0, |costs| costs[at]);
    svh.iter().enumerate().map(|(at, &x)| f64::from(x).powi(2) * cost(at)).sum()
}

/// One expert ready to be searched: its inputs to the model of loss, in source order.
pub struct Study<'a, C> {
    codec: &'a C,
    expert: &'a Expert<'a>,
    input: Matrix<f32>,
    down: Matrix<f32>,
    costs: ChannelCosts,
    scales: [f64; 3],
}

impl<'a, C: Codec> Study<'a, C> {
    /// Studies an expert under the covariances of its inputs and of down's, with global scales found before.
    pub fn new(
        codec: &'a C,
        expert: &'a Expert<'a>,
        [input, down]: [Matrix<f32>; 2],
        scales: [f64; 3],
    ) -> Self {
        Self { codec, expert, input, down, costs: channel_costs(expert), scales }
    }

    fn tensor<'b>(
        &'b self,
        role: Projection,
        weight: &'b Matrix<f32>,
        covariance: &'b Matrix<f32>,
    ) -> Tensor<'b, C> {
        let (recipe, layer, id) = (self.expert.recipe, self.expert.layer, self.expert.id);
        let name = format!("{}_sketch", role.as_str());
        let seed = draw_seed(&recipe.recipe_version, layer, Some(id), &name, 0);
        Tensor {
            codec: self.codec,
            recipe,
            role,
            weight,
            covariance,
            scale: self.scales[role as usize],
            seed,
        }
    }

    fn source(&self, role: Projection) -> Tensor<'_, C> {
        let covariance = if role == Projection::Down { &self.down } else { &self.input };
        self.tensor(role, &self.expert.weights.matrices[role as usize], covariance)
    }

    fn costs(&self, role: Projection) -> Option<&[f64]> {
        match role {
            Projection::Gate => Some(&self.costs.gate),
            Projection::Up => Some(&self.costs.up),
            Projection::Down => None,
        }
    }

    /// The model's loss of the whole expert under vectors in source order.
    ///
    /// # Errors
    /// As [`Codec::encode`].
    pub fn predicted(&self, vectors: &ExpertVectors) -> Result<f64> {
        let sum = Projection::ALL.iter().zip([&vectors.gate, &vectors.up, &vectors.down]).map(
            |(&role, vectors)| {
                let tensor = self.source(role);
                Ok(tensor.noise(vectors)?
                    * tensor.trace(vectors)?
                    * output_weight(&vectors.svh, self.costs(role)))
            },
        );
        sum.sum()
    }

    /// Scores candidates of the layer's shared vectors on this expert, its own vectors as they are.
    ///
    /// # Errors
    /// As [`Codec::encode`].
    pub fn shared_scores(
        &self,
        gate_up: &[Vec<f32>],
        down: &[Vec<f32>],
        own: &ExpertVectors,
    ) -> Result<SharedScores> {
        let mut scores = SharedScores { gate_up_suh: Vec::new(), down_svh: Vec::new() };
        for suh in gate_up {
            let (mut sum, mut trace) = (0.0, None);
            for (role, vectors) in [(Projection::Gate, &own.gate), (Projection::Up, &own.up)] {
                let tensor = self.source(role);
                let vectors = Vectors { suh: suh.clone(), ..vectors.clone() };
                // Gate and up share covariance and suh, so D is the same.
                let trace = match trace {
                    Some(trace) => trace,
                    None => *trace.insert(tensor.trace(&vectors)?),
                };
                sum += trace * tensor.noise(&vectors)? * output_weight(&vectors.svh, self.costs(role));
            }
            scores.gate_up_suh.push(float17(sum));
        }
        let tensor = self.source(Projection::Down);
        let trace = tensor.trace(&own.down)?;
        for svh in down {
            let vectors = Vectors { svh: svh.clone(), ..own.down.clone() };
            scores.down_svh.push(float17(trace * tensor.noise(&vectors)? * output_weight(svh, None)));
        }
        Ok(scores)
    }

    /// Chooses order, draws and scale families of the expert under the layer's shared vectors.
    ///
    /// # Errors
    /// As [`Codec::encode`].
    pub fn search(&self, shared: &SharedVectors) -> Result<ExpertSearch> {
        let (expert, recipe) = (self.expert, self.expert.recipe);
        let channels = self.down.rows;
        let vectors = |choice: &ExpertChoice| {
            expert_vectors(&recipe.recipe_version, expert.layer, expert.id, choice, shared)
        };
        let plain = ExpertChoice::plain(channels);
        let energies: Vec<f64> = (0..channels).map(|i| f64::from(self.down.data[i * channels + i])).collect();

        let mut policies = Vec::new();
        for &policy in &recipe.permutations {
            let new_to_old = order(policy, &energies);
            let weight = expert.weights.matrices[Projection::Down as usize].gather_rows(&new_to_old);
            let covariance = permuted_covariance(&self.down, &new_to_old);
            let down = self.tensor(Projection::Down, &weight, &covariance);
            policies.push((policy, down.trace(&vectors(&plain).down)?));
        }
        let policy = best(&policies);
        let new_to_old = order(policy, &energies);
        let weights = permuted(&expert.weights, &new_to_old);
        let covariance = permuted_covariance(&self.down, &new_to_old);
        let costs =
            |role| self.costs(role).map(|c| new_to_old.iter().map(|&old| c[old]).collect::<Vec<f64>>());
        let mut choice = ExpertChoice { policy, new_to_old: new_to_old.clone(), ..plain };

        let (mut draws, mut families) = (Vec::new(), Vec::new());
        for role in Projection::ALL {
            let covariance = if role == Projection::Down { &covariance } else { &self.input };
            let weight = &weights.matrices[role as usize];
            let tensor = self.tensor(role, weight, covariance);
            let costs = costs(role);
            let with = |own: &VectorChoice| {
                let mut candidate = choice.clone();
                *own_vector(&mut candidate, role) = own.clone();
                let vectors = vectors(&candidate);
                match role {
                    Projection::Gate => vectors.gate,
                    Projection::Up => vectors.up,
                    Projection::Down => vectors.down,
                }
            };
            let mut by_draw = Vec::new();
            for draw in 0..recipe.draws {
                let vectors = with(&VectorChoice { draw, ..VectorChoice::default() });
                let score = match role {
                    Projection::Down => tensor.trace(&vectors)?,
                    _ => tensor.noise(&vectors)?,
                };
                by_draw.push((draw, score));
            }
            let draw = best(&by_draw);
            let side = SideEnergies {
                weights: if role == Projection::Down {
                    row_energies(weight)
                } else {
                    column_energies(weight)
                },
                costs: costs.clone(),
            };
            let mut by_family = Vec::new();
            for &family in &recipe.scale_families {
                let Some(steps) = steps(family, &side) else { continue };
                let vectors = with(&VectorChoice { draw, family, steps });
                let mut score = tensor.noise(&vectors)? * output_weight(&vectors.svh, costs.as_deref());
                if role == Projection::Down {
                    score *= tensor.trace(&vectors)?;
                }
                by_family.push((family, score));
            }
            let family = best(&by_family);
            let steps: Steps = steps(family, &side).unwrap_or_else(|| vec![0]);
            *own_vector(&mut choice, role) = VectorChoice { draw, family, steps };
            draws.push(written(by_draw));
            families.push(written(by_family));
        }
        Ok(ExpertSearch {
            choice,
            policies: written(policies),
            draws: <[_; 3]>::try_from(draws).expect("one a projection"),
            families: <[_; 3]>::try_from(families).expect("one a projection"),
        })
    }
}

fn own_vector(choice: &mut ExpertChoice, role: Projection) -> &mut VectorChoice {
    match role {
        Projection::Gate => &mut choice.gate_svh,
        Projection::Up => &mut choice.up_svh,
        Projection::Down => &mut choice.down_suh,
    }
}

/// The candidate of least score, the first of equals.
fn best<T: Copy>(scored: &[(T, f64)]) -> T {
    let first = scored.iter().enumerate().min_by(|(i, a), (j, b)| a.1.total_cmp(&b.1).then(i.cmp(j)));
    first.expect("identity and draw 0 are always candidates").1.0
}

fn written<T>(scored: Vec<(T, f64)>) -> Scored<T> {
    scored.into_iter().map(|(candidate, score)| (candidate, float17(score))).collect()
}

/// A measured bundle: the packed tensors, and what they lose.
pub struct Tripped<P> {
    /// Gate, up, down.
    pub packed: [P; 3],
    /// Covariances of the inputs and of down's.
    pub covariances: [Matrix<f32>; 2],
    /// Scales of the three.
    pub scales: [f64; 3],
    /// Damping of down's correction.
    pub damping: Option<f64>,
    /// Held-out loss.
    pub loss: Loss,
}

/// What a baseline settles for all other round trips of an expert: relative global scales and the damping of down's
/// correction hardly depend on signs, order and factors.
#[derive(Debug, Clone, Copy)]
pub struct Settled {
    /// Relative global scales of gate, up, down.
    pub scales: [f64; 3],
    /// Damping of down's correction.
    pub damping: Option<f64>,
}

/// Encodes the whole expert at the middle width and measures it on its held-out rows.
///
/// # Errors
/// Whatever an encode refuses.
pub fn round_trip<C: Codec>(
    codec: &C,
    expert: &Expert<'_>,
    settled: Option<Settled>,
) -> Result<Tripped<C::Packed>> {
    let bits = middle_bits(expert.recipe);
    let encode = |role: Projection,
                  covariance: &Matrix<f32>,
                  target: Option<&Matrix<f32>>|
     -> Result<(C::Packed, f64)> {
        let scale = match settled {
            Some(settled) => settled.scales[role as usize],
            None => expert.fit_scale(codec, role, bits, target)?,
        };
        Ok((expert.encode(codec, role, (bits, scale), covariance, target)?, scale))
    };
    let input = expert.input_covariance()?;
    let (gate, gate_scale) = encode(Projection::Gate, &input, None)?;
    let (up, up_scale) = encode(Projection::Up, &input, None)?;
    let (g, u) = (decode(&gate), decode(&up));
    let damping = match settled {
        Some(settled) => settled.damping,
        None => expert.choose_damping(&g.dense, &u.dense)?,
    };
    let through = expert.down_input(&g.dense, &u.dense, damping)?;
    let (down, down_scale) = encode(Projection::Down, &through.covariance, through.target.as_ref())?;
    let loss = expert.loss(&expert.reference(), &g.dense, &u.dense, &decode(&down).dense);
    Ok(Tripped {
        packed: [gate, up, down],
        covariances: [input, through.covariance],
        scales: [gate_scale, up_scale, down_scale],
        damping,
        loss,
    })
}

/// Spearman's rank correlation of two lists, ties by mean rank; `None` under three entries or where all are equal.
pub fn rank_correlation(a: &[f64], b: &[f64]) -> Option<f64> {
    if a.len() < 3 {
        return None;
    }
    let ranks = |values: &[f64]| -> Vec<f64> {
        let rank = |x: &f64| {
            let below = values.iter().filter(|v| *v < x).count() as f64;
            let equal = values.iter().filter(|v| *v == x).count() as f64;
            below + (equal - 1.0) / 2.0
        };
        values.iter().map(rank).collect()
    };
    let (a, b) = (ranks(a), ranks(b));
    let mean = (a.len() - 1) as f64 / 2.0;
    let product = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| (x - mean) * (y - mean)).sum::<f64>();
    let spread = (product(&a, &a) * product(&b, &b)).sqrt();
    (spread > 0.0).then(|| product(&a, &b) / spread)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_correlate_as_spearman_says() {
        assert_eq!(rank_correlation(&[1.0, 2.0, 3.0], &[10.0, 20.0, 90.0]), Some(1.0));
        assert_eq!(rank_correlation(&[1.0, 2.0, 3.0], &[3.0, 2.0, 1.0]), Some(-1.0));
        assert_eq!(rank_correlation(&[1.0, 2.0, 3.0, 4.0], &[1.0, 3.0, 2.0, 4.0]), Some(0.8));
        assert_eq!(rank_correlation(&[1.0, 1.0, 1.0], &[1.0, 2.0, 3.0]), None);
        assert_eq!(rank_correlation(&[1.0, 2.0], &[1.0, 2.0]), None);
    }

    #[test]
    fn the_first_of_equals_is_best() {
        assert_eq!(best(&[("a", 2.0), ("b", 1.0), ("c", 1.0)]), "b");
    }
}
