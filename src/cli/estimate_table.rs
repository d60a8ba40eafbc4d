//! The text of an estimate.

use crate::estimate::counts::Span;
use crate::estimate::record::Sizes;
use crate::estimate::report::{Estimate, Stage};
use crate::estimate::tokens::{BYTES_A_TOKEN, Basis};
use crate::estimate::work::Op;
use crate::eval::table::{aligned, figure};

const GIB: f64 = (1u64 << 30) as f64;

/// Share of the threads' time under which a machine is told to be busy.
const BUSY: f64 = 0.75;
/// Parts of a stage that are shown.
const PARTS: usize = 3;

fn gib(bytes: u64) -> String {
    figure(bytes as f64 / GIB, 2)
}

fn span(span: Span) -> String {
    if span.least == span.most { span.most.to_string() } else { format!("{} to {}", span.least, span.most) }
}

/// The whole estimate.
pub fn table(estimate: &Estimate) -> String {
    let mut text = head(estimate);
    text.push_str(&counts(estimate));
    text.push_str(&sizes(estimate));
    text.push_str(&rates(estimate));
    text.push_str(&stages(estimate));
    if let Some(record) = &estimate.record_sizes {
        text.push_str(&against_the_record(estimate, record));
    }
    text
}

fn head(estimate: &Estimate) -> String {
    let (tokens, machine) = (&estimate.tokens, &estimate.machine);
    let basis = match tokens.basis {
        Basis::Tokenizer => "counted by the model's tokenizer".to_owned(),
        Basis::Bytes => {
            format!("GUESSED from the text at {BYTES_A_TOKEN} bytes a token: the model has no tokenizer")
        }
        Basis::Told => "as told by --tokens".to_owned(),
    };
    format!(
        "{}: model {}, recipe {}, {} threads, tile search {}\n{} calibration tokens ({basis}), {} for evaluation\n",
        estimate.status,
        estimate.model,
        estimate.recipe,
        machine.threads,
        machine.tile_search,
        tokens.calibrate,
        tokens.evaluate,
    )
}

fn counts(estimate: &Estimate) -> String {
    let layer = &estimate.layer;
    let [least, most] = layer.test_encode_equivalents;
    let mut rows = Vec::new();
    let mut row = |what: &str, count: String, how: String| rows.push(vec![what.to_owned(), count, how]);
    row(
        "search",
        span(layer.search),
        format!("3 x ({} experts + {} of a sample, each bundle)", layer.experts, layer.sample),
    );
    row(
        "first probes",
        layer.first_probe.to_string(),
        format!("{} x {}", layer.probe_of_an_expert, layer.experts),
    );
    row(
        "follow-up probes",
        span(layer.follow_up),
        format!("{} x C, C = {}", layer.probe_of_an_expert, span(layer.changed)),
    );
    row("final", layer.final_encode.to_string(), format!("3 x {}", layer.experts));
    row(
        "all",
        span(layer.all),
        format!("x {} layers: {} to {}", estimate.layers, estimate.encodes[0], estimate.encodes[1]),
    );
    row(
        "test encodes",
        format!("{} to {}", figure(least, 1), figure(most, 1)),
        format!(
            "in full encodes: {} scale searches, {} sketches",
            span(layer.scale_searches),
            span(layer.sketches)
        ),
    );
    format!("\nencodes a layer\n{}", left_aligned(&rows))
}

fn sizes(estimate: &Estimate) -> String {
    let (disk, memory) = (&estimate.disk, &estimate.memory);
    let row = |what: &str, bytes: u64, how: String| vec![what.to_owned(), gib(bytes), how];
    let rows = [
        row("v2 shards", disk.v2_shards, format!("the result; {} bytes a layer", disk.v2_shard_of_a_layer)),
        row("final experts", disk.final_experts, "the same, sealed expert by expert; kept".into()),
        row("routing", disk.routing, "ids and weights of all layers; kept".into()),
        row("records", disk.records, "JSON, about".into()),
        row("states", 2 * disk.state, "two at a time".into()),
        row("disk", disk.peak, "at the worst moment, checkpoints not counted".into()),
        row(
            "memory",
            memory.peak,
            format!(
                "rows of a layer {} + {} experts at work x {} + factors {}, or the evaluation {}; about, mapped checkpoints not counted",
                gib(memory.capture),
                memory.experts_at_work,
                gib(memory.expert),
                gib(memory.remembered_factors),
                gib(memory.evaluation)
            ),
        ),
    ];
    format!("\nGiB\n{}", left_aligned(&rows))
}

