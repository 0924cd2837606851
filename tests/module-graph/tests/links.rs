//! Links between the documents lead to files and headings that exist.

#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The lines of a document that are not in a block of code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut in_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        !in_code && !is_fence
    })
}

/// The name that GitHub gives to a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|it| it.is_alphanumeric() || matches!(it, ' ' | '-' | '_'));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

fn anchors(text: &str) -> HashSet<String> {
    let headings = prose(text).filter(|line| line.starts_with('#'));
    headings.map(|line| anchor(line.trim_start_matches('#'))).collect()
}

/// The targets of the links, which may be broken over lines, but for those to other places of the web.
fn targets(text: &str) -> Vec<String> {
    let text: Vec<_> = prose(text).collect();
    let text = text.join("\n");
    let ends = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    let targets = ends.map(|(target, _)| target.to_owned());
    targets.filter(|target| !target.starts_with("http://") && !target.starts_with("https://")).collect()
}

/// Why a link in the document `from` leads nowhere. None: it leads somewhere.
fn broken(from: &Path, target: &str) -> Option<String> {
    let (file, heading) = target.split_once('#').map_or((target, None), |(file, it)| (file, Some(it)));
    let path = if file.is_empty() { from.to_owned() } else { from.parent().unwrap().join(file) };
    if !path.exists() {
        return Some(format!("{}: {target}: there is no such file", from.display()));
    }
    let text = fs::read_to_string(&path).ok();
    let leads = heading.is_none_or(|heading| text.is_some_and(|text| anchors(&text).contains(heading)));
    (!leads).then(|| format!("{}: {target}: there is no such heading", from.display()))
}

/// The documents of a folder.
fn documents(folder: &Path) -> Vec<PathBuf> {
    let found = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    found.filter(|path| path.extension().is_some_and(|it| it == "md")).collect()
}

#[test]
fn links_lead_to_files_and_headings() {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folders = ["", "docs", "kernel-config"].map(|folder| project.join(folder));
    let pages: Vec<_> = folders.iter().flat_map(|folder| documents(folder)).collect();
    let links: Vec<_> = pages
        .iter()
        .flat_map(|page| targets(&fs::read_to_string(page).unwrap()).into_iter().map(move |it| (page, it)))
        .collect();
    assert!(links.len() > 200, "only {} links were found", links.len());
    let broken: Vec<_> = links.iter().filter_map(|(page, target)| broken(page, target)).collect();
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn a_heading_is_not_a_comment_in_code_and_its_name_has_no_signs() {
    let text = "# What `bulkhead` is, and why\n```sh\n# not this\n```\n## One_two 3-4\n";
    let expected = ["what-bulkhead-is-and-why", "one_two-3-4"].map(str::to_owned);
    assert_eq!(anchors(text), HashSet::from(expected));
    assert_eq!(targets("[a\nb](c.md#d), [e](https://f.org) and\n[g](#h)"), ["c.md#d", "#h"]);
}
