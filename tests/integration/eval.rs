//! Evaluation on the tiny model: its own figures, thread and batch invariance, refusals.

use candle_core::{DType, Device, Tensor};
use walk::checkpoint::{CheckpointDir, WeightSource, names};
use walk::config::Geometry;
use walk::corpus::{CorpusPlan, Plan, PromptUse, SealContext, SealedPrompt, TextEncoder, seal};
use walk::eval::{Evaluation, StateType, compare, final_states, scored_tokens};
use walk::walk::progress::{Observer, Silent};

use crate::support::{bits, repository, values};

/// `models/tiny/expected.json`, computed with Transformers.
const PERPLEXITY: f64 = 29.0578670271017;

fn tiny() -> (Geometry, CheckpointDir) {
    let folder = repository("models/tiny");
    (Geometry::read(&folder.join("config.json")).unwrap(), CheckpointDir::open(&folder).unwrap())
}

fn corpus(geometry: &Geometry) -> CorpusPlan {
    let plan = Plan::load(repository("corpus/plan.json")).unwrap();
    let encoder = TextEncoder::from_file(repository("models/tiny/tokenizer.json")).unwrap();
    let context = SealContext {
        encoder: &encoder,
        vocab_size: geometry.vocab_size,
        max_position_embeddings: geometry.max_position_embeddings,
        default_prefix: Some(&["<|endoftext|>".to_owned()]),
    };
    seal(&plan, &context).unwrap()
}

/// Every nth evaluation prompt: some of each axis.
fn some(plan: &CorpusPlan, n: usize) -> Vec<&SealedPrompt> {
    plan.evaluate().step_by(n).collect()
}

fn prompt(id: &str, token_ids: &[u32]) -> SealedPrompt {
    SealedPrompt {
        id: id.into(),
        axis: "made up".into(),
        usage: PromptUse::Evaluate,
        prefix_length: 1,
        row_offset: None,
        cut_tokens: 0,
        token_ids: token_ids.to_vec(),
        token_ids_sha256: String::new(),
    }
}

/// Weights on a grid of 1/64: a crude quantization of whatever is asked for, here the routed experts.
struct Coarse<'a>(&'a CheckpointDir);

impl WeightSource for Coarse<'_> {
    fn contains(&self, name: &str) -> bool {
        self.0.contains(name)
    }

    fn load(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> walk::Result<Tensor> {
        let exact = self.0.load(name, shape, DType::F32, device)?;
        Ok(((exact * 64.0)?.round()? / 64.0)?.to_dtype(dtype)?)
    }
}

/// One value of one tensor replaced.
struct Planted<'a> {
    base: &'a CheckpointDir,
    name: &'static str,
    row: usize,
    value: f32,
}

impl WeightSource for Planted<'_> {
    fn contains(&self, name: &str) -> bool {
        self.base.contains(name)
    }

    fn load(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> walk::Result<Tensor> {
        let tensor = self.base.load(name, shape, dtype, device)?;
        if name != self.name {
            return Ok(tensor);
        }
        let mut rows = tensor.to_vec2::<f32>()?;
        rows[self.row][0] = self.value;
        Ok(Tensor::new(rows, device)?)
    }
}

fn evaluate(
    prompts: &[&SealedPrompt],
    (geometry, weights): &(Geometry, CheckpointDir),
    state: StateType,
) -> Evaluation {
    let states =
        |experts, label| final_states(geometry, weights, experts, prompts, state, &Silent, label).unwrap();
    let (source, result) = (states(weights, "source"), states(&Coarse(weights), "result"));
    compare(geometry, weights, weights, prompts, &source, &result, &Silent).unwrap().with_state(state)
}

#[test]
fn the_source_compared_with_itself_has_its_known_perplexity_and_no_divergence() {
    let (geometry, weights) = tiny();
    let plan = corpus(&geometry);
    let prompts: Vec<&SealedPrompt> = plan.evaluate().collect();
    let start = std::time::Instant::now();
    let states =
        final_states(&geometry, &weights, &weights, &prompts, StateType::F32, &Silent, "source").unwrap();
    let forward = start.elapsed();
    let evaluation = compare(&geometry, &weights, &weights, &prompts, &states, &states, &Silent).unwrap();
    println!("forward {forward:.2?}, with comparison {:.2?}", start.elapsed());
    print!("{}", evaluation.render_table());
    let all = &evaluation.all;
    assert_eq!((all.tokens, scored_tokens(&prompts)), (40604, 40604));
    assert!((all.source_perplexity / PERPLEXITY - 1.0).abs() <= 1e-4, "{}", all.source_perplexity);
    assert_eq!(evaluation.prompts.len(), 160);
    let axes: Vec<&str> = evaluation.axes.iter().map(|(axis, _)| axis.as_str()).collect();
    assert_eq!(axes, ["prose", "definitions", "technical", "code"]);
    assert_eq!(evaluation.axes.iter().map(|(_, scores)| scores.tokens).sum::<u64>(), 40604);
    for (name, scores) in evaluation.axes.iter().chain(&evaluation.prompts) {
        assert_eq!(scores.source_perplexity, scores.result_perplexity, "{name}");
        let divergence = [scores.kl_mean, scores.kl_standard_error, scores.kl_median, scores.kl_p99];
        assert_eq!((divergence, scores.top1_agreement), ([0.0; 4], 1.0), "{name}");
    }
    assert_eq!((all.kl_mean, all.kl_p99, all.top1_agreement), (0.0, 0.0, 1.0));
}

