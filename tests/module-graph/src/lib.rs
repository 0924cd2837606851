//! Which modules of a crate use which, read from its sources. Tests of a crate's layers are made of it.
//!
//! A module is a file. It uses another one if a path in it names that module or an item of it. Re-exports are followed
//! to the module that defines the item, and are no use themselves. Code that is compiled for tests only does not count.

// Whatever goes wrong is the failure of a test.
#![allow(clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemMod, ItemUse, Macro, UseTree, Visibility};

/// For each module, by its path in the crate (`virtio::net`; the root is empty), the modules that it uses.
pub type Graph = BTreeMap<String, BTreeSet<String>>;

/// Names of modules that only tests use, and of the root of a program.
const NOT_PRODUCT: [&str; 3] = ["main", "tests", "testing"];

type Names = Vec<String>;

/// What the file of a module says.
#[derive(Default)]
struct Source {
    /// The paths that it names, from the root of the crate on.
    paths: Vec<Names>,
    /// The names under which it re-exports items, and their paths.
    exports: BTreeMap<String, Names>,
}

/// Reads the sources below `src`, except for the modules `without` and those in them.
///
/// # Panics
/// Panics if a file cannot be read or parsed: the test that wants to know has failed.
#[must_use]
pub fn of_crate(src: &Path, without: &[&str]) -> Graph {
    let mut files = Vec::new();
    list(src, &mut files);
    let mut texts = BTreeMap::new();
    for file in files {
        let relative = file.strip_prefix(src).expect("a file below src").with_extension("");
        let mut module: Names = relative.iter().map(|name| name.to_string_lossy().into_owned()).collect();
        if module.iter().any(|name| NOT_PRODUCT.contains(&name.as_str()) || without.contains(&name.as_str()))
        {
            continue;
        }
        module.pop_if(|name| name == "mod" || name == "lib");
        texts.insert(module, fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display())));
    }
    of_sources(&texts)
}

fn list(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap_or_else(|e| panic!("{}: {e}", directory.display())) {
        let path = entry.expect("an entry of a directory").path();
        if path.is_dir() {
            list(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

fn of_sources(texts: &BTreeMap<Names, String>) -> Graph {
    let parse = |(module, text): (&Names, &String)| {
        let file = syn::parse_file(text).unwrap_or_else(|e| panic!("{}: {e}", module.join("::")));
        let mut reader = Reader { here: module.clone(), modules: texts, source: Source::default() };
        reader.visit_file(&file);
        (module.clone(), reader.source)
    };
    let sources: BTreeMap<Names, Source> = texts.iter().map(parse).collect();
    let uses = |(module, source): (&Names, &Source)| {
        let used = source.paths.iter().map(|path| defined_in(&sources, path));
        (module.join("::"), used.filter(|used| used != module).map(|used| used.join("::")).collect())
    };
    sources.iter().map(uses).collect()
}

/// The module that `path` names, or that defines the item that it names.
fn defined_in(sources: &BTreeMap<Names, Source>, path: &[String]) -> Names {
    let mut module = Names::new();
    for (at, name) in path.iter().enumerate() {
        let child = [module.as_slice(), std::slice::from_ref(name)].concat();
        if sources.contains_key(&child) {
            module = child;
        } else if let Some(exported) = sources.get(&module).and_then(|source| source.exports.get(name)) {
            return defined_in(sources, &[exported, &path[at + 1..]].concat());
        } else {
            break;
        }
    }
    module
}

struct Reader<'a> {
    here: Names,
    modules: &'a BTreeMap<Names, String>,
    source: Source,
}

impl Reader<'_> {
    /// The path from the root of the crate on. None: it begins in another crate, or with an item of this module.
    fn absolute(&self, path: &[String]) -> Option<Names> {
        let mut absolute = match path.first()?.as_str() {
            "crate" => Names::new(),
            "self" | "super" => self.here.clone(),
            child => {
                let child = [self.here.as_slice(), &[child.to_owned()]].concat();
                self.modules.contains_key(&child).then(|| self.here.clone())?
            }
        };
        for name in path {
            match name.as_str() {
                "crate" | "self" => {}
                "super" => drop(absolute.pop()),
                name => absolute.push(name.to_owned()),
            }
        }
        Some(absolute)
    }

    fn add(&mut self, path: &[String]) {
        // One word is a name of this module's own, such as a variable.
        if path.len() > 1 {
            self.source.paths.extend(self.absolute(path));
        }
    }

    fn read_use(&mut self, tree: &UseTree, before: &[String], is_export: bool) {
        let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        let (path, name) = match tree {
            UseTree::Path(tree) => return self.read_use(&tree.tree, &with(&tree.ident), is_export),
            UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.read_use(tree, before, is_export));
            }
            UseTree::Glob(_) => (before.to_vec(), None),
            UseTree::Name(tree) => (with(&tree.ident), Some(tree.ident.to_string())),
            UseTree::Rename(tree) => (with(&tree.ident), Some(tree.rename.to_string())),
        };
        match (self.absolute(&path), name) {
            (Some(path), Some(name)) if is_export => drop(self.source.exports.insert(name, path)),
            (path, _) => self.source.paths.extend(path),
        }
    }

    /// Reads the paths in the arguments of a macro.
    fn read_tokens(&mut self, tokens: TokenStream) {
        let mut path = Names::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    if colons != 2 {
                        self.add(&std::mem::take(&mut path));
                    }
                    path.push(name.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                other => {
                    self.add(&std::mem::take(&mut path));
                    if let TokenTree::Group(group) = other {
                        self.read_tokens(group.stream());
                    }
                    colons = 0;
                }
            }
        }
        self.add(&path);
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if !is_for_tests(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        if !is_for_tests(&function.attrs) {
            visit::visit_impl_item_fn(self, function);
        }
    }

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        self.here.push(module.ident.to_string());
        visit::visit_item_mod(self, module);
        self.here.pop();
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        self.read_use(&item.tree, &[], !matches!(item.vis, Visibility::Inherited));
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            let names: Names = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.add(&names);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'ast Macro) {
        self.visit_path(&called.path);
        self.read_tokens(called.tokens.clone());
    }
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    let is_test = |attribute: &Attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Ident>().is_ok_and(|argument| argument == "test")
    };
    attributes.iter().any(is_test)
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// The graph of modules that are named by the first `depth` names of their paths: what is in a folder is one module
/// then.
#[must_use]
pub fn folded(graph: &Graph, depth: usize) -> Graph {
    let fold = |module: &String| module.split("::").take(depth).collect::<Vec<_>>().join("::");
    let mut folded = Graph::new();
    for (module, used) in graph {
        let module = fold(module);
        let used: Vec<_> = used.iter().map(fold).filter(|used| *used != module).collect();
        folded.entry(module).or_default().extend(used);
    }
    folded
}

