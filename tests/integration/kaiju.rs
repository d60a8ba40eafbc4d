//! KAIJU1 against golden data, and its searches against each other.

use walk::codec::kaiju::code::CodeWidth;
use walk::codec::kaiju::leech::{Point, norm};
use walk::codec::kaiju::region::Region;
use walk::codec::kaiju::search::{Block, available_searches, best_point, best_search};
use walk::codec::kaiju::{Importance, KaijuTensor, Settings, encode, golay};
use walk::linalg::Matrix;
use walk::store::safetensors_read::SafetensorsFile;
use walk::store::seed::SplitMix64;

/// Nearly normal numbers of variance one.
fn normal(seed: u64, count: usize) -> Vec<f32> {
    let mut random = SplitMix64::new(seed);
    let mut uniform = || (random.next_u64() >> 40) as f32 / (1 << 24) as f32;
    (0..count).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect()
}

/// A golden file of the codec.
struct Golden(SafetensorsFile);

impl Golden {
    fn leech() -> Self {
        Self(SafetensorsFile::open("tests/golden/kaiju/leech.safetensors").unwrap())
    }

    fn payloads() -> Self {
        Self(SafetensorsFile::open("tests/golden/kaiju/payloads.safetensors").unwrap())
    }

    fn bytes(&self, name: &str) -> &[u8] {
        self.0.bytes(name).unwrap()
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.bytes(name).as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    fn ints(&self, name: &str) -> Vec<i32> {
        self.bytes(name).as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect()
    }

    fn blocks(&self, name: &str) -> Vec<Block> {
        self.floats(name).as_chunks().0.to_vec()
    }

    fn points(&self, name: &str) -> Vec<[i32; 24]> {
        self.ints(name).as_chunks().0.to_vec()
    }

    fn codes(&self, name: &str, width: CodeWidth) -> Vec<u64> {
        self.bytes(name).chunks_exact(width.bytes()).map(|bytes| width.read(bytes)).collect()
    }
}

fn name(width: CodeWidth) -> &'static str {
    if width == CodeWidth::P56 { "p56" } else { "p64" }
}

/// Σ w (y - x)² in f64.
fn cost(target: &Block, weight: &Block, x: &[i32; 24]) -> f64 {
    let terms = target.iter().zip(weight).zip(x);
    terms.map(|((&y, &w), &x)| f64::from(w) * (f64::from(y) - f64::from(x)).powi(2)).sum()
}

const FLAT: Block = [1.0; 24];

#[test]
fn the_words_are_the_golden_ones() {
    let golden: Vec<u32> = Golden::leech().ints("golay_words").iter().map(|&word| word as u32).collect();
    assert_eq!(golden, golay::WORDS);
}

#[test]
fn nearest_points_are_the_golden_ones() {
    let golden = Golden::leech();
    let (targets, points) = (golden.blocks("nearest.y"), golden.points("nearest.x"));
    for engine in available_searches() {
        for (at, (target, wanted)) in targets.iter().zip(&points).enumerate() {
            let point = best_point(engine, Region::Lattice, target, &FLAT);
            let x = point.coordinates();
            assert_eq!(Point::from_coordinates(&x), Some(point));
            let (found, least) = (cost(target, &FLAT, &x), cost(target, &FLAT, wanted));
            assert!(x == *wanted || (found - least).abs() <= 1e-5, "{} {at}: {found} {least}", engine.name());
        }
    }
}

#[test]
fn best_representable_points_are_the_golden_ones() {
    let golden = Golden::leech();
    for width in CodeWidth::ALL {
        let of = |what: &str| format!("{}.{what}", name(width));
        let (targets, weights) = (golden.blocks(&of("y")), golden.blocks(&of("weight")));
        let (points, costs) = (golden.points(&of("best_x")), golden.floats(&of("best_cost")));
        let codes = golden.codes(&of("code"), width);
        for (at, (target, weight)) in targets.iter().zip(&weights).enumerate() {
            let wanted = Point::from_coordinates(&points[at]).unwrap();
            assert_eq!(width.encode(&wanted), Some(codes[at]), "{width:?} {at}");
            assert_eq!(width.decode(codes[at]).unwrap(), wanted, "{width:?} {at}");
            for engine in available_searches() {
                let found = best_point(engine, width.region(), target, weight);
                let (found, least) = (cost(target, weight, &found.coordinates()), f64::from(costs[at]));
                let apart = (found - least).abs();
                assert!(apart <= 1e-5 * least, "{width:?} {} {at}: {found} {least}", engine.name());
            }
        }
    }
}

