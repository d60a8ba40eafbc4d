//! What KAIJU1's presets leave at their rates, on real and on normal weights, and what later levers would save.
//!
//! `cargo bench --bench kaiju_rate`, about two minutes. The real tensors are two of all-MiniLM-L6-v2 with the second moments
//! of their inputs (`tests/golden/kaiju`). Prints, all rows included, side-band included:
//!
//! - the weighted relative error Σ h (w - q)² / Σ h w² of v1 and v2 at their rates counted from bytes;
//! - the same of a full covariance, Σ e H eᵀ / Σ w H wᵀ on rows of inputs held out, without and with feedback;
//! - the entropy of the stored fields: what an ideal entropy coder would save;
//! - the error with a side-band of 5 bits, and with as many more columns in it as the saved bits pay for.
//!
//! Lines that begin with `csv,` repeat the tables for keeping.

use std::collections::HashMap;

use half::f16;
use safetensors::SafeTensors;
use walk::codec::kaiju::format::BulkRow;
use walk::codec::kaiju::{CodeWidth, Header, Importance, KaijuTensor, Settings, encode};
use walk::linalg::Matrix;
use walk::store::seed::SplitMix64;

struct Case {
    name: String,
    weight: Matrix<f32>,
    h: Vec<f64>,
}

fn main() {
    // `cargo test --all-targets` runs this too, without `--bench`: enough then to see that it works.
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let tiny = !arguments.iter().any(|a| a == "--bench") || arguments.iter().any(|a| a == "--test");
    let cases = cases(tiny);
    println!("{:<16} {:>7} {:>9} {:>7} {:>9}", "tensor", "v1 bits", "error", "v2 bits", "error");
    for case in &cases {
        let [v1, v2] = [Settings::v1(), Settings::v2()].map(|settings| {
            let tensor =
                encode(&case.weight, Importance::Diagonal(&case.h), &settings).expect("finite weights");
            (tensor.bits_per_weight(), error(case, &tensor.dense()))
        });
        println!("{:<16} {:>7.3} {:>9.5} {:>7.3} {:>9.5}", case.name, v1.0, v1.1, v2.0, v2.1);
        println!("csv,rate,{},{:.4},{:.6},{:.4},{:.6}", case.name, v1.0, v1.1, v2.0, v2.1);
    }
    println!("\nfull covariance, held-out rows: without and with feedback");
    cases
        .iter()
        .take(if tiny { 1 } else { 4 })
        .filter(|case| tiny || !case.name.ends_with("flat"))
        .for_each(feedback);
    println!(
        "\nentropy of the fields, bits a block: stored, parity, word, outside, digits, block scale; bits a weight"
    );
    cases.iter().for_each(entropy);
    println!(
        "\nside-band of 5 bits: error and bits a weight as it is; with 5 bits; with 5 bits and more columns"
    );
    cases.iter().for_each(side_band);
}

fn cases(tiny: bool) -> Vec<Case> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/kaiju/leech.safetensors");
    let bytes = fs_err::read(path).expect("golden data");
    let golden = SafeTensors::deserialize(&bytes).expect("golden data are safetensors");
    let mut cases = Vec::new();
    for layer in [2, 5] {
        let tensor =
            |what: &str| golden.tensor(&format!("minilm.{layer}.{what}")).expect("golden tensor").data();
        let weights = tensor("weight").as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32());
        let h: Vec<f64> =
            tensor("h").as_chunks().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect();
        let rows = if tiny { 4 } else { 384 };
        let weight = Matrix::new(rows, 1536, weights.take(rows * 1536).collect());
        let flat = vec![1.0; 1536];
        cases.push(Case { name: format!("minilm.{layer}"), weight: weight.clone(), h });
        cases.push(Case { name: format!("minilm.{layer} flat"), weight, h: flat });
    }
    let rows = if tiny { 4 } else { 2048 };
    let weight = Matrix::new(rows, 2048, normal(3, rows * 2048));
    cases.push(Case { name: "gauss flat".to_owned(), weight, h: vec![1.0; 2048] });
    cases
}

/// Σ h (w - q)² / Σ h w².
fn error(case: &Case, dense: &Matrix<f32>) -> f64 {
    let (mut error, mut energy) = (0.0, 0.0);
    for (row, (w, q)) in case.weight.data.iter().zip(&dense.data).enumerate() {
        let h = case.h[row % case.h.len()];
        error += h * f64::from(w - q).powi(2);
        energy += h * f64::from(*w).powi(2);
    }
    error / energy
}

