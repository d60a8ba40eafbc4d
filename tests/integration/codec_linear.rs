//! Whole EXL3 linears made by exllamav3's own quantizer (`tests/golden/exl3/linears.*`): every one decodes exactly, and
//! our own encode from the same weight and Hessian beats its proxy error at the same bits.

use half::f16;
use safetensors::SafeTensors;
use std::sync::LazyLock;
use walk::codec::trellis::codebook::Codebook;
use walk::codec::trellis::encode::TrellisCodec;
use walk::codec::trellis::linear::TrellisLinear;
use walk::codec::trellis::scales::channel_vectors;
use walk::codec::{Codec, EncodeJob};
use walk::linalg::Matrix;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/exl3");

static FILE: LazyLock<Vec<u8>> =
    LazyLock::new(|| fs_err::read(format!("{FOLDER}/linears.safetensors")).expect("golden linears"));

fn values<const N: usize, T>(name: &str, value: impl Fn([u8; N]) -> T) -> (Vec<usize>, Vec<T>) {
    let file = SafeTensors::deserialize(&FILE).expect("golden linears are safetensors");
    let view = file.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
    (view.shape().to_vec(), view.data().as_chunks::<N>().0.iter().map(|bytes| value(*bytes)).collect())
}

fn matrix(name: &str) -> Matrix<f32> {
    let (shape, data) = values(name, f32::from_le_bytes);
    Matrix::new(shape[0], shape[1], data)
}

fn halves(name: &str) -> (Vec<usize>, Vec<f16>) {
    values(name, f16::from_le_bytes)
}

fn stored(name: &str) -> TrellisLinear {
    let (codebook, bits) = name.split_once(".k").expect("codebook.kN");
    let codebook = Codebook::ALL.into_iter().find(|c| c.name() == codebook).expect("a known codebook");
    let (suh, svh) = (halves(&format!("{name}.suh")).1, halves(&format!("{name}.svh")).1);
    let (_, trellis) = values(&format!("{name}.trellis"), u16::from_le_bytes);
    TrellisLinear::new((suh.len(), svh.len()), bits.parse().unwrap(), codebook, trellis, suh, svh).unwrap()
}

fn listed() -> serde_json::Map<String, serde_json::Value> {
    serde_json::from_slice(&fs_err::read(format!("{FOLDER}/linears.json")).unwrap()).unwrap()
}

fn relative(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let error: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    (error / b.iter().map(|b| square(f64::from(*b))).sum::<f64>()).sqrt()
}

#[test]
fn every_golden_linear_decodes_exactly() {
    let names: Vec<String> = listed().keys().cloned().collect();
    assert_eq!(names.len(), 7);
    for name in names {
        let linear = stored(&name);
        let inner: Vec<f32> = halves(&format!("{name}.inner")).1.iter().map(|x| x.to_f32()).collect();
        assert_eq!(linear.inner().data, inner, "{name}: inner");
        // `reconstructed` is f32; the dense weight is rounded to f16 once more, half an ulp at the most.
        let reconstructed = matrix(&format!("{name}.reconstructed"));
        let dense = linear.dense_f32();
        assert!(relative(&dense.data, &reconstructed.data) < 3e-4, "{name}: dense");
        let identity = {
            let mut eye = Matrix::zeros(linear.k, linear.k);
            (0..linear.k).for_each(|i| eye.data[i * linear.k + i] = 1.0);
            eye
        };
        let exact = linear.forward(&identity);
        let error = relative(&exact.data, &reconstructed.data);
        assert!(error <= 1e-5, "{name}: reconstructed {error:e}");
        let (shape, x) = halves(&format!("{name}.x"));
        let x = Matrix::new(shape[0], shape[1], x.iter().map(|x| x.to_f32()).collect());
        let error = relative(&linear.forward(&x).data, &matrix(&format!("{name}.y")).data);
        assert!(error <= 1e-5, "{name}: y {error:e}");
    }
}

/// tr(Eᵀ H E) / tr(Wᵀ H W) with the raw Hessian.
fn proxy_error(weight: &Matrix<f32>, dense: &Matrix<f32>, hessian: &Matrix<f32>) -> f64 {
    let form = |m: &Matrix<f32>| -> f64 {
        hessian.product(m).data.iter().zip(&m.data).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let error = weight.data.iter().zip(&dense.data).map(|(w, d)| w - d).collect();
    form(&Matrix::new(weight.rows, weight.cols, error)) / form(weight)
}

fn best_ratio(name: &str, sweeps: usize) -> f64 {
    let (weight, hessian) = (matrix(&format!("{name}.weight")), matrix(&format!("{name}.hessian")));
    let bits = name.rsplit('k').next().unwrap().parse().unwrap();
    let codec = TrellisCodec::new(sweeps, 24);
    let listed = listed()[name]["proxy_error"].as_f64().unwrap();
    let ratios: Vec<f64> = (0..4)
        .map(|draw| {
            let vectors = channel_vectors(&weight, 2 * draw + 1, 2 * draw + 2);
            let scale = codec.fit_scale(&weight, &vectors, bits, draw).unwrap();
            let (weight, vectors) = (&weight, &vectors);
            let job = EncodeJob { weight, covariance: &hessian, sigma_reg: 0.025, vectors, bits, scale };
            proxy_error(weight, &codec.encode(&job).unwrap().dense_f32(), &hessian) / listed
        })
        .collect();
    println!("{name}, {sweeps} sweeps: {ratios:.3?} of the listed proxy error {listed:.3e}");
    ratios.into_iter().fold(f64::INFINITY, f64::min)
}

#[test]
fn our_encode_beats_the_listed_proxy_error() {
    for (name, bar) in
        [("mcg.k2", 0.90), ("mcg.k3", 0.80), ("mcg.k4", 0.80), ("mcg.k5", 0.90), ("mcg.k6", 0.90)]
    {
        let plain = best_ratio(name, 0);
        assert!(plain <= bar, "{name}: {plain:.3} of the listed proxy error, bar {bar}");
    }
}

#[test]
fn a_refinement_sweep_lowers_the_error() {
    for name in ["mcg.k2", "mcg.k5"] {
        let (plain, swept) = (best_ratio(name, 0), best_ratio(name, 1));
        assert!(swept < plain, "{name}: {plain:.4} without, {swept:.4} with one sweep");
    }
}
