//! What an audit finds, gate by gate.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::error::{Error, Refusal, Result, refuse};
use crate::walk::tolerance::Tolerance;

/// The gates' titles by number.
const GATES: [&str; 10] = [
    "journal whole, every sealed file as it was sealed",
    "source is BF16, inventories sealed before anything is replaced",
    "every tensor probed at every width, losses measured",
    "bits within the candidates, exact mean, mass checksum, solved again",
    "down's covariance goes through the finished gate and up",
    "every state follows from the quantized one before it",
    "packed, decoded and sliced bytes, permutations, shared vectors",
    "replaced tensors are the routed experts, the carrier is untouched",
    "installed experts, promises and repeated forwards within tolerance",
    "same-harness evaluation",
];

/// How a gate came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// All its checks passed.
    Passed,
    /// All that could be checked passed; something could not.
    PassedInPart,
    /// A check failed.
    Failed,
    /// Nothing could be checked.
    NotRun,
}

impl Verdict {
    /// As the table says it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::PassedInPart => "passed in part",
            Self::Failed => "FAILED",
            Self::NotRun => "not run",
        }
    }
}

/// One gate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GateReport {
    /// Its number.
    pub gate: usize,
    /// What it is about.
    pub title: String,
    /// How it came out.
    pub verdict: Verdict,
    /// Checks made.
    pub checks: usize,
    /// What failed, with its place.
    pub failures: Vec<String>,
    /// What could not be checked, and why.
    pub not_run: Vec<String>,
}

/// A tolerance the walk was held to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ToleranceLine {
    /// Field of the recipe.
    pub field: String,
    /// Value and default.
    #[serde(flatten)]
    pub tolerance: Tolerance,
}

/// What an audit found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AuditReport {
    /// What was audited.
    pub subject: String,
    /// Whether the walk is finished.
    pub complete: bool,
    /// Whether no check failed.
    pub passed: bool,
    /// The gates in order.
    pub gates: Vec<GateReport>,
    /// The tolerances in force.
    pub tolerances: Vec<ToleranceLine>,
}

impl AuditReport {
    /// The first failure as a failed check.
    pub fn failure(&self) -> Option<Error> {
        let gate = self.gates.iter().find(|gate| gate.verdict == Verdict::Failed)?;
        let more = self.gates.iter().map(|gate| gate.failures.len()).sum::<usize>() - 1;
        let others = if more == 0 { String::new() } else { format!(" (and {more} more)") };
        Some(refuse(format!("gate {}: {}{others}", gate.gate, gate.failures[0])).check())
    }

    /// Gates and tolerances as a table, failures and omissions below it.
    pub fn render_table(&self) -> String {
        let walk = if self.complete { "" } else { ", not finished" };
        let mut text = format!("{}{walk}\n\ngate  {:68}  checks  verdict\n", self.subject, "what");
        for gate in &self.gates {
            let (title, verdict) = (&gate.title, gate.verdict.as_str());
            text.push_str(&format!("{:>4}  {title:68}  {:>6}  {verdict}\n", gate.gate, gate.checks));
        }
        if !self.tolerances.is_empty() {
            text.push_str(&format!("\n{:34}  {:>12}  {:>12}\n", "tolerance", "value", "default"));
        }
        for ToleranceLine { field, tolerance } in &self.tolerances {
            let flag = if tolerance.loosened { "  LOOSENED" } else { "" };
            let (value, default) = (tolerance.value.0, tolerance.default.0);
            text.push_str(&format!("{field:34}  {value:>12.6}  {default:>12.6}{flag}\n"));
        }
        for (heading, list) in [("failed", true), ("not run", false)] {
            let items: Vec<String> = self
                .gates
                .iter()
                .flat_map(|gate| {
                    let items = if list { &gate.failures } else { &gate.not_run };
                    items.iter().map(|item| format!("  gate {}: {item}\n", gate.gate))
                })
                .collect();
            if !items.is_empty() {
                text.push_str(&format!("\n{heading}\n{}", items.concat()));
            }
        }
        let count = |list: fn(&GateReport) -> usize| self.gates.iter().map(list).sum::<usize>();
        let (failed, left) = (count(|gate| gate.failures.len()), count(|gate| gate.not_run.len()));
        let checks = count(|gate| gate.checks);
        let failed = if failed == 0 { "nothing failed".to_owned() } else { format!("{failed} FAILED") };
        text.push_str(&format!("\n{checks} checks, {failed}; {left} items could not be checked here\n"));
        text
    }
}