/// Inputs with common causes and the case's second moments: the mean of xxᵀ over some rows.
fn covariance(case: &Case, causes: &Matrix<f32>, seed: u64, rows: usize) -> Matrix<f32> {
    let k = case.h.len();
    let mixed = Matrix::new(rows, causes.rows, normal(seed, rows * causes.rows)).product(causes);
    let own = normal(seed + 1, rows * k);
    let share = 0.8 / (causes.rows as f32).sqrt();
    let value = |at: usize| (mixed.data[at] * share + own[at] * 0.6) * case.h[at % k].sqrt() as f32;
    let x = Matrix::new(rows, k, (0..rows * k).map(value).collect());
    let mut covariance = x.transposed().product(&x);
    covariance.data.iter_mut().for_each(|x| *x /= rows as f32);
    covariance
}

fn feedback(case: &Case) {
    let k = case.h.len();
    let causes = Matrix::new(256, k, normal(9, 256 * k));
    let (mut fit, held_out) = (covariance(case, &causes, 100, 4096), covariance(case, &causes, 200, 4096));
    let mean = (0..k).map(|i| fit.data[i * (k + 1)]).sum::<f32>() / k as f32;
    (0..k).for_each(|i| fit.data[i * (k + 1)] += 0.025 * mean);
    let square = |x: &Matrix<f32>| -> f64 {
        x.product(&held_out).data.iter().zip(&x.data).map(|(a, b)| f64::from(a * b)).sum()
    };
    let energy = square(&case.weight);
    for (name, settings) in [("v1", Settings::v1()), ("v2", Settings::v2())] {
        let [plain, fed] = [false, true].map(|feedback| {
            let tensor = encode(&case.weight, Importance::Full(&fit), &Settings { feedback, ..settings });
            let mut error = tensor.expect("a positive definite covariance").dense();
            error.data.iter_mut().zip(&case.weight.data).for_each(|(q, w)| *q -= w);
            square(&error) / energy
        });
        println!("{:<16} {name} {plain:.5} {fed:.5}", case.name);
        println!("csv,feedback,{},{name},{plain:.6},{fed:.6}", case.name);
    }
}

/// Bits a symbol of an ideal code, with the bias of counting few symbols taken off (Miller and Madow).
fn bits<T: std::hash::Hash + Eq>(symbols: impl Iterator<Item = T>) -> f64 {
    let mut counts: HashMap<T, u64> = HashMap::new();
    symbols.for_each(|symbol| *counts.entry(symbol).or_default() += 1);
    let total: u64 = counts.values().sum();
    // Summed in order: a hash map has none.
    let mut sorted: Vec<u64> = counts.into_values().collect();
    sorted.sort_unstable();
    let share = |count: u64| count as f64 / total as f64;
    let plain: f64 = sorted.iter().map(|&count| -share(count) * share(count).log2()).sum();
    plain + (sorted.len() - 1) as f64 / (2.0 * total as f64 * std::f64::consts::LN_2)
}

fn entropy(case: &Case) {
    for (name, settings) in [("v1", Settings::v1()), ("v2", Settings::v2())] {
        let tensor = encode(&case.weight, Importance::Diagonal(&case.h), &settings).expect("finite weights");
        let rows: Vec<BulkRow> = (0..tensor.rows()).map(|row| tensor.bulk_row(row)).collect();
        let points: Vec<_> = rows
            .iter()
            .flat_map(|row| &row.codes)
            .map(|&code| settings.code.decode(code).expect("an encoder's code"))
            .collect();
        let inside = |z: i32| (if settings.code == CodeWidth::P56 { -1 } else { -2 }..=1).contains(&z);
        // Of 64 bits the parity follows from the offsets.
        let parity =
            if settings.code == CodeWidth::P56 { bits(points.iter().map(|point| point.odd)) } else { 0.0 };
        let word = bits(points.iter().map(|point| point.word));
        let outside = bits(points.iter().map(|point| {
            let at = point.z.iter().position(|&z| !inside(z));
            (at, at.map(|at| point.z[at]))
        }));
        // Offsets within the box, each known the parity of the point.
        let digits = |odd: bool| {
            let chosen = points.iter().filter(move |point| point.odd == odd);
            chosen.flat_map(|point| point.z).filter(|&z| inside(z))
        };
        let within: usize = [false, true].iter().map(|&odd| digits(odd).count()).sum();
        let digit_bits: f64 =
            [false, true].iter().map(|&odd| bits(digits(odd)) * digits(odd).count() as f64).sum();
        let digit_bits = digit_bits / points.len() as f64;
        assert!(within >= 23 * points.len());
        let scale = bits(rows.iter().flat_map(|row| &row.block_scales));
        let stored = f64::from(settings.code.bits()) + 4.0;
        let coded = parity + word + outside + digit_bits + scale;
        let blocks = (tensor.bulk_cols() / 24 * tensor.rows()) as f64;
        let saved = (stored - coded) * blocks / case.weight.data.len() as f64;
        let total = tensor.bits_per_weight();
        println!(
            "{:<16} {name} {stored:>4} {parity:>6.3} {word:>7.3} {outside:>6.3} {digit_bits:>7.3} {scale:>6.3}; {total:.3} -> {:.3}",
            case.name,
            total - saved
        );
        println!(
            "csv,entropy,{},{name},{stored},{parity:.4},{word:.4},{outside:.4},{digit_bits:.4},{scale:.4},{total:.4},{:.4}",
            case.name,
            total - saved
        );
    }
}

