//! The modules of the shim, the command, the VMM and the agent form layers. docs/architecture.md shows them: a block of
//! text for each crate, whose first line names its folder. Each further line is a layer, from the top to the bottom,
//! and names its modules before two spaces. A flowchart follows, which is made from the layers and from the sources.
//! With `WRITE_FLOWCHARTS` in the environment, the tests write it.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use bulkhead_module_graph::{
    Graph, cycle, flowchart, folded, lines_without_tests, of_crate, reduced, upward,
};

const ARCHITECTURE: &str = "docs/architecture.md";

/// The most lines of a source file, without its tests.
const MOST_LINES: usize = 600;

/// The tests run at the same time, and each may write its flowchart.
static WRITING: Mutex<()> = Mutex::new(());

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

/// Expects that the modules of the crate use others in lower layers only, and that no modules use one another in a
/// circle. `depth` is how many names of a module's path are a module of its own in this respect.
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
    check_flowchart(folder, &flowchart(&reduced(&top), &layers));
}

/// Expects that `chart` follows the layers of the crate, or writes it.
fn check_flowchart(folder: &str, chart: &str) {
    let _writing = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    let path = project().join(ARCHITECTURE);
    let text = fs::read_to_string(&path).unwrap();
    let (before, after) = text.split_once(&format!("```text\n{folder}\n")).unwrap();
    let (layers, after) = after.split_once("```\n").unwrap();
    let (shown, after) =
        match after.strip_prefix("\n```mermaid\n").and_then(|after| after.split_once("```\n")) {
            Some((shown, after)) => (shown, after),
            None => ("", after),
        };
    if std::env::var_os("WRITE_FLOWCHARTS").is_some() {
        let text = format!("{before}```text\n{folder}\n{layers}```\n\n```mermaid\n{chart}```\n{after}");
        fs::write(&path, text).unwrap();
    } else {
        let command = "WRITE_FLOWCHARTS=1 cargo test -p bulkhead-module-graph";
        assert_eq!(shown, chart, "{ARCHITECTURE} has another flowchart of {folder}; `{command}` writes it");
    }
}

#[test]
fn the_shims_modules_use_lower_layers_only() {
    check("host-shim/src", &["fuzz"], 2);
}

#[test]
fn the_commands_modules_use_lower_layers_only() {
    check("cli/src", &[], usize::MAX);
}

#[test]
fn the_agents_modules_use_lower_layers_only() {
    check("guest-agent/src", &[], usize::MAX);
}

#[test]
fn the_vmms_modules_use_lower_layers_only() {
    check("vmm/src", &[], usize::MAX);
}

#[test]
fn no_file_of_the_product_is_too_long() {
    let folders =
        ["host-shim/src", "cli/src", "guest-agent/src", "guest-agent/api/src", "vmm/src", "vmm/api/src"]
            .map(|folder| project().join(folder));
    let mut folders = Vec::from(folders);
    let (mut files, mut long) = (0, Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            // tests.rs and what is in tests/ are tests only.
            if path.file_stem().is_some_and(|stem| stem == "tests") {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files += 1;
                let lines = lines_without_tests(&fs::read_to_string(&path).unwrap());
                if lines > MOST_LINES {
                    long.push(format!("{}: {lines}", path.display()));
                }
            }
        }
    }
    assert!(files > 200, "only {files} files were found");
    assert!(long.is_empty(), "more than {MOST_LINES} lines without tests: {long:#?}");
}
