//! The layers of the crate, and a test that every dependency between its modules points down.
//!
//! A module is a file of a layer's folder; the files in a folder of the same name are part of it. The test reads `use`
//! declarations and other paths that begin with `crate`, `super` or `self`. Tests may use whatever they like.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// From the top to the bottom. A module may use those of its own layer and of the layers below it.
const LAYERS: [&str; 8] = ["service", "pod", "process", "io", "guest", "vm", "host", "types"];

/// Not part of any layer: the program itself, the fuzz targets, and what only tests use.
const OUTSIDE: [&str; 5] = ["lib", "main", "fuzz", "layers", "testing"];

/// For each module `layer::name`, the modules that it uses.
type Graph = BTreeMap<String, BTreeSet<String>>;

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => sources(&path, found),
            false if path.extension().is_some_and(|extension| extension == "rs") => found.push(path),
            false => {}
        }
    }
}

/// The path of a file's module in the crate: `host/network/scan.rs` is `host`, `network`, `scan`.
fn module_path(file: &Path) -> Vec<String> {
    let file = file.with_extension("");
    let names = file.iter().map(|name| name.to_str().unwrap().to_owned());
    names.filter(|name| name != "mod").collect()
}

/// The text without comments, string literals and the test module at its end.
fn code(text: &str) -> String {
    let product = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let product = product.split("#[cfg(test)]\npub(crate) mod tests").next().unwrap_or_default();
    let lines = product.lines().map(|line| line.split("//").next().unwrap_or_default());
    let mut code = String::new();
    for (index, part) in lines.collect::<Vec<_>>().join("\n").split('"').enumerate() {
        code.push_str(if index % 2 == 0 { part } else { "\"\"" });
    }
    code
}

/// Every path in `code` that begins with `crate`, `super` or `self`, with the braces of `use` taken apart.
fn paths(code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for root in ["crate", "super", "self"] {
        for (at, _) in code.match_indices(&format!("{root}::")) {
            let before = code[..at].chars().next_back();
            if !before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
                expand(&mut &code[at..], &mut Vec::new(), &mut found);
            }
        }
    }
    found
}

/// Reads one tree of a `use`, or a plain path, and moves `rest` behind it.
fn expand(rest: &mut &str, prefix: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
    let depth = prefix.len();
    loop {
        *rest = rest.trim_start();
        if let Some(inner) = rest.strip_prefix('{') {
            *rest = inner;
            loop {
                expand(rest, prefix, found);
                *rest = rest.trim_start();
                match rest.strip_prefix(',') {
                    Some(next) => *rest = next,
                    None => break,
                }
            }
            *rest = rest.strip_prefix('}').unwrap_or(rest);
            break;
        }
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (name, next) = rest.split_at(end);
        *rest = next;
        if !name.is_empty() && name != "as" {
            prefix.push(name.to_owned());
        }
        match rest.strip_prefix("::") {
            Some(next) => *rest = next,
            None => {
                found.push(prefix.clone());
                break;
            }
        }
    }
    prefix.truncate(depth);
}

/// The path from the root of the crate of what `path` names in the module `from`.
fn resolve(path: &[String], from: &[String]) -> Vec<String> {
    let mut base = match path[0].as_str() {
        "crate" => Vec::new(),
        _ => from.to_vec(),
    };
    for name in path {
        match name.as_str() {
            "crate" | "self" => {}
            "super" => drop(base.pop()),
            name => base.push(name.to_owned()),
        }
    }
    base
}

fn graph() -> Graph {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut graph = Graph::new();
    for file in files {
        let from = module_path(file.strip_prefix(&root).unwrap());
        if from.iter().any(|name| name == "tests") || OUTSIDE.contains(&from[0].as_str()) {
            continue;
        }
        assert!(LAYERS.contains(&from[0].as_str()), "{} is in no layer", file.display());
        let module = from[..from.len().min(2)].join("::");
        let uses = graph.entry(module.clone()).or_default();
        for path in paths(&code(&fs::read_to_string(&file).unwrap())) {
            let target = resolve(&path, &from);
            let target = target[..target.len().min(2)].join("::");
            if LAYERS.iter().any(|layer| target.starts_with(layer)) && target != module {
                uses.insert(target);
            }
        }
    }
    graph
}

fn rank(module: &str) -> usize {
    let layer = module.split("::").next().unwrap_or_default();
    LAYERS.iter().position(|name| *name == layer).unwrap()
}

/// A path from `at` back to a module that is already on `path`.
fn cycle(
    graph: &Graph,
    at: &str,
    path: &mut Vec<String>,
    done: &mut BTreeSet<String>,
) -> Option<Vec<String>> {
    if let Some(begin) = path.iter().position(|module| module == at) {
        return Some([&path[begin..], &[at.to_owned()]].concat());
    }
    if !done.insert(at.to_owned()) {
        return None;
    }
    path.push(at.to_owned());
    let next = graph.get(at).into_iter().flatten();
    let found = next.into_iter().find_map(|module| cycle(graph, module, path, done));
    path.pop();
    found
}

fn find_cycle(graph: &Graph) -> Option<Vec<String>> {
    let mut done = BTreeSet::new();
    graph.keys().find_map(|module| cycle(graph, module, &mut Vec::new(), &mut done))
}

#[test]
fn no_layer_uses_one_above_it() {
    for (module, uses) in graph() {
        for used in uses {
            assert!(rank(&used) >= rank(&module), "{module} uses {used}, which is in a layer above it");
        }
    }
}

#[test]
fn no_modules_use_one_another_in_a_circle() {
    let found = find_cycle(&graph());
    assert!(found.is_none(), "a cycle of modules: {}", found.unwrap_or_default().join(" -> "));
}

#[test]
fn the_graph_is_read_as_it_is() {
    let graph = graph();
    assert!(graph["service::task"].contains("types::exit"), "{graph:?}");
    assert!(graph.len() > 30, "{graph:?}");
    let text = r#"
        use crate::{host::{journal::{self, Journal}, paths}, types::error::chain as shown};
        use super::frames; // crate::pod::no
        let x = crate::vm::start::prepare("crate::pod::no");
        #[cfg(test)]
mod tests { use crate::pod::no; }
    "#;
    let from = ["guest", "agent"].map(str::to_owned);
    let found = paths(&code(text)).iter().map(|path| resolve(path, &from).join("::")).collect::<Vec<_>>();
    let expected = [
        "host::journal",
        "host::journal::Journal",
        "host::paths",
        "types::error::chain",
        "vm::start::prepare",
        "guest::frames",
    ];
    assert_eq!(found, expected);
}

#[test]
fn a_cycle_is_named() {
    let of = |edges: &[(&str, &str)]| {
        let mut graph = Graph::new();
        for (from, to) in edges {
            graph.entry((*from).into()).or_default().insert((*to).into());
        }
        find_cycle(&graph).map(|path| path.join(" -> "))
    };
    assert_eq!(of(&[("a", "b"), ("b", "c"), ("a", "c")]), None);
    assert_eq!(of(&[("a", "b"), ("b", "c"), ("c", "b")]).as_deref(), Some("b -> c -> b"));
}