#[test]
fn codes_are_the_golden_ones_and_reserved_ones_are_refused() {
    let (golden, payloads) = (Golden::leech(), Golden::payloads());
    for width in CodeWidth::ALL {
        let of = |what: &str| format!("{}.{what}", name(width));
        let points = golden.points(&of("random_x"));
        for (code, x) in golden.codes(&of("random_code"), width).into_iter().zip(points) {
            let point = width.decode(code).unwrap();
            assert_eq!(point.coordinates(), x);
            assert_eq!(width.encode(&point), Some(code));
        }
        for code in payloads.codes(&of("out_of_range_code"), width) {
            assert!(width.decode(code).unwrap_err().to_string().contains("out of range"), "{code:#x}");
        }
    }
    for code in golden.codes("p56.reserved_code", CodeWidth::P56) {
        assert!(CodeWidth::P56.decode(code).unwrap_err().to_string().contains("reserved"), "{code:#x}");
    }
}

#[test]
fn payloads_decode_to_the_golden_weights() {
    let golden = Golden::payloads();
    for case in ["p56.2x72", "p56.4x60", "p64.3x23", "p64.4x60", "p64.5x129"] {
        let payload = golden.bytes(&format!("{case}.payload")).to_vec();
        let tensor = KaijuTensor::parse(payload.clone()).unwrap();
        assert_eq!(tensor.dense().data, golden.floats(&format!("{case}.dense")), "{case}");
        let mut row = vec![0.0; tensor.cols()];
        tensor.dequantize_row(1, &mut row);
        assert_eq!(row, tensor.dense().row(1));
        assert_eq!(tensor.payload(), payload);
        // The same settings give the same size and the same columns of the side-band.
        let settings = if case.starts_with("p56") { Settings::v1() } else { Settings::v2() };
        let weight = Matrix::new(tensor.rows(), tensor.cols(), golden.floats(&format!("{case}.weight")));
        let h: Vec<f64> = golden.floats(&format!("{case}.h")).into_iter().map(f64::from).collect();
        let own = encode(&weight, Importance::Diagonal(&h), &settings).unwrap();
        assert_eq!(own.payload().len(), payload.len(), "{case}");
        assert_eq!(own.hi_index(), tensor.hi_index(), "{case}");
        let error = |tensor: &KaijuTensor| weighted_error(&weight, &h, tensor);
        assert!(error(&own) <= error(&tensor) * 1.02, "{case}: {} {}", error(&own), error(&tensor));
    }
}

/// Σ h (w - q)² / Σ h w².
fn weighted_error(weight: &Matrix<f32>, h: &[f64], tensor: &KaijuTensor) -> f64 {
    let dense = tensor.dense();
    let (mut error, mut energy) = (0.0, 0.0);
    for (at, (&w, &q)) in weight.data.iter().zip(&dense.data).enumerate() {
        let h = h[at % weight.cols];
        error += h * (f64::from(w) - f64::from(q)).powi(2);
        energy += h * f64::from(w).powi(2);
    }
    error / energy
}

/// The 196560 minimal vectors by their three shapes.
fn minimal_vectors() -> Vec<[i32; 24]> {
    let mut vectors = Vec::new();
    // (±4, ±4, 0^22)
    for i in 0..24 {
        for j in 0..i {
            for signs in 0..4 {
                let mut x = [0; 24];
                (x[i], x[j]) = (4 - 8 * (signs & 1), 4 - 8 * (signs >> 1));
                vectors.push(x);
            }
        }
    }
    // (±2^8, 0^16) on octads, an even number of minus signs.
    for word in golay::WORDS.iter().filter(|word| word.count_ones() == 8) {
        for signs in (0..256u32).filter(|signs| signs.count_ones() % 2 == 0) {
            let mut x = [0; 24];
            let places = (0..24).filter(|i| word >> i & 1 == 1).enumerate();
            places.for_each(|(at, i)| x[i] = if signs >> at & 1 == 1 { -2 } else { 2 });
            vectors.push(x);
        }
    }
    // (∓3, ±1^23), signs by a word.
    for word in golay::WORDS {
        for three in 0..24 {
            vectors.push(std::array::from_fn(|i| {
                let sign = if word >> i & 1 == 1 { -1 } else { 1 };
                if i == three { -3 * sign } else { sign }
            }));
        }
    }
    vectors
}

#[test]
fn every_minimal_vector_is_found_also_under_noise() {
    let vectors = minimal_vectors();
    assert_eq!(vectors.len(), 196_560);
    let directions = normal(1, 24 * 64);
    let engine = best_search();
    for (at, x) in vectors.iter().enumerate() {
        assert_eq!(norm(x), 32);
        let wanted = Point::from_coordinates(x).unwrap();
        let exact: Block = std::array::from_fn(|i| x[i] as f32);
        // The packing radius is half the least distance, sqrt 8 in integer scale.
        let direction = &directions[24 * (at % 64)..][..24];
        let length = direction.iter().map(|x| x * x).sum::<f32>().sqrt();
        let noisy: Block = std::array::from_fn(|i| exact[i] + direction[i] / length * 8f32.sqrt() * 0.999);
        for target in [exact, noisy] {
            assert_eq!(best_point(engine, Region::Lattice, &target, &FLAT), wanted, "{x:?}");
        }
        for width in CodeWidth::ALL {
            let code = width.encode(&wanted).unwrap();
            assert_eq!(width.decode(code).unwrap(), wanted);
        }
    }
}
