//! A comparison as plain text.

use super::diff::{DiffReport, Difference, RoleDiff};
use super::table::printable;
use crate::eval::table::{aligned, figure};

impl DiffReport {
    /// Roles, and the first `limit` weights that differ.
    pub fn render_table(&self, limit: usize) -> String {
        let what = if self.values_only { "values" } else { "what is stored" };
        let mut text = format!("a  {}\nb  {}\ncompared by {what}\n", self.a, self.b);
        if self.reordered > 0 {
            let note =
                "expert weights by value in the order of the source's channels, as the manifests tell it";
            text.push_str(&format!("{} {note}\n", self.reordered));
        }
        text.push('\n');
        let all = ("all".to_owned(), &self.total);
        let roles = self.roles.iter().map(|(role, count)| (role.name().to_owned(), count)).chain([all]);
        let rows: Vec<Vec<String>> = roles.map(|(name, count)| role_row(name, count)).collect();
        let header = ["role", "equal", "different", "only in a", "only in b", "|a-b|/|a|", "largest"];
        text.push_str(&aligned(&header, &rows));
        if !self.differences.is_empty() {
            let rows: Vec<Vec<String>> = self.differences.iter().take(limit).map(row).collect();
            let header = ["weight", "in a", "in b", "parts", "values differing", "|a-b|/|a|", "largest"];
            text.push_str(&format!("\n{}", aligned(&header, &rows)));
        }
        if self.differences.len() > limit {
            text.push_str(&format!("and {} more: --limit N shows them\n", self.differences.len() - limit));
        }
        text
    }
}

fn number(value: Option<f64>) -> String {
    value.map_or("-".into(), |value| figure(value, 6))
}

fn role_row(name: String, count: &RoleDiff) -> Vec<String> {
    vec![
        name,
        count.equal.to_string(),
        count.different.to_string(),
        count.only_a.to_string(),
        count.only_b.to_string(),
        number(count.relative_error),
        number(count.max_error),
    ]
}

fn row(difference: &Difference) -> Vec<String> {
    let side = |side: &Option<String>| side.clone().unwrap_or("-".into());
    let parts = if difference.parts.is_empty() { "-".to_owned() } else { difference.parts.join(" ") };
    vec![
        printable(&difference.name),
        side(&difference.a),
        side(&difference.b),
        parts,
        difference.values_differing.map_or("-".into(), |count| count.to_string()),
        number(difference.relative_error),
        number(difference.max_error),
    ]
}
