//! How the walk tells an onlooker where it is, and how long its stages take. Nothing here reaches bytes.

use std::time::Instant;

use crate::error::{Error, Result};

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

    /// Whether the user asked to stop: the units in hand are finished and kept, no other is begun.
    fn stop_requested(&self) -> bool {
        false
    }
}

/// Called before every unit of work.
///
/// # Errors
/// [`Error::Interrupted`] where the user asked to stop.
pub fn proceed(observer: &dyn Observer) -> Result<()> {
    match observer.stop_requested() {
        false => Ok(()),
        true => Err(Error::Interrupted(
            "what was finished is kept, and the same command goes on from there".to_owned(),
        )),
    }
}

/// A unit is done; asks at once whether to go on.
///
/// # Errors
/// As [`proceed`].
pub fn advance(observer: &dyn Observer, item: &str) -> Result<()> {
    observer.advance(item);
    proceed(observer)
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

/// Wall-clock seconds by stage, in order of first use.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stopwatch(Vec<(String, f64)>);

impl Stopwatch {
    /// Adds the time since `started` to a stage's sum.
    pub fn count(&mut self, stage: &str, started: Instant) {
        let seconds = started.elapsed().as_secs_f64();
        match self.0.iter_mut().find(|(name, _)| name == stage) {
            Some((_, sum)) => *sum += seconds,
            None => self.0.push((stage.to_owned(), seconds)),
        }
    }

    /// What was added since `before` was a copy of this one.
    pub fn since(&self, before: &Self) -> Vec<(String, f64)> {
        let earlier =
            |name: &str| before.0.iter().find(|(known, _)| known == name).map_or(0.0, |(_, sum)| *sum);
        let added = self.0.iter().map(|(name, sum)| (name.clone(), sum - earlier(name)));
        added.filter(|(_, seconds)| *seconds > 0.0).collect()
    }

    /// The sums so far, which begin anew.
    pub fn take(&mut self) -> Vec<(String, f64)> {
        std::mem::take(&mut self.0)
    }
}