/// Prompts of four axes, one of a single token, and one that fills no block of rows evenly.
#[test]
fn figures_and_states_do_not_depend_on_threads() {
    let tiny = tiny();
    let plan = corpus(&tiny.0);
    let mut prompts = some(&plan, 16);
    let (single, pair) = (prompt("single", &[0]), prompt("pair", &[0, 300]));
    prompts.splice(2..2, [&single, &pair]);
    let with_threads = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| evaluate(&prompts, &tiny, StateType::F32))
    };
    let (one, two) = (with_threads(1), with_threads(2));
    print!("{}", one.render_table());
    assert_eq!(serde_json::to_string(&one).unwrap(), serde_json::to_string(&two).unwrap());
    assert!(one.all.kl_mean > 1e-4 && one.all.top1_agreement < 1.0, "{:?}", one.all);
    assert_eq!(one.prompts.len(), prompts.len() - 1, "a single token gives nothing");
    assert!(one.prompts.iter().all(|(id, _)| id != "single"));

    // The figures of a prompt do not depend on its company either.
    let alone = evaluate(&prompts[4..5], &tiny, StateType::F32);
    let among = one.prompts.iter().find(|(id, _)| *id == prompts[4].id).unwrap();
    assert_eq!(alone.all, among.1);
}

/// Against logits formed at once and sums written down again, in another order of operations.
#[test]
fn figures_agree_with_a_plain_computation() {
    let tiny = tiny();
    let (geometry, weights) = &tiny;
    let plan = corpus(geometry);
    let prompts = some(&plan, 53);
    let evaluation = evaluate(&prompts, &tiny, StateType::F32);
    let head = walk::model::Head::load(geometry, weights, &Device::Cpu).unwrap();
    let log_softmax = |experts: &dyn WeightSource| -> Vec<Vec<Vec<f64>>> {
        let states = final_states(geometry, weights, experts, &prompts, StateType::F32, &Silent, "").unwrap();
        let rows = |state: &Tensor| {
            let logits = values(&head.logits(state).unwrap());
            let rows = logits.chunks(geometry.vocab_size).map(|row| {
                let total: f64 = row.iter().rev().map(|logit| f64::from(*logit).exp()).sum();
                row.iter().map(|logit| f64::from(*logit) - total.ln()).collect()
            });
            rows.collect::<Vec<Vec<f64>>>()
        };
        states.iter().map(rows).collect()
    };
    let (source, result) = (log_softmax(weights), log_softmax(&Coarse(weights)));
    let (mut nll, mut divergences) = ([0.0, 0.0], Vec::new());
    for ((source, result), prompt) in source.iter().zip(&result).zip(&prompts) {
        for (row, next) in prompt.token_ids[1..].iter().enumerate() {
            nll[0] -= source[row][*next as usize];
            nll[1] -= result[row][*next as usize];
            let terms = source[row].iter().zip(&result[row]).map(|(p, q)| p.exp() * (p - q));
            divergences.push(terms.sum::<f64>());
        }
    }
    let count = divergences.len() as f64;
    let mean = divergences.iter().sum::<f64>() / count;
    let variance = divergences.iter().map(|kl| kl * kl).sum::<f64>() / count - mean * mean;
    divergences.sort_by(f64::total_cmp);
    let all = &evaluation.all;
    for (ours, plain) in [
        (all.source_perplexity, (nll[0] / count).exp()),
        (all.result_perplexity, (nll[1] / count).exp()),
        (all.kl_mean, mean),
        (all.kl_standard_error, (variance / (count - 1.0)).sqrt()),
        (all.kl_median, divergences[(count / 2.0).ceil() as usize - 1]),
        (all.kl_p99, divergences[(count * 0.99).ceil() as usize - 1]),
    ] {
        assert!((ours / plain - 1.0).abs() <= 1e-9, "{ours} is not {plain}");
    }
}

#[test]
fn a_bf16_state_is_rounded_after_every_layer_and_costs_little() {
    let (geometry, weights) = tiny();
    let plan = corpus(&geometry);
    let prompts = some(&plan, 16);
    let states =
        |state| final_states(&geometry, &weights, &weights, &prompts, state, &Silent, "source").unwrap();
    let (f32_states, bf16_states) = (states(StateType::F32), states(StateType::Bf16));
    for state in &bf16_states {
        assert!(bits(&values(state)).iter().all(|bits| bits & 0xffff == 0));
    }
    let evaluation =
        compare(&geometry, &weights, &weights, &prompts, &f32_states, &bf16_states, &Silent).unwrap();
    let change = evaluation.all.result_perplexity / evaluation.all.source_perplexity - 1.0;
    println!("bf16 state: KL {:.5}, perplexity {:+.3} %", evaluation.all.kl_mean, 100.0 * change);
    assert!(change.abs() <= 0.01 && evaluation.all.kl_mean > 1e-5);
}

