//! The modules of the agent depend on one another in one direction only. These tests read the crate's sources and follow
//! every path that begins with `crate`, `super` or `self` to the file that it names. They fail if these files form a
//! cycle, or import against the layers in docs/architecture.md. Code that is compiled for tests only does not count, and
//! neither does a declaration such as `mod child;`.

#![allow(clippy::unwrap_used)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// Which modules a module imports, by their paths in the crate: `container::exec`. The crate's root is `crate`.
type Imports = BTreeMap<String, BTreeSet<String>>;

fn imports_of_the_crate() -> Imports {
    let mut sources = BTreeMap::new();
    read_sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &[], &mut sources);
    let imports = imports(&sources);
    // The walk found something: the root imports the service, and the service the pod.
    assert!(imports["crate"].contains("server") && imports["server"].contains("sandbox"), "{imports:?}");
    imports
}

#[test]
fn modules_do_not_import_each_other_in_a_circle() {
    let cycles = cycles(&imports_of_the_crate());
    assert!(cycles.is_empty(), "these modules import each other in a circle:\n{}", cycles.join("\n"));
}

#[test]
fn modules_import_lower_layers_only() {
    let layers = layers();
    let top = |module: &str| module.split("::").next().unwrap().to_owned();
    let mut modules = BTreeSet::new();
    let mut upward = BTreeSet::new();
    for (module, imported) in imports_of_the_crate() {
        let from = top(&module);
        modules.insert(from.clone());
        for to in imported.iter().map(|to| top(to)).filter(|to| *to != from && to != "crate") {
            if layers.get(&from) >= layers.get(&to) {
                upward.insert(format!("  {module} imports {to}"));
            }
        }
    }
    assert_eq!(
        modules,
        layers.keys().cloned().collect(),
        "the layers in {ARCHITECTURE} are not those modules"
    );
    let upward: Vec<_> = upward.into_iter().collect();
    assert!(upward.is_empty(), "not to a lower layer of {ARCHITECTURE}:\n{}", upward.join("\n"));
}

const ARCHITECTURE: &str = "docs/architecture.md";

/// The top modules and the numbers of their layers, from the diagram in [`ARCHITECTURE`]: a line is a layer, and names its
/// modules before two spaces.
fn layers() -> BTreeMap<String, usize> {
    let text =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(ARCHITECTURE)).unwrap();
    let section = text.split("## The guest agent").nth(1).unwrap();
    let diagram = section.split("```").nth(1).unwrap();
    let lines = diagram.lines().skip(1).enumerate();
    let modules = lines.flat_map(|(number, line)| {
        let names = line.split("  ").next().unwrap().split(' ');
        names.map(move |name| (name.to_owned(), number))
    });
    modules.collect()
}

/// Reads every source file below `directory`, which is the module `parent`.
fn read_sources(directory: &Path, parent: &[String], sources: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            read_sources(&path, &[parent, &[name]].concat(), sources);
        } else if !["main", "tests"].contains(&name.as_str()) {
            let module = match name.as_str() {
                "lib" | "mod" => parent.to_vec(),
                _ => [parent, &[name]].concat(),
            };
            sources.insert(name_of(&module), fs::read_to_string(&path).unwrap());
        }
    }
}

fn name_of(module: &[String]) -> String {
    if module.is_empty() { "crate".to_owned() } else { module.join("::") }
}

fn imports(sources: &BTreeMap<String, String>) -> Imports {
    let imported = |module: &str, source: &str| {
        let here: Vec<String> = match module {
            "crate" => Vec::new(),
            module => module.split("::").map(str::to_owned).collect(),
        };
        let paths = paths(&without_tests(tokens(source)), &here);
        // The longest part of a path that is a module: what follows is an item of it.
        let module_of = |path: Vec<String>| {
            let prefixes = (0..=path.len()).rev().map(|length| name_of(&path[..length]));
            prefixes.into_iter().find(|prefix| sources.contains_key(prefix)).unwrap()
        };
        paths.into_iter().map(module_of).filter(|other| other != module).collect()
    };
    sources.iter().map(|(module, source)| (module.clone(), imported(module, source))).collect()
}

/// Words and punctuation of a source, `::` as one token, without comments and literals.
fn tokens(source: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if let Some(raw) = rest.strip_prefix("r#\"") {
            raw.find("\"#").unwrap() + 5
        } else if first == '"' {
            string_length(rest)
        } else if first == '\'' {
            character_length(rest)
        } else if first.is_alphanumeric() || first == '_' {
            let is_part = |c: char| c.is_alphanumeric() || c == '_';
            let length = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
            tokens.push(rest[..length].to_owned());
            length
        } else if rest.starts_with("::") {
            tokens.push("::".to_owned());
            2
        } else {
            if !first.is_whitespace() {
                tokens.push(first.to_string());
            }
            first.len_utf8()
        };
        rest = &rest[length..];
    }
    tokens
}

