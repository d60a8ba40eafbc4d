//! An inspection as plain text.

use super::provenance::{Manifests, Provenance, summary};
use super::{Group, Inspection, Weight};
use crate::eval::table::{aligned, figure};

impl Inspection {
    /// Totals, roles, layers of routed experts, and what the checkpoint says of itself; every weight if they were kept.
    pub fn render_table(&self) -> String {
        let mut sections = vec![format!(
            "{}\n{} safetensors files, {} bytes; {} tensors, {} packed modules; {} bits a weight\n",
            self.path,
            self.files,
            self.file_bytes,
            self.tensors,
            self.total.packed_modules,
            optional(self.total.bits_per_weight()),
        )];
        let all = ("all".to_owned(), &self.total);
        let roles = self.roles.iter().map(|(role, group)| (role.name().to_owned(), group)).chain([all]);
        let rows: Vec<Vec<String>> = roles.map(|(name, group)| role_row(name, group)).collect();
        sections.push(aligned(
            &["role", "layers", "packed", "plain", "weights", "bytes", "bits a weight", "stored as"],
            &rows,
        ));
        if !self.expert_layers.is_empty() {
            sections.push(self.layer_table());
        }
        let provenance = self.provenance.render();
        if !provenance.is_empty() {
            sections.push(provenance);
        }
        if let Some(weights) = &self.weights {
            let rows: Vec<Vec<String>> = weights.iter().map(weight_row).collect();
            sections
                .push(aligned(&["weight", "stored as", "shape", "bits", "codebook", "bytes", "file"], &rows));
        }
        sections.join("\n")
    }

    /// A line for every run of layers that are alike.
    fn layer_table(&self) -> String {
        let mut rows: Vec<(usize, usize, Vec<String>)> = Vec::new();
        for (&layer, group) in &self.expert_layers {
            let row = vec![
                (group.packed_modules + group.plain_tensors).to_string(),
                group.bytes.to_string(),
                optional(group.bits_per_weight()),
                optional(group.trellis_bits_per_weight()),
                stored_as(group),
            ];
            match rows.last_mut() {
                Some((_, last, known)) if *last + 1 == layer && *known == row => *last = layer,
                _ => rows.push((layer, layer, row)),
            }
        }
        let rows: Vec<Vec<String>> = rows
            .into_iter()
            .map(|(first, last, row)| {
                let name = if first == last { first.to_string() } else { format!("{first} to {last}, each") };
                [vec![name], row].concat()
            })
            .collect();
        aligned(
            &["experts of layer", "matrices", "bytes", "bits a weight", "trellis alone", "stored as"],
            &rows,
        )
    }
}

fn role_row(name: String, group: &Group) -> Vec<String> {
    vec![
        name,
        group.layers.len().to_string(),
        group.packed_modules.to_string(),
        group.plain_tensors.to_string(),
        group.weights.to_string(),
        group.bytes.to_string(),
        optional(group.bits_per_weight()),
        stored_as(group),
    ]
}

fn weight_row(weight: &Weight) -> Vec<String> {
    vec![
        printable(&weight.name),
        weight.stored.clone(),
        format!("{:?}", weight.shape),
        match (weight.bits, &weight.codebook) {
            (Some(bits), _) => bits.to_string(),
            (None, Some(_)) => figure(weight.bytes as f64 * 8.0 / weight.count() as f64, 4),
            (None, None) => "-".into(),
        },
        weight.codebook.clone().unwrap_or("-".into()),
        weight.bytes.to_string(),
        printable(&weight.file),
    ]
}

/// `kaiju1 p64 2; r7 v2 mcg 3-bit 16, 4-bit 4; BF16 12`.
fn stored_as(group: &Group) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut before = None;
    for kind in &group.packed {
        let family = (&kind.layout, &kind.codebook);
        let bits = kind.bits.map_or(String::new(), |bits| format!("{bits}-bit "));
        let count = format!("{bits}{}", kind.modules);
        match parts.last_mut().filter(|_| before == Some(family)) {
            Some(part) => part.push_str(&format!(", {count}")),
            None => parts.push(format!("{} {} {count}", kind.layout, kind.codebook)),
        }
        before = Some(family);
    }
    parts.extend(group.dtypes.iter().map(|(dtype, count)| format!("{dtype} {count}")));
    parts.join("; ")
}

fn optional(value: Option<f64>) -> String {
    value.map_or("-".into(), |value| figure(value, 4))
}

/// A name from a file without control characters.
pub(crate) fn printable(name: &str) -> String {
    name.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

impl Provenance {
    fn render(&self) -> String {
        let mut lines = Vec::new();
        if let Some(model_type) = &self.model_type {
            lines.push(format!("model_type: {model_type}"));
        }
        for (place, block) in &self.quantization {
            lines.push(format!("{place}: {block}"));
        }
        for (key, values) in &self.metadata {
            lines.push(format!("shard metadata {key}: {}", summary(values)));
        }
        for (kind, manifests) in &self.manifests {
            lines.extend(manifests.lines(kind));
        }
        lines.iter().map(|line| printable(line) + "\n").collect()
    }
}

impl Manifests {
    fn lines(&self, kind: &str) -> Vec<String> {
        let mut lines = vec![format!("{kind}: {} files", self.files.len())];
        if let [file] = &self.files[..] {
            lines = vec![file.clone()];
        }
        let says = self.says.iter().map(|(field, values)| format!("  {field}: {}", summary(values)));
        lines.extend(says);
        if !self.entries.is_empty() {
            let entries: Vec<String> =
                self.entries.iter().map(|(field, count)| format!("{count} {field}")).collect();
            lines.push(format!("  entries: {}", entries.join(", ")));
        }
        if self.bits_agree > 0 {
            lines.push(format!("  bits: {} modules as the shards have them", self.bits_agree));
        }
        lines.extend(self.bits_differ.iter().map(|what| format!("  bits differ: {what}")));
        lines.extend(self.unreadable.iter().map(|(file, why)| format!("  unreadable: {file}: {why}")));
        lines
    }
}