/// The modules of a cycle, each of which uses the next; the first one is also the last. None if there is no cycle.
#[must_use]
pub fn cycle(graph: &Graph) -> Option<Vec<String>> {
    let mut done = BTreeSet::new();
    graph.keys().find_map(|module| cycle_from(graph, module, &mut Vec::new(), &mut done))
}

fn cycle_from(graph: &Graph, module: &str, path: &mut Names, done: &mut BTreeSet<String>) -> Option<Names> {
    if let Some(start) = path.iter().position(|visited| visited == module) {
        return Some([&path[start..], &[module.to_owned()]].concat());
    }
    if !done.insert(module.to_owned()) {
        return None;
    }
    path.push(module.to_owned());
    let found = graph.get(module).into_iter().flatten().find_map(|used| cycle_from(graph, used, path, done));
    path.pop();
    found
}

/// The uses that do not go down, `MODULE uses MODULE` each. `layers` are the modules of each layer, from the top to the
/// bottom. With `within`, a module may also use others of its own layer.
///
/// # Panics
/// Panics if a module is in no layer.
#[must_use]
pub fn upward(graph: &Graph, layers: &[Vec<String>], within: bool) -> Vec<String> {
    let layer = |module: &String| {
        let found = layers.iter().position(|names| names.contains(module));
        found.unwrap_or_else(|| panic!("the module {module:?} is in no layer"))
    };
    let mut found = Vec::new();
    for (module, used) in graph {
        for used in used {
            let is_down = layer(used) > layer(module) || within && layer(used) == layer(module);
            if !is_down {
                found.push(format!("{module} uses {used}"));
            }
        }
    }
    found
}

/// The transitive reduction of a graph without cycles.
#[must_use]
pub fn reduced(graph: &Graph) -> Graph {
    let reduce = |(module, used): (&String, &BTreeSet<String>)| {
        let needed = |name: &&String| !used.iter().any(|other| other != *name && reaches(graph, other, name));
        (module.clone(), used.iter().filter(needed).cloned().collect())
    };
    graph.iter().map(reduce).collect()
}

fn reaches(graph: &Graph, from: &str, to: &str) -> bool {
    let mut seen = BTreeSet::new();
    let mut next = vec![from];
    while let Some(module) = next.pop() {
        for used in graph.get(module).into_iter().flatten() {
            if used == to {
                return true;
            }
            if seen.insert(used) {
                next.push(used);
            }
        }
    }
    false
}

