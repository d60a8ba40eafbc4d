//! Gates 1 and 7: what the experts were read from, and what stays as it was.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::AuditOptions;
use super::findings::Findings;
use super::work::Evidence;
use crate::checkpoint::inventory::{Inventory, InventoryFile, Role, open_role};
use crate::checkpoint::names::{self, Projection};
use crate::error::{Error, Result, refuse};
use crate::store::tensor_dtype::TensorDtype;
use crate::walk::locations::Locations;
use crate::walk::open::inventory_file;
use crate::walk::progress::{Observer, advance, proceed};

/// Audits source and carrier: by their sealed inventories, and by themselves where they are at hand.
///
/// # Errors
/// Interrupted by the user; a directory that is given and is none.
pub fn audit_inputs(
    evidence: &Evidence<'_>,
    options: &AuditOptions,
    findings: &mut Findings,
    observer: &dyn Observer,
) -> Result<()> {
    sealed_source(evidence, findings);
    let first = evidence.journal.stages.first().map_or("nothing", |seal| seal.stage.as_str());
    findings.same(1, first, "inputs", || refuse(format!("the first thing sealed is {first}")));
    replaced(evidence, findings);
    if options.sealed_only {
        for (gate, what) in [(1, "the source"), (7, "the carrier")] {
            findings.skip(gate, format!("{what} itself was not read: --sealed-only"));
        }
        return Ok(());
    }
    for (field, given) in [("--source", &options.source), ("--carrier", &options.carrier)] {
        if let Some(dir) = given.as_ref().filter(|dir| !dir.is_dir()) {
            return refuse("no such directory").file(dir).field(field).wanted("a checkpoint directory").err();
        }
    }
    let known = Locations::read(evidence.work).ok();
    let places: [(usize, &InventoryFile, Option<PathBuf>); 2] = [
        (
            1,
            &evidence.source,
            options.source.clone().or_else(|| known.as_ref().map(|known| known.source.clone())),
        ),
        (
            7,
            &evidence.carrier,
            options.carrier.clone().or_else(|| known.as_ref().map(|known| known.carrier.clone())),
        ),
    ];
    for (gate, sealed, place) in places {
        proceed(observer)?;
        let role = sealed.role;
        match place.filter(|dir| dir.is_dir()) {
            None => findings.skip(gate, format!("the {} is not at hand: --{0} DIR", role.as_str())),
            Some(dir) => {
                let record = evidence.work.join(inventory_file(role));
                let check = || -> Result<()> {
                    let opened = open_role(role, &dir)?;
                    observer.begin(role.as_str(), None, opened.names().count() as u64);
                    let found = Inventory::take(&opened, &|name| advance(observer, name));
                    observer.end();
                    found?.verify_against(sealed, &dir, &record)
                };
                match check() {
                    Err(Error::Interrupted(said)) => return Err(Error::Interrupted(said)),
                    checked => findings.hold(gate, checked),
                };
            }
        }
    }
    Ok(())
}

/// Every replaced tensor is BF16 `[out, in]` in the sealed inventory, and nothing packed stands beside it.
fn sealed_source(evidence: &Evidence<'_>, findings: &mut Findings) {
    let geometry = &evidence.geometry;
    let tensors = &evidence.source.inventory.tensors;
    let file = evidence.work.join(inventory_file(Role::Source));
    for layer in geometry.moe_layers() {
        let mut expected = BTreeSet::new();
        for expert in 0..geometry.n_routed_experts {
            for role in Projection::ALL {
                let (name, down) = (names::expert(layer, expert, role), role == Projection::Down);
                let (hidden, inner) = (geometry.hidden_size, geometry.moe_intermediate_size);
                let shape = if down { [hidden, inner] } else { [inner, hidden] };
                let good = tensors
                    .get(&name)
                    .is_some_and(|tensor| tensor.dtype == TensorDtype::BF16.name() && tensor.shape == shape);
                let check = match good {
                    true => Ok(()),
                    false => Err(refuse("the source's expert tensor is missing or of another type or shape")
                        .file(&file)
                        .layer(layer)
                        .expert(expert)
                        .tensor(&name)
                        .wanted(format!("BF16 of shape {shape:?}"))
                        .check()),
                };
                findings.hold(1, check);
                expected.insert(name);
            }
        }
        let prefix = format!("{}mlp.experts.", names::layer_prefix(layer));
        let foreign = tensors.range(prefix.clone()..).take_while(|(name, _)| name.starts_with(&prefix));
        for (name, _) in foreign.filter(|(name, _)| !expected.contains(*name)) {
            let wrong =
                refuse("the source has an expert tensor no BF16 checkpoint has").file(&file).tensor(name);
            findings.fail(1, wrong);
        }
    }
}

/// What is replaced are the routed experts of the MoE layers and nothing of the MTP block.
fn replaced(evidence: &Evidence<'_>, findings: &mut Findings) {
    let geometry = &evidence.geometry;
    let mtp = geometry.mtp_layer();
    let layers: Vec<usize> = evidence
        .journal
        .stages
        .iter()
        .filter_map(|seal| seal.stage.strip_prefix("layer-")?.strip_suffix("/emit")?.parse().ok())
        .collect();
    for layer in layers {
        let check = match geometry.is_moe(layer) && layer != mtp {
            true => Ok(()),
            false => {
                Err(refuse("experts of a layer that is not to be replaced were emitted").layer(layer).check())
            }
        };
        findings.hold(7, check);
    }
}
