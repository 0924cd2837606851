//! The modules of the shim, the VMM and the agent form layers. docs/architecture.md shows them: a block of text for each crate,
//! whose first line names its folder. Each further line is a layer, from the top to the bottom, and names its modules before
//! two spaces.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use bulkhead_module_graph::{Graph, cycle, folded, of_crate, upward};

const ARCHITECTURE: &str = "docs/architecture.md";

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The layers of the crate with its sources in `folder`.
fn layers(folder: &str) -> Vec<Vec<String>> {
    let text = fs::read_to_string(project().join(ARCHITECTURE)).unwrap();
    let block = text
        .split("```")
        .find_map(|block| block.strip_prefix("text\n")?.strip_prefix(folder)?.strip_prefix('\n'));
    let lines = block.unwrap_or_else(|| panic!("{ARCHITECTURE} has no layers of {folder}")).lines();
    let names =
        |line: &str| line.split("  ").next().unwrap_or_default().split(' ').map(str::to_owned).collect();
    lines.map(names).collect()
}

/// Expects that the modules of the crate use others in lower layers only, and that no modules use one another in a circle.
/// `depth` is how many names of a module's path are a module of its own in this respect.
fn check(folder: &str, without: &[&str], depth: usize) {
    let mut graph = folded(&of_crate(&project().join(folder), without), depth);
    // The root declares the modules.
    graph.remove("");
    graph.values_mut().for_each(|used| used.retain(|module| !module.is_empty()));
    if let Some(cycle) = cycle(&graph) {
        panic!("modules of {folder} use one another in a circle: {}", cycle.join(" -> "));
    }
    let top: Graph = folded(&graph, 1);
    let layers = layers(folder);
    let shown: BTreeSet<_> = layers.iter().flatten().collect();
    assert_eq!(shown, top.keys().collect(), "{ARCHITECTURE} shows other modules of {folder} than there are");
    let upward = upward(&top, &layers, false);
    assert!(upward.is_empty(), "not to a lower layer of {folder}, see {ARCHITECTURE}: {upward:#?}");
}

#[test]
fn the_shims_modules_use_lower_layers_only() {
    check("host-shim/src", &["fuzz"], 2);
}

#[test]
fn the_agents_modules_use_lower_layers_only() {
    check("guest-agent/src", &[], usize::MAX);
}

#[test]
fn the_vmms_modules_use_lower_layers_only() {
    check("vmm/src", &[], usize::MAX);
}