#[derive(Default)]
struct Record(std::sync::Mutex<Vec<String>>);

impl Observer for Record {
    fn begin(&self, stage: &str, layer: Option<usize>, total: u64) {
        self.0.lock().unwrap().push(format!("begin {stage} {layer:?} {total}"));
    }

    fn advance(&self, item: &str) {
        self.0.lock().unwrap().push(item.into());
    }

    fn end(&self) {
        self.0.lock().unwrap().push("end".into());
    }

    fn note(&self, text: &str) {
        panic!("{text}");
    }
}

#[test]
fn the_observer_sees_every_layer_and_prompt() {
    let (geometry, weights) = tiny();
    let prompts = [prompt("a", &[0, 1]), prompt("b", &[0]), prompt("c", &[0, 2, 3])];
    let prompts: Vec<&SealedPrompt> = prompts.iter().collect();
    let record = Record::default();
    let states =
        final_states(&geometry, &weights, &weights, &prompts, StateType::F32, &record, "source").unwrap();
    compare(&geometry, &weights, &weights, &prompts, &states, &states, &record).unwrap();
    let mut expected = Vec::new();
    for layer in 0..5 {
        expected.push(format!("begin source Some({layer}) 3"));
        expected.extend(["a", "b", "c", "end"].map(String::from));
    }
    expected.extend(["begin compare None 2", "a", "c", "end"].map(String::from));
    assert_eq!(*record.0.lock().unwrap(), expected);
}

#[track_caller]
fn refused<T>(result: walk::Result<T>, parts: &[&str]) {
    let Err(error) = result else { panic!("this should have been refused, naming {parts:?}") };
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
    assert_eq!(error.exit_code(), 2, "{message}");
}

#[test]
fn what_is_not_finite_or_does_not_fit_is_refused_by_name() {
    let (geometry, weights) = tiny();
    let prompts = [prompt("first", &[0, 1, 2]), prompt("second", &[0, 5, 77, 6])];
    let prompts: Vec<&SealedPrompt> = prompts.iter().collect();
    let forward = |weights: &dyn WeightSource, prompts: &[&SealedPrompt]| {
        final_states(&geometry, weights, weights, prompts, StateType::F32, &Silent, "source")
    };
    let planted = |name, row, value| Planted { base: &weights, name, row, value };

    // Token 77 occurs in the second prompt only, at row 2.
    refused(
        forward(&planted(names::EMBED_TOKENS, 77, f32::NAN), &prompts),
        &["layer 0", "prompt \"second\"", "row 2"],
    );
    let states = forward(&weights, &prompts).unwrap();
    let compared = |source: &dyn WeightSource, result: &dyn WeightSource, states: &[Tensor]| {
        compare(&geometry, source, result, &prompts, states, states, &Silent)
    };
    let bad_head = planted(names::LM_HEAD, 9, f32::NAN);
    refused(
        compared(&weights, &bad_head, &states),
        &["the result's logit of token id 9 is NaN", "prompt \"first\", row 0"],
    );
    refused(compared(&bad_head, &weights, &states), &["the source's logit of token id 9 is NaN"]);

    // A NaN in one state only.
    let mut rows = states[1].to_vec2::<f32>().unwrap();
    rows[1][3] = f32::NAN;
    let bad_states = [states[0].clone(), Tensor::new(rows, &Device::Cpu).unwrap()];
    refused(compared(&weights, &weights, &bad_states), &["prompt \"second\", row 1", "NaN"]);

    refused(compared(&weights, &weights, &states[..1]), &["1 states for 2 prompts"]);
    let swapped = [states[1].clone(), states[0].clone()];
    refused(compared(&weights, &weights, &swapped), &["prompt \"first\"", "[4, 256]", "[3, 256]"]);

    let outside = prompt("outside", &[0, 2048]);
    refused(forward(&weights, &[&outside]), &["prompt \"outside\"", "row 1", "2048"]);
    let single = prompt("single", &[0]);
    let states = forward(&weights, &[&single]).unwrap();
    refused(
        compare(&geometry, &weights, &weights, &[&single], &states, &states, &Silent),
        &["nothing to score"],
    );
}

#[test]
fn types_of_state_are_read_and_written_alike() {
    for state in [StateType::F32, StateType::Bf16] {
        assert_eq!(state.to_string().parse::<StateType>().unwrap(), state);
    }
    refused("f16".parse::<StateType>(), &["f16", "f32 or bf16"]);
}
