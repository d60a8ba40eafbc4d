//! A prompt's bytes depend neither on its company in the call, nor on the number of threads, nor on the run.

use candle_core::{Device, Tensor};
use walk::config::Geometry;
use walk::linalg::{View, matmul_reference};
use walk::model::linear::Linear;
use walk::model::{TopK, expert_forward, expert_intermediate};

use crate::support::{Model, State, bits, repository, values};

/// SplitMix64, as values in -0.5..0.5.
pub fn noise(count: usize, mut seed: u64) -> Vec<f32> {
    let next = || {
        seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    std::iter::repeat_with(next).take(count).collect()
}

fn with_threads<T: Send>(threads: usize, work: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(work)
}

/// `(in, out)` of the products in use: golden, tiny, and those of GLM-5.2 at either end (narrow, wide, deep).
const SHAPES: [(usize, usize); 20] = [
    (64, 4),
    (64, 40),
    (24, 20),
    (40, 20),
    (60, 64),
    (64, 97),
    (96, 64),
    (48, 64),
    (256, 8),
    (256, 80),
    (128, 48),
    (64, 32),
    (192, 256),
    (256, 768),
    (768, 256),
    (256, 2048),
    (6144, 32),
    (6144, 576),
    (512, 192),
    (2048, 1024),
];

/// Numbers of rows: around the strips of the kernel (4, 6 and 12 rows), and around a job's 96.
const ROWS: [usize; 10] = [1, 2, 3, 5, 11, 13, 95, 96, 97, 150];

#[test]
fn a_row_of_a_product_depends_on_that_row_alone() {
    for (input, out) in SHAPES {
        let weight = Tensor::from_vec(noise(out * input, 1), (out, input), &Device::Cpu).unwrap();
        let linear = Linear::new(&weight, None).unwrap();
        let x = noise(150 * input, 2);
        let reference = with_threads(1, || linear.forward(&x).unwrap());
        for threads in [1, 2, 4] {
            for rows in ROWS {
                // The same rows alone, so at other places of their block and beside other rows.
                for start in [0, 5] {
                    let end = (start + rows).min(150);
                    let part =
                        with_threads(threads, || linear.forward(&x[start * input..end * input]).unwrap());
                    assert!(
                        bits(&part) == bits(&reference[start * out..end * out]),
                        "{input} to {out}, {threads} threads, rows {start}..{end}"
                    );
                }
            }
        }
    }
}

#[test]
fn products_have_the_bits_of_the_reference() {
    for (input, out) in SHAPES {
        let weight = noise(out * input, 1);
        let tensor = Tensor::from_slice(&weight, (out, input), &Device::Cpu).unwrap();
        let linear = Linear::new(&tensor, None).unwrap();
        for rows in [1, 2, 5] {
            let x = noise(rows * input, 2);
            let y = linear.forward(&x).unwrap();
            let mut expected = vec![0f32; rows * out];
            let (a, b) = (View::rows(&x, input), View::transposed(&weight, input));
            matmul_reference((rows, out, input), a, b, &mut expected, out);
            assert!(bits(&y) == bits(&expected), "{input} to {out}, {rows} rows");
            for (x, y) in x.chunks(input).zip(y.chunks(out)) {
                for (weight, y) in weight.chunks(input).zip(y) {
                    let exact: f64 = x.iter().zip(weight).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                    assert!(
                        (f64::from(*y) - exact).abs() <= 1e-6 * (input as f64).sqrt(),
                        "{input} to {out}"
                    );
                }
            }
        }
    }
}

/// State bytes and index bytes of one prompt.
type Bytes = (Vec<u32>, Vec<Vec<i32>>);

fn forward(model: &Model, prompts: &[Vec<u32>], state: State) -> Vec<Bytes> {
    let (hidden, lists) = model.forward(prompts, state);
    let list = |prompt: usize| lists.iter().map(|layer: &Vec<TopK>| layer[prompt].indices.clone()).collect();
    hidden.iter().enumerate().map(|(prompt, hidden)| (bits(&values(hidden)), list(prompt))).collect()
}

/// Lengths at the edges: 1, around index_topk (64), around a block of queries (128), longer than a block, and longer
/// than a job of the matrix product is wide (512), where the config has as many positions.
fn ragged(model: &Model) -> Vec<Vec<u32>> {
    let Geometry { vocab_size, max_position_embeddings, .. } = model.geometry;
    let prompt = |(seed, length): (usize, usize)| {
        let length = length.min(max_position_embeddings);
        noise(length, 100 + seed as u64).iter().map(|x| ((x + 0.5) * vocab_size as f32) as u32).collect()
    };
    [1, 2, 63, 64, 65, 127, 128, 129, 600, 5].into_iter().enumerate().map(prompt).collect()
}

#[test]
fn a_prompt_gives_the_same_bytes_in_any_company_and_with_any_number_of_threads() {
    for (folder, state) in [("models/tiny", State::Bf16), ("tests/golden/forward/groups", State::F32)] {
        let model = Model::open(&repository(folder));
        let prompts = ragged(&model);
        let together = with_threads(1, || forward(&model, &prompts, state));
        for threads in [1, 2, 4] {
            with_threads(threads, || {
                assert!(
                    forward(&model, &prompts, state) == together,
                    "{folder}, {threads} threads, together"
                );
                for (index, prompt) in prompts.iter().enumerate() {
                    let alone = forward(&model, std::slice::from_ref(prompt), state);
                    assert!(alone[0] == together[index], "{folder}, {threads} threads, prompt {index} alone");
                }
                let reversed: Vec<Vec<u32>> = prompts.iter().rev().cloned().collect();
                let mut backwards = forward(&model, &reversed, state);
                backwards.reverse();
                assert!(backwards == together, "{folder}, {threads} threads, reversed");
            });
        }
    }
}

#[test]
fn an_expert_alone_gives_the_bytes_it_gives_in_a_crowd() {
    let (hidden, inner) = (256, 256);
    let matrix = |rows, columns, seed| {
        Tensor::from_vec(noise(rows * columns, seed), (rows, columns), &Device::Cpu).unwrap()
    };
    let (gate, up, down) = (matrix(inner, hidden, 1), matrix(inner, hidden, 2), matrix(hidden, inner, 3));
    let x = matrix(200, hidden, 4);
    let all = values(&expert_forward(&x, &gate, &up, &down).unwrap());
    let all_inner = expert_intermediate(&x, &gate, &up).unwrap();
    let row = x.narrow(0, 150, 1).unwrap();
    let alone = values(&expert_forward(&row, &gate, &up, &down).unwrap());
    assert_eq!(bits(&alone), bits(&all[150 * hidden..151 * hidden]));
    let alone = values(&expert_intermediate(&row, &gate, &up).unwrap());
    assert_eq!(bits(&alone), bits(&values(&all_inner)[150 * inner..151 * inner]));
    // Two steps are the one: the walk takes covariances from the first and losses from the second.
    let stepwise = Linear::new(&down, None).unwrap().forward(&values(&all_inner)).unwrap();
    assert_eq!(bits(&stepwise), bits(&all));
}