/// A flowchart in the language of mermaid: each layer is a box with its modules, and an arrow goes from each module to
/// the ones that it uses.
#[must_use]
pub fn flowchart(graph: &Graph, layers: &[Vec<String>]) -> String {
    let mut lines = vec!["flowchart TB".to_owned()];
    for (number, layer) in layers.iter().enumerate() {
        match layer.as_slice() {
            [module] => lines.push(format!("    {module}")),
            modules => {
                lines.push(format!("    subgraph layer{} [\" \"]", number + 1));
                lines.extend(modules.iter().map(|module| format!("        {module}")));
                lines.push("    end".to_owned());
            }
        }
    }
    for module in layers.iter().flatten() {
        let used: Vec<_> = graph.get(module).into_iter().flatten().map(String::as_str).collect();
        if !used.is_empty() {
            lines.push(format!("    {module} --> {}", used.join(" & ")));
        }
    }
    lines.push(String::new());
    lines.join("\n")
}

/// The number of the lines of a source without its tests, which are its end.
#[must_use]
pub fn lines_without_tests(text: &str) -> usize {
    let lines: Vec<_> = text.lines().collect();
    let is_tests = |pair: &[&str]| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod tests {");
    lines.windows(2).position(is_tests).unwrap_or(lines.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(sources: &[(&str, &str)]) -> Graph {
        let module =
            |name: &str| name.split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect();
        of_sources(&sources.iter().map(|(name, text)| (module(name), (*text).to_owned())).collect())
    }

    fn uses<'a>(graph: &'a Graph, module: &str) -> Vec<&'a str> {
        graph[module].iter().map(String::as_str).collect()
    }

    #[test]
    fn paths_in_uses_code_and_macros_are_found_and_re_exports_are_followed() {
        let graph = graph(&[
            ("", "pub mod a; mod c; mod d; pub use a::b::Item; use std::fs;"),
            ("a", "pub mod b; pub(crate) use self::b::Item as Other; fn f() { b::g() }"),
            ("a::b", "use crate::{c::{self, C}, d::D as E}; pub struct Item;"),
            ("c", "use crate::a::Other; fn f() { println!(\"{}\", crate::d::D::new(1)) }"),
            ("d", "pub struct D; fn f() -> crate::Item { super::c::f() } mod inner { use super::super::a; }"),
        ]);
        assert_eq!(uses(&graph, ""), [""; 0], "a re-export is no use");
        assert_eq!(uses(&graph, "a"), ["a::b"]);
        assert_eq!(uses(&graph, "a::b"), ["c", "d"]);
        assert_eq!(uses(&graph, "c"), ["a::b", "d"]);
        assert_eq!(uses(&graph, "d"), ["a", "a::b", "c"]);
        assert_eq!(uses(&folded(&graph, 1), "c"), ["a", "d"]);
    }

    #[test]
    fn comments_text_and_tests_are_no_uses() {
        let graph = graph(&[
            (
                "a",
                "// crate::b::B\nconst T: &str = \"crate::b::B\"; #[cfg(test)] mod tests { use crate::b::B; }",
            ),
            ("b", "#[cfg(test)] use crate::a::A; struct B; impl B { #[cfg(test)] fn f() { crate::a::f() } }"),
        ]);
        assert_eq!((uses(&graph, "a"), uses(&graph, "b")), (vec![], vec![]));
    }

    #[test]
    fn a_cycle_and_a_use_that_goes_up_are_named() {
        let graph = graph(&[("a", "use crate::b::B;"), ("b", "use crate::c::C;"), ("c", "use crate::b::B;")]);
        assert_eq!(cycle(&graph).unwrap(), ["b", "c", "b"]);
        let layers = ["a", "b", "c"].map(|name| vec![name.to_owned()]);
        assert_eq!(upward(&graph, &layers, false), ["c uses b"]);
        let layers = [vec!["a".to_owned()], vec!["b".to_owned(), "c".to_owned()]];
        assert_eq!(upward(&graph, &layers, true), [""; 0]);
        assert_eq!(upward(&graph, &layers, false), ["b uses c", "c uses b"]);
    }

    #[test]
    fn a_flowchart_shows_no_use_that_goes_without_saying() {
        let graph = graph(&[
            ("a", "use crate::{b::B, c::C, d::D};"),
            ("b", "use crate::d::D;"),
            ("c", ""),
            ("d", "use crate::e::E;"),
            ("e", ""),
        ]);
        let layers = ["a", "b c", "d", "e"].map(|layer| layer.split(' ').map(str::to_owned).collect());
        let expected = "flowchart TB\n    a\n    subgraph layer2 [\" \"]\n        b\n        c\n    end\n    d\n    e\n    \
                        a --> b & c\n    b --> d\n    d --> e\n";
        assert_eq!(flowchart(&reduced(&graph), &layers), expected);
    }

    #[test]
    fn tests_at_the_end_are_not_counted() {
        assert_eq!(lines_without_tests("a\nb\n#[cfg(test)]\nmod tests {\n}\n"), 2);
        assert_eq!(lines_without_tests("a\n#[cfg(test)]\nmod tests;\nb\n"), 4);
    }
}
