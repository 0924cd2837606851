//! Lines of sources and documents have at most 120 columns.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

const MOST_COLUMNS: usize = 120;

/// Files with this extension in the folder and in those below it, without what cargo builds.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap_or_default();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|it| it == extension) {
            found.push(path);
        }
    }
    found
}

/// The numbers of the lines that are too long and could be shorter.
fn long(text: &str, may_be_long: impl Fn(&str) -> bool) -> Vec<usize> {
    let is_long = |line: &str| line.chars().count() > MOST_COLUMNS && !may_be_long(line);
    (1..).zip(text.lines()).filter(|(_, line)| is_long(line)).map(|(number, _)| number).collect()
}

/// rustfmt does not break a line with a long text, such as a script.
fn is_code_with_text(line: &str) -> bool {
    line.contains('"') && !line.trim_start().starts_with("//")
}

/// A row of a table cannot be broken.
fn is_row(line: &str) -> bool {
    line.trim_start().starts_with('|')
}

/// Neither can a value of a configuration.
fn is_value(line: &str) -> bool {
    !line.trim_start().starts_with('#')
}

#[test]
fn lines_have_at_most_120_columns() {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = Vec::new();
    let mut look = |path: PathBuf, may_be_long: fn(&str) -> bool| {
        let text = fs::read_to_string(&path).unwrap();
        found.extend(long(&text, may_be_long).iter().map(|line| format!("{}:{line}", path.display())));
    };
    let sources: Vec<_> = ["guest-agent", "host-shim", "cli", "vmm", "tests"]
        .iter()
        .flat_map(|it| files(&project.join(it), "rs"))
        .collect();
    assert!(sources.len() > 300, "only {} sources were found", sources.len());
    sources.into_iter().for_each(|path| look(path, is_code_with_text));
    let docs = files(&project.join("docs"), "md");
    assert!(docs.len() >= 5, "only {} docs were found", docs.len());
    let others = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "kernel-config/README.md"];
    let others = others.into_iter().map(|name| project.join(name));
    docs.into_iter().chain(others).for_each(|path| look(path, is_row));
    for folder in ["contrib", "kernel-config"] {
        let settings = ["toml", "yaml", "config"].map(|extension| files(&project.join(folder), extension));
        settings.into_iter().flatten().for_each(|path| look(path, is_value));
    }
    assert!(found.is_empty(), "lines of more than {MOST_COLUMNS} columns: {found:#?}");
}

#[test]
fn comments_and_sentences_are_long_and_texts_and_tables_are_not() {
    let line = "x".repeat(MOST_COLUMNS);
    let text = format!("{line}\n// {line}\nlet a = \"{line}\";\n// \"{line}\"\n");
    assert_eq!(long(&text, is_code_with_text), [2, 4]);
    assert_eq!(long(&format!("é{line}\n| {line} |\n"), is_row), [1]);
}
