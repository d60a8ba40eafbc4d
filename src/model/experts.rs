//! The routed experts of a MoE layer, one at a time.
//!
//! `out[t] = Σ_e weight[t,e] · down_e(silu(gate_e(x[t])) · up_e(x[t]))`, experts in ascending id, each contribution
//! rounded to f32 as it is added. An expert's weights are asked for when it has rows, and dropped before the next.
//!
//! Source: `GlmMoeDsaNaiveMoe` of Transformers 5.24.

use candle_core::{Device, Tensor};

use super::linear::{Linear, rows_of, tensor_of};
use super::mlp::{Mlp, silu_times};
use crate::checkpoint::{WeightSource, names};
use crate::config::Geometry;
use crate::error::{Result, refuse};

/// One expert on arbitrary rows: `down(silu(gate(x)) · up(x))`, `x [n, H]` to `[n, H]`; weights are `[out, in]`, f32.
///
/// # Errors
/// When shapes or types do not fit together.
pub fn expert_forward(x: &Tensor, gate: &Tensor, up: &Tensor, down: &Tensor) -> Result<Tensor> {
    let (_, hidden) = x.dims2()?;
    let mlp = Mlp {
        gate_proj: Linear::new(gate, None)?,
        up_proj: Linear::new(up, None)?,
        down_proj: Linear::new(down, None)?,
    };
    let (inner, outer) = (gate.dims()[0], down.dims()[0]);
    if outer != hidden
        || gate.dims() != [inner, hidden]
        || up.dims() != gate.dims()
        || down.dims()[1] != inner
    {
        return refuse(format!("expert of {:?}, {:?}, {:?}", gate.dims(), up.dims(), down.dims()))
            .wanted(format!("[n, {hidden}], [n, {hidden}], [{hidden}, n]"))
            .err();
    }
    tensor_of(mlp.forward(&rows_of(x, hidden)?)?, hidden)
}

/// The input of an expert's down projection: `silu(x·gateᵀ) · (x·upᵀ)`, `x [n, H]` to `[n, intermediate]`.
///
/// # Errors
/// When shapes or types do not fit together.
pub fn expert_intermediate(x: &Tensor, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let (_, hidden) = x.dims2()?;
    let (inner, _) = gate.dims2()?;
    if gate.dims() != [inner, hidden] || up.dims() != gate.dims() {
        return refuse(format!("expert of {:?}, {:?}", gate.dims(), up.dims()))
            .wanted(format!("[n, {hidden}] both"))
            .err();
    }
    let x = rows_of(x, hidden)?;
    let mut product = Linear::new(gate, None)?.forward(&x)?;
    silu_times(&mut product, &Linear::new(up, None)?.forward(&x)?);
    tensor_of(product, inner)
}

/// The routed experts of `layer` over the flat rows `x [n, H]` of all prompts of a call: what
/// [`Layer::mlp`](super::Layer::mlp) adds the shared experts to, and what the install audit runs.
///
/// `ids` and `weights` are `[n, k]`. Gives `[n, H]`, without the shared experts.
///
/// # Errors
/// What the source says, and when an id is out of range.
pub fn routed(
    geometry: &Geometry,
    layer: usize,
    x: &[f32],
    ids: &[i32],
    weights: &[f32],
    experts: &dyn WeightSource,
) -> Result<Vec<f32>> {
    let (hidden, k) = (geometry.hidden_size, geometry.num_experts_per_tok);
    let mut hits: Vec<Vec<(usize, f32)>> = vec![Vec::new(); geometry.n_routed_experts];
    for (slot, (id, weight)) in ids.iter().zip(weights).enumerate() {
        match usize::try_from(*id).ok().and_then(|id| hits.get_mut(id)) {
            Some(rows) => rows.push((slot / k, *weight)),
            None => return refuse(format!("expert id {id}")).layer(layer).wanted("a routed expert").err(),
        }
    }
    let mut out = vec![0f32; x.len()];
    for (expert, hits) in hits.iter().enumerate().filter(|(_, hits)| !hits.is_empty()) {
        let mut rows = Vec::with_capacity(hits.len() * hidden);
        for (row, _) in hits {
            rows.extend_from_slice(&x[row * hidden..][..hidden]);
        }
        let name = |projection| names::expert(layer, expert, projection);
        let mlp = Mlp::load(experts, name, hidden, geometry.moe_intermediate_size, &Device::Cpu)?;
        let y = mlp.forward(&rows)?;
        for ((row, weight), y) in hits.iter().zip(y.chunks_exact(hidden)) {
            for (out, y) in out[row * hidden..][..hidden].iter_mut().zip(y) {
                *out += weight * y;
            }
        }
    }
    Ok(out)
}
