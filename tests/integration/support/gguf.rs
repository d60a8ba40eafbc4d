//! GGUF files put together by hand, right and wrong ones.

use std::path::Path;

/// A file to be written.
#[derive(Clone)]
pub struct Gguf {
    /// Version.
    pub version: u32,
    /// Keys with type number and value bytes.
    pub keys: Vec<(String, u32, Vec<u8>)>,
    /// Tensors.
    pub tensors: Vec<Tensor>,
}

/// A tensor to be written.
#[derive(Clone)]
pub struct Tensor {
    /// Name.
    pub name: String,
    /// Extents, innermost first.
    pub extents: Vec<u64>,
    /// Type number; 0 is F32.
    pub kind: u32,
    /// Added to its offset.
    pub shift: u64,
    /// Values.
    pub values: Vec<f32>,
}

/// A text as GGUF has it.
pub fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

impl Gguf {
    /// An importance matrix without entries, with the keys that llama.cpp writes.
    pub fn imatrix() -> Self {
        let datasets = [&8u32.to_le_bytes()[..], &1u64.to_le_bytes(), &text("calibration.txt")].concat();
        let keys = [
            ("general.type", 8, text("imatrix")),
            ("imatrix.datasets", 9, datasets),
            ("imatrix.chunk_count", 4, 45u32.to_le_bytes().to_vec()),
            ("imatrix.chunk_size", 4, 512u32.to_le_bytes().to_vec()),
        ];
        let keys = keys.map(|(key, kind, value)| (key.to_owned(), kind, value)).to_vec();
        Self { version: 3, keys, tensors: Vec::new() }
    }

    /// Adds a tensor.
    pub fn tensor(mut self, name: &str, extents: &[u64], values: &[f32]) -> Self {
        let (name, extents, values) = (name.to_owned(), extents.to_vec(), values.to_vec());
        self.tensors.push(Tensor { name, extents, kind: 0, shift: 0, values });
        self
    }

    /// Adds the entry of one matrix: sums and the count they are of.
    pub fn entry(self, name: &str, sums: &[f32], count: f32) -> Self {
        self.tensor(&format!("{name}.in_sum2"), &[sums.len() as u64], sums).tensor(
            &format!("{name}.counts"),
            &[1],
            &[count],
        )
    }

    /// Adds the entry of a layer's experts: sums `[expert][input]` and a count each.
    pub fn experts(self, name: &str, sums: &[f32], counts: &[f32]) -> Self {
        let experts = counts.len() as u64;
        self.tensor(&format!("{name}.in_sum2"), &[sums.len() as u64 / experts, experts], sums).tensor(
            &format!("{name}.counts"),
            &[1, experts],
            counts,
        )
    }

    /// Everything before the tensors' values, without padding.
    pub fn head(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.keys.len() as u64).to_le_bytes());
        for (key, kind, value) in &self.keys {
            bytes.extend([&text(key)[..], &kind.to_le_bytes(), value].concat());
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            bytes.extend(text(&tensor.name));
            bytes.extend((tensor.extents.len() as u32).to_le_bytes());
            tensor.extents.iter().for_each(|extent| bytes.extend(extent.to_le_bytes()));
            bytes.extend(tensor.kind.to_le_bytes());
            bytes.extend((offset + tensor.shift).to_le_bytes());
            offset += (4 * tensor.values.len() as u64).next_multiple_of(32);
        }
        bytes
    }

    /// The whole file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.head();
        for tensor in &self.tensors {
            bytes.resize(bytes.len().next_multiple_of(32), 0);
            tensor.values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        }
        bytes
    }

    /// Writes it.
    pub fn write(&self, path: &Path) {
        std::fs::write(path, self.bytes()).unwrap();
    }
}
