//! A test that reads the sources of this crate: no module may depend on itself through others.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// The modules of the crate, by their paths from the root, such as `virtio::net`. The root is the empty path.
type Modules = BTreeMap<String, Source>;

/// What a module's file says.
struct Source {
    /// The paths that it names: those of its `use` declarations, and those in its code that begin with `crate`,
    /// `super` or the name of one of its child modules.
    paths: Vec<Vec<String>>,
    /// What it re-exports: the name, and the path of the item.
    exports: BTreeMap<String, Vec<String>>,
}

/// Reads all files below `dir`, except for tests.
fn modules(dir: &Path) -> Modules {
    let mut files = Vec::new();
    list(dir, &mut files);
    let names: Vec<(PathBuf, String)> = files
        .into_iter()
        .filter_map(|file| {
            let path = file.strip_prefix(dir).unwrap().with_extension("");
            let mut parts: Vec<_> = path.iter().map(|part| part.to_str().unwrap()).collect();
            match parts.last() {
                Some(&("tests" | "testing" | "main" | "module_graph")) => return None,
                Some(&("mod" | "lib")) => drop(parts.pop()),
                _ => {}
            }
            Some((file, parts.join("::")))
        })
        .collect();
    let all: BTreeSet<String> = names.iter().map(|(_, name)| name.clone()).collect();
    let read = |(file, name): &(PathBuf, String)| {
        (name.clone(), Source::parse(&fs::read_to_string(file).unwrap(), name, &all))
    };
    names.iter().map(read).collect()
}

fn list(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            list(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

impl Source {
    /// Parses the file of the module `name`. `all` are the names of all modules.
    fn parse(text: &str, name: &str, all: &BTreeSet<String>) -> Self {
        let text = code(text);
        let is_child = |word: &str| all.contains(&join(name, word));
        let mut source = Self { paths: Vec::new(), exports: BTreeMap::new() };
        let mut rest = String::new();
        // `use` declarations end with a semicolon and contain none.
        for statement in text.split_inclusive(';') {
            let Some(start) = statement.find("use ").filter(|at| is_declaration(&statement[..*at])) else {
                rest.push_str(statement);
                continue;
            };
            rest.push_str(&statement[..start]);
            let is_export = statement[..start].trim_end().ends_with(['b', ')']);
            for path in expand(&tokens(statement[start + 4..].trim_end_matches(';'))) {
                let (path, exported) = match path.iter().position(|word| word == "as") {
                    Some(at) => (path[..at].to_vec(), path.last().cloned()),
                    None => (path.clone(), path.last().cloned()),
                };
                let is_own = matches!(path[0].as_str(), "crate" | "super" | "self") || is_child(&path[0]);
                match exported {
                    _ if !is_own => {}
                    Some(exported) if is_export => drop(source.exports.insert(exported, path)),
                    _ => source.paths.push(path),
                }
            }
        }
        let words = tokens(&rest);
        for (at, word) in words.iter().enumerate() {
            let begins = at == 0 || words[at - 1] != "::";
            if begins
                && words.get(at + 1).is_some_and(|next| next == "::")
                && (word == "crate" || word == "super" || is_child(word))
            {
                let path = words[at..].chunks(2);
                let path =
                    path.take_while(|pair| pair.len() == 2 && pair[1] == "::").map(|pair| pair[0].clone());
                let mut path: Vec<_> = path.collect();
                path.extend(words.get(at + 2 * path.len()).cloned());
                source.paths.push(path);
            }
        }
        source
    }
}

/// Whether what precedes the word `use` is the end of another statement, or attributes and a visibility.
fn is_declaration(before: &str) -> bool {
    let before = before.trim_end();
    let before = before.strip_suffix("pub(crate)").or(before.strip_suffix("pub(super)")).unwrap_or(before);
    let before = before.strip_suffix("pub").unwrap_or(before).trim_end();
    before.is_empty() || before.ends_with([';', '}', '{', ']'])
}

/// The code without comments, string literals and the tests at the end.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let text = text.split("#[cfg(test)]\n#[allow(unsafe_code)]\nmod tests").next().unwrap_or_default();
    let mut code = String::new();
    for line in text.lines() {
        let line = line.split("//").next().unwrap_or_default();
        for (at, part) in line.split('"').enumerate() {
            code.push_str(if at % 2 == 0 { part } else { " " });
        }
        code.push('\n');
    }
    code
}

/// Splits code into words, `::`, and single characters.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens: Vec<String> = Vec::new();
    let mut continues = false;
    for (at, letter) in text.char_indices() {
        let is_word = letter.is_alphanumeric() || letter == '_';
        if is_word && continues {
            tokens.last_mut().unwrap().push(letter);
        } else if text[at..].starts_with("::") {
            tokens.push("::".to_owned());
        } else if !(letter.is_whitespace() || letter == ':' && text[..at].ends_with(':')) {
            tokens.push(letter.to_string());
        }
        continues = is_word;
    }
    tokens
}