fn rates(estimate: &Estimate) -> String {
    let machine = &estimate.machine;
    let rate = |seconds: f64, alone: bool, op: Op| {
        let (value, unit) = match op.unit() {
            "flop" => (1e-9 / seconds, "GFLOP/s"),
            "bytes" => (1e-9 / seconds, "GB/s"),
            "files" => (seconds * 1e3, "ms a file"),
            "programs" => (seconds, "s"),
            _ if matches!(op, Op::Search(_)) => (seconds * 1e9, "ns a weight"),
            other => {
                let unit = if other == "weights" { "M weights/s" } else { "M/s" };
                (1e-6 / seconds, unit)
            }
        };
        let what = if alone { format!("{op}, one thread") } else { op.to_string() };
        vec![what, figure(value, 2), unit.to_owned()]
    };
    let mut rows: Vec<Vec<String>> =
        machine.shared.iter().map(|r| rate(r.seconds_a_unit, false, r.op)).collect();
    for (what, cubic) in
        [("block LDL", machine.factor), ("trace of D", machine.trace), ("f64 solve", machine.solve)]
    {
        let formula = format!("s: {:.2e} k2 + {:.2e} k3", cubic.square, cubic.cube);
        rows.push(vec![format!("{what}, k = 1024"), figure(cubic.seconds(1024), 4), formula]);
    }
    let once = |op: Op| !matches!(op, Op::Write | Op::Publish);
    rows.extend(machine.alone.iter().filter(|r| once(r.op)).map(|r| rate(r.seconds_a_unit, true, r.op)));
    let disk = if machine.disk_tried {
        ""
    } else {
        "durable writing was not tried (no --work): it takes no time below\n"
    };
    let busy = match machine.processor_share {
        Some(share) if share < BUSY => format!(
            "BUSY: the calibration had {:.0} % of its threads' time; on this machine without other work all times are \
             about {:.1} times shorter\n",
            100.0 * share,
            1.0 / share
        ),
        _ => String::new(),
    };
    format!(
        "\nthis machine, {} threads together, {:.0} s of calibration\n{}{busy}{disk}",
        machine.threads,
        machine.calibration_seconds,
        left_aligned(&rows)
    )
}

fn stages(estimate: &Estimate) -> String {
    let mut rows = Vec::new();
    let range =
        |least: f64, most: f64, decimals: usize| match (figure(least, decimals), figure(most, decimals)) {
            (low, high) if low == high => high,
            (low, high) => format!("{low} to {high}"),
        };
    for Stage { least, most, parts, .. } in &estimate.stages {
        let largest: Vec<String> = parts
            .iter()
            .take(PARTS)
            .filter(|part| part.seconds >= 0.05 * most.seconds_each)
            .map(|part| {
                let alone = if part.alone { ", one thread" } else { "" };
                format!("{}{alone} {:.0} %", part.op, 100.0 * part.seconds / most.seconds_each)
            })
            .collect();
        rows.push(vec![
            most.stage.clone(),
            most.times.to_string(),
            range(least.seconds_each, most.seconds_each, 2),
            range(least.hours, most.hours, 2),
            format!("  {}", largest.join("; ")),
        ]);
    }
    let [least, most] = estimate.hours;
    rows.push(vec!["all".into(), String::new(), String::new(), range(least, most, 2)]);
    // The last column reads from the left.
    let width = rows.iter().filter_map(|row| row.get(4)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    rows.iter_mut().filter_map(|row| row.get_mut(4)).for_each(|cell| *cell = format!("{cell:<width$}"));
    let mut text = format!(
        "\nhours on this machine, {}\n{}",
        estimate.status,
        aligned(&["stage", "times", "seconds each", "hours", ""], &rows)
    );
    text.push_str("\nwhat is counted, times the rates above\n");
    let words = estimate.stages.iter().map(|stage| vec![stage.most.stage.clone(), stage.model.to_owned()]);
    text.push_str(&left_aligned(&words.collect::<Vec<_>>()));
    text.push_str(&format!(
        "probing may go on up to the recipe's cap, {} encodes a layer\n",
        estimate.layer.probes_at_the_cap
    ));
    text
}

fn against_the_record(estimate: &Estimate, sizes: &Sizes) -> String {
    let rows: Vec<Vec<String>> = estimate
        .record_counts
        .iter()
        .map(|line| {
            let verdict = if line.equal { "equal".to_owned() } else { line.because.clone() };
            vec![line.what.clone(), line.record.clone(), line.counted.clone(), verdict]
        })
        .collect();
    let mut text = format!("\nencodes a layer: the Round 7 record, and here\n{}", left_aligned(&rows));
    let Sizes { record_routed_gib, trellis_gib, routed_gib, gap_gib, .. } = sizes;
    text.push_str(&format!(
        "\nsize: the record has {record_routed_gib} GiB of routed experts; here {routed_gib:.2} GiB to the byte, {trellis_gib:.2} of them \
         trellis words; {gap_gib:.2} GiB are not explained\n"
    ));
    let readings: Vec<Vec<String>> = sizes
        .readings
        .iter()
        .map(|reading| {
            vec![
                format!("  with {}", reading.what),
                format!("{:.2} GiB,", reading.gib),
                format!("{:+.2} left", reading.left_gib),
            ]
        })
        .collect();
    text.push_str(&left_aligned(&readings));
    let [with_mtp, without_mtp] = sizes.carried_bf16_gib;
    text.push_str(&format!(
        "of the record's {} GiB in all, {:.1} are left for what is carried; in BF16 that is {with_mtp:.1} GiB, {without_mtp:.1} without \
         the MTP layer's experts: the carrier's own packing decides\n{}\n",
        sizes.record_total_gib, sizes.record_carried_gib, sizes.verdict
    ));
    text
}

/// Columns to the left, two spaces apart, no header.
fn left_aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}