/// A tensor's weights with the side-band rounded to 31 levels instead of 255.
fn five_bits(case: &Case, tensor: &KaijuTensor) -> Matrix<f32> {
    let mut dense = tensor.dense();
    for &column in tensor.hi_index() {
        let column = column as usize;
        let values: Vec<f32> = (0..tensor.rows()).map(|row| case.weight.row(row)[column]).collect();
        let most = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        // The best of some scales from absmax / 15 downwards.
        let rounded = |scale: f32| -> Vec<f32> {
            values.iter().map(|x| (x / scale).round().clamp(-15.0, 15.0) * scale).collect()
        };
        let apart = |rounded: &[f32]| -> f64 {
            values.iter().zip(rounded).map(|(x, q)| f64::from(x - q).powi(2)).sum()
        };
        let candidates =
            (5..=15).map(|step| rounded(f16::from_f32(most / step as f32 * 5.0 / 15.0).to_f32()));
        let best = candidates.min_by(|a, b| apart(a).total_cmp(&apart(b))).expect("some scales");
        if most > 0.0 {
            (0..tensor.rows()).for_each(|row| dense.data[row * dense.cols + column] = best[row]);
        }
    }
    dense
}

/// Bits a weight of a tensor whose side-band takes 5 bits.
fn five_bit_rate(header: &Header) -> f64 {
    let saved = 3.0 * header.hi_count as f64 / header.cols as f64;
    header.bits_per_weight() - saved
}

fn side_band(case: &Case) {
    for (name, settings) in [("v1", Settings::v1()), ("v2", Settings::v2())] {
        let make = |hi_frac: f64| {
            encode(&case.weight, Importance::Diagonal(&case.h), &Settings { hi_frac, ..settings })
                .expect("finite weights")
        };
        let whole = make(settings.hi_frac);
        let budget = whole.bits_per_weight();
        // The largest side-band of 5 bits that costs no more, a block of 24 columns at a time.
        let shape = (case.weight.rows, case.weight.cols);
        let header = |columns: usize| {
            Header::plan(shape, settings.code, columns as f64 / shape.1 as f64).expect("in range")
        };
        let wider = (0..)
            .map(|step| whole.hi_count() + 24 * step)
            .take_while(|&columns| columns < shape.1 && five_bit_rate(&header(columns)) <= budget)
            .last()
            .unwrap_or(whole.hi_count());
        let wide = make(wider as f64 / shape.1 as f64);
        let (as_is, five) = (error(case, &whole.dense()), error(case, &five_bits(case, &whole)));
        let more = error(case, &five_bits(case, &wide));
        let (rate, wide_rate) = (five_bit_rate(whole.header()), five_bit_rate(wide.header()));
        println!(
            "{:<16} {name} {as_is:.5} {budget:.3}; {five:.5} {rate:.3}; {more:.5} {wide_rate:.3}",
            case.name
        );
        println!(
            "csv,five,{},{name},{as_is:.6},{budget:.4},{five:.6},{rate:.4},{more:.6},{wide_rate:.4}",
            case.name
        );
    }
}

/// Normal numbers of variance one (Box and Muller).
fn normal(seed: u64, count: usize) -> Vec<f32> {
    let mut random = SplitMix64::new(seed);
    let mut uniform = || ((random.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    let mut one = || (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
    (0..count).map(|_| one() as f32).collect()
}