/// The paths of a tree of a `use` declaration.
fn expand(tokens: &[String]) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    let mut prefixes: Vec<Vec<String>> = vec![Vec::new()];
    let mut path: Vec<String> = Vec::new();
    for token in tokens {
        match token.as_str() {
            "::" => {}
            "{" => prefixes.push(path.clone()),
            "," | "}" => {
                let prefix = prefixes.last().unwrap().clone();
                if path.len() > prefix.len() {
                    paths.push(path.clone());
                }
                path = prefix;
                if token == "}" {
                    prefixes.pop();
                    // The tree inside the braces is complete: what precedes it is no path of its own.
                    path = prefixes.last().unwrap().clone();
                }
            }
            word => path.push(word.to_owned()),
        }
    }
    if path.len() > prefixes.last().unwrap().len() {
        paths.push(path);
    }
    // `a::{self, b}` names `a` and `a::b`.
    for path in &mut paths {
        if path.len() > 1 && path.last().is_some_and(|word| word == "self") {
            path.pop();
        }
    }
    paths
}

fn join(module: &str, child: &str) -> String {
    if module.is_empty() { child.to_owned() } else { format!("{module}::{child}") }
}

/// The module that defines the item, or is the module, that `path` names in the module `from`. Re-exports are followed.
fn resolve(modules: &Modules, from: &str, path: &[String]) -> Option<String> {
    let mut module = from.to_owned();
    let mut words = path.iter().peekable();
    match words.peek()?.as_str() {
        "crate" => {
            module = String::new();
            words.next();
        }
        "self" => drop(words.next()),
        _ => {}
    }
    while words.next_if(|word| *word == "super").is_some() {
        module = module.rsplit_once("::").map_or(String::new(), |(parent, _)| parent.to_owned());
    }
    while let Some(word) = words.next() {
        let child = join(&module, word);
        if modules.contains_key(&child) {
            module = child;
        } else {
            // An item: the module defines it, or re-exports it.
            let Some(exported) = modules.get(&module)?.exports.get(word) else { break };
            let exported: Vec<_> = exported.iter().chain(words).cloned().collect();
            return resolve(modules, &module, &exported);
        }
    }
    Some(module)
}

/// The dependencies of each module.
fn graph(modules: &Modules) -> BTreeMap<&str, BTreeSet<String>> {
    let dependencies = |(name, source): (&String, &Source)| {
        let mut found = BTreeSet::new();
        for path in &source.paths {
            found.extend(resolve(modules, name, path).filter(|module| module != name));
        }
        found
    };
    modules.iter().map(|entry| (entry.0.as_str(), dependencies(entry))).collect()
}

/// The modules of a cycle in the order of their dependencies.
fn cycle<'g>(graph: &'g BTreeMap<&str, BTreeSet<String>>) -> Option<Vec<&'g str>> {
    fn visit<'g>(
        graph: &'g BTreeMap<&str, BTreeSet<String>>,
        module: &'g str,
        path: &mut Vec<&'g str>,
        done: &mut BTreeSet<&'g str>,
    ) -> Option<Vec<&'g str>> {
        if let Some(start) = path.iter().position(|visited| *visited == module) {
            return Some([&path[start..], &[module]].concat());
        }
        if !done.contains(module) {
            path.push(module);
            for next in graph.get(module).into_iter().flatten() {
                if let Some(found) = visit(graph, next, path, done) {
                    return Some(found);
                }
            }
            path.pop();
            done.insert(module);
        }
        None
    }
    let mut done = BTreeSet::new();
    graph.keys().find_map(|module| visit(graph, module, &mut Vec::new(), &mut done))
}

#[test]
fn no_module_depends_on_itself() {
    let modules = modules(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    let graph = graph(&modules);
    assert!(
        graph.values().map(BTreeSet::len).sum::<usize>() > 100,
        "the sources are not understood: {graph:?}"
    );
    if let Some(cycle) = cycle(&graph) {
        panic!("modules import one another in a cycle: {}", cycle.join(" -> "));
    }
}

#[test]
fn a_cycle_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let files = [
        ("lib.rs", "pub mod a;\nmod c;\npub use a::b::Item;\nuse std::fs;\n"),
        ("a/mod.rs", "pub mod b;\npub(crate) use self::b::Item as Other;\nfn f() { b::g() }\n"),
        ("a/b.rs", "use crate::{\n    c::{self, C},\n};\npub struct Item; // crate::a::f\n"),
        ("c.rs", "use crate::a::Other;\n#[cfg(test)]\nmod tests {\n    use crate::a::f;\n}\n"),
    ];
    fs::create_dir(dir.path().join("a")).unwrap();
    for (name, text) in files {
        fs::write(dir.path().join(name), text).unwrap();
    }
    let modules = modules(dir.path());
    let graph = graph(&modules);
    let dependencies = |module: &str| graph[module].iter().map(String::as_str).collect::<Vec<_>>();
    assert_eq!(dependencies("a"), ["a::b"]);
    assert_eq!(dependencies("a::b"), ["c"]);
    assert_eq!(dependencies("c"), ["a::b"], "re-exports are followed to the module that defines the item");
    assert_eq!(dependencies(""), [""; 0], "a re-export is no dependency");
    assert_eq!(cycle(&graph).unwrap(), ["a::b", "c", "a::b"]);
}