/// Collects what an audit finds.
#[derive(Debug, Default)]
pub struct Findings {
    gates: BTreeMap<usize, (usize, Vec<String>, Vec<String>)>,
    tolerances: Vec<ToleranceLine>,
}

impl Findings {
    /// Counts a check of a gate, failed where it is an error. Gives back what was checked where it passed.
    pub fn hold<T>(&mut self, gate: usize, check: Result<T>) -> Option<T> {
        let (checks, failures, _) = self.gates.entry(gate).or_default();
        *checks += 1;
        match check {
            Ok(found) => Some(found),
            Err(error) => {
                failures.push(match &error {
                    Error::Check(refusal) => refusal.to_string(),
                    other => other.to_string(),
                });
                None
            }
        }
    }

    /// Counts checks that passed elsewhere.
    pub fn passed(&mut self, gate: usize, checks: usize) {
        self.gates.entry(gate).or_default().0 += checks;
    }

    /// Counts a check that failed.
    pub fn fail(&mut self, gate: usize, wrong: Refusal) {
        self.hold::<()>(gate, Err(wrong.check()));
    }

    /// Counts a check that is a comparison.
    pub fn same(&mut self, gate: usize, found: &str, wanted: &str, wrong: impl FnOnce() -> Refusal) {
        match found == wanted {
            true => self.passed(gate, 1),
            false => self.fail(gate, wrong().wanted(wanted)),
        }
    }

    /// Says that something of a gate could not be checked.
    pub fn skip(&mut self, gate: usize, why: impl Into<String>) {
        self.gates.entry(gate).or_default().2.push(why.into());
    }

    /// Records the tolerances in force.
    pub fn tolerance(&mut self, field: &str, tolerance: Tolerance) {
        self.tolerances.push(ToleranceLine { field: field.to_owned(), tolerance });
    }

    /// The report on all gates.
    pub fn report(mut self, subject: &str, complete: bool) -> AuditReport {
        let gates: Vec<GateReport> = GATES
            .iter()
            .enumerate()
            .map(|(gate, title)| {
                let (checks, failures, not_run) = self.gates.remove(&gate).unwrap_or_default();
                let verdict = match (failures.is_empty(), checks, not_run.is_empty()) {
                    (false, ..) => Verdict::Failed,
                    (_, 0, _) => Verdict::NotRun,
                    (_, _, true) => Verdict::Passed,
                    (_, _, false) => Verdict::PassedInPart,
                };
                GateReport { gate, title: (*title).to_owned(), verdict, checks, failures, not_run }
            })
            .collect();
        AuditReport {
            subject: subject.to_owned(),
            complete,
            passed: gates.iter().all(|gate| gate.verdict != Verdict::Failed),
            gates,
            tolerances: self.tolerances,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_passes_only_where_something_was_checked_and_nothing_left_out() {
        let mut findings = Findings::default();
        findings.hold(1, Ok(()));
        findings.hold(2, Ok(()));
        findings.skip(2, "layer 3 is not finished");
        findings.skip(3, "nothing to see");
        findings.fail(4, refuse("wrong").file("f"));
        findings.same(4, "a", "b", || refuse("it is a"));
        let report = findings.report("x", false);
        let verdicts: Vec<Verdict> = report.gates[1..5].iter().map(|gate| gate.verdict).collect();
        assert_eq!(verdicts, [Verdict::Passed, Verdict::PassedInPart, Verdict::NotRun, Verdict::Failed]);
        assert!(!report.passed);
        let error = report.failure().unwrap();
        assert_eq!(
            (error.exit_code(), error.to_string().as_str()),
            (1, "check failed: gate 4: f: wrong (and 1 more)")
        );
        let table = report.render_table();
        assert!(table.contains("FAILED") && table.contains("gate 4: it is a; wanted: b"), "{table}");
    }
}