fn string_length(rest: &str) -> usize {
    let mut escaped = false;
    for (at, character) in rest.char_indices().skip(1) {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// A character literal, or the apostrophe of a lifetime.
fn character_length(rest: &str) -> usize {
    let mut characters = rest.char_indices().skip(1);
    match characters.next() {
        Some((_, '\\')) => {
            rest[2..].char_indices().skip(1).find(|(_, c)| *c == '\'').map_or(1, |(at, _)| at + 3)
        }
        Some((at, character)) if rest[at + character.len_utf8()..].starts_with('\'') => {
            at + character.len_utf8() + 1
        }
        _ => 1,
    }
}

/// Leaves out each item with `#[cfg(test)]`.
fn without_tests(tokens: Vec<String>) -> Vec<String> {
    const MARK: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        if !tokens[at..].iter().map(String::as_str).take(MARK.len()).eq(MARK) {
            kept.push(tokens[at].clone());
            at += 1;
            continue;
        }
        let mut depth = 0;
        loop {
            match tokens[at].as_str() {
                "{" => depth += 1,
                "}" => depth -= 1,
                _ => {}
            }
            at += 1;
            if depth == 0 && ["}", ";"].contains(&tokens[at - 1].as_str()) {
                break;
            }
        }
    }
    kept
}

/// The paths from the crate's root that a module names.
fn paths(tokens: &[String], here: &[String]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for at in 0..tokens.len().saturating_sub(1) {
        let begins = at == 0 || tokens[at - 1] != "::";
        if begins && tokens[at + 1] == "::" {
            let root = match tokens[at].as_str() {
                "crate" => Vec::new(),
                "self" => here.to_vec(),
                "super" => here[..here.len() - 1].to_vec(),
                _ => continue,
            };
            tree(&tokens[at + 2..], root, &mut found);
        }
    }
    found
}

/// Reads what follows a `::`: a path, or paths in braces. Returns how many tokens that was.
fn tree(tokens: &[String], mut path: Vec<String>, found: &mut Vec<Vec<String>>) -> usize {
    let mut at = 0;
    loop {
        match tokens[at].as_str() {
            "{" => {
                at += 1;
                while tokens[at] != "}" {
                    at += if tokens[at] == "," { 1 } else { tree(&tokens[at..], path.clone(), found) };
                }
                return at + 1;
            }
            "super" => drop(path.pop()),
            "self" => {}
            name => path.push(name.to_owned()),
        }
        at += 1;
        if tokens.get(at).is_none_or(|next| next != "::") {
            break;
        }
        at += 1;
    }
    found.push(path);
    // The other name in `use a::b as c`.
    if tokens.get(at).is_some_and(|next| next == "as") { at + 2 } else { at }
}

/// One line for each set of modules that can all be reached from each other.
fn cycles(imports: &Imports) -> Vec<String> {
    let reached: BTreeMap<_, _> = imports.keys().map(|from| (from, reached_from(from, imports))).collect();
    let mut found = BTreeSet::new();
    for (from, reached_from_it) in &reached {
        let circle: Vec<_> = reached_from_it.iter().filter(|to| reached[*to].contains(*from)).collect();
        if !circle.is_empty() {
            let edges = circle.iter().map(|module| {
                let others: Vec<_> = imports[*module].iter().filter(|to| circle.contains(to)).collect();
                format!("  {module} imports {others:?}")
            });
            found.insert(edges.collect::<Vec<_>>().join("\n"));
        }
    }
    found.into_iter().collect()
}

fn reached_from(from: &str, imports: &Imports) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut todo = vec![from.to_owned()];
    while let Some(module) = todo.pop() {
        for next in &imports[&module] {
            if reached.insert(next.clone()) {
                todo.push(next.clone());
            }
        }
    }
    reached
}

fn example(sources: &[(&str, &str)]) -> Vec<String> {
    let sources =
        sources.iter().map(|(module, source)| ((*module).to_owned(), (*source).to_owned())).collect();
    cycles(&imports(&sources))
}

#[test]
fn a_circle_is_found_and_named() {
    let cycles = example(&[
        ("crate", "mod a; mod b; use self::a::A;"),
        ("a", "use crate::{b::{self, c::C as D}};"),
        ("b", "pub(crate) mod c;"),
        ("b::c", "fn f() { let c = '\"'; super::super::a::g(\"//\") }"),
    ]);
    assert_eq!(cycles, ["  a imports [\"b::c\"]\n  b::c imports [\"a\"]"]);
}

#[test]
fn comments_literals_and_tests_are_no_imports() {
    let cycles = example(&[
        ("crate", "use self::a::A;"),
        (
            "a",
            "// crate::b::B\nconst TEXT: &str = \"crate::b::B\"; const RAW: &str = r#\"crate::b\"#;\n\
             #[cfg(test)] mod tests { use crate::b::B; fn f() {} }",
        ),
        ("b", "use crate::a::A; fn f<'a>(text: &'a str) -> char { '\\'' }"),
    ]);
    assert_eq!(cycles, [""; 0]);
}
