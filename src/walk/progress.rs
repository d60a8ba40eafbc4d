//! How the walk tells an onlooker where it is. Nothing here reaches bytes.

/// Watches a long piece of work. Calls come from many threads.
pub trait Observer: Sync {
    /// A stage begins: `total` units of work, each worth one `advance`.
    fn begin(&self, stage: &str, layer: Option<usize>, total: u64);

    /// A unit is done; `item` says which (expert, prompt).
    fn advance(&self, item: &str);

    /// The stage in hand is done.
    fn end(&self);

    /// Something the user should know: a fallback, an adopted artifact, a slow path. Shown at once and kept.
    fn note(&self, text: &str);
}

/// Watches nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Observer for Silent {
    fn begin(&self, _: &str, _: Option<usize>, _: u64) {}
    fn advance(&self, _: &str) {}
    fn end(&self) {}
    fn note(&self, _: &str) {}
}
