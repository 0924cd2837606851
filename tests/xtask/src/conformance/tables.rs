//! What the page shows of other pages of docs/: how many fields are honoured, and the tables of measurements.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

/// The page with a row for each field.
const FIELDS: &str = "fields.md";
/// What becomes of a field there.
const STATES: [&str; 4] = ["honoured", "different", "refused", "client"];
/// Pages whose tables are repeated. Each must be there and have a table.
const MEASURED: [&str; 2] = ["processors.md", "memory-pressure.md"];
/// How the paragraph of such a page begins that says on what host it was measured.
const HOST: &str = "The host ";
/// The section of such a page that is left to it.
const SAMPLES: &str = "\n## All samples\n";

/// The sections about the pages in `docs`.
pub(super) fn sections(docs: &Path) -> Result<String> {
    let read = |page: &str| {
        let path = docs.join(page);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let mut sections = fields(&read(FIELDS)?)?;
    for page in MEASURED {
        sections.push('\n');
        sections += &measured(page, &read(page)?)?;
    }
    Ok(sections)
}

/// Counts the rows of each table of fields.
fn fields(page: &str) -> Result<String> {
    let mut tables: Vec<(&str, BTreeMap<&str, usize>)> = Vec::new();
    for line in page.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            tables.push((title, BTreeMap::new()));
        }
        let Some((_, counts)) = tables.last_mut().filter(|_| line.starts_with("| `")) else { continue };
        let state = line.split('|').nth(2).unwrap_or_default().trim();
        ensure!(STATES.contains(&state), "docs/{FIELDS} does not say what becomes of the field: {line}");
        *counts.entry(state).or_default() += 1;
    }
    ensure!(!tables.is_empty(), "docs/{FIELDS} has no table of fields");
    let mut section = format!(
        "## Fields\n\nHow many fields have the effect that they have on runc (*honoured*), another one (*different*), \
         or none, so that the request fails (*refused*). *Client*: containerd or docker does it without the runtime. \
         The refused fields of the OCI spec are mostly those of other operating systems (`windows`, `solaris`, \
         `zos`). [{FIELDS}]({FIELDS}) has a row for each field, with the difference or the reason, and a test.\n\n\
         | fields of | all | {} |\n|---|---|{}\n",
        STATES.join(" | "),
        "---|".repeat(STATES.len())
    );
    for (title, counts) in tables {
        let all: usize = counts.values().sum();
        ensure!(all > 0, "docs/{FIELDS} has no table of the fields of {title}");
        let cells = STATES.map(|state| counts.get(state).copied().unwrap_or(0).to_string());
        let _ = writeln!(section, "| {title} | {all} | {} |", cells.join(" | "));
    }
    Ok(section)
}

/// The tables of a page with their headings, and the host on which they were measured.
fn measured(name: &str, page: &str) -> Result<String> {
    let title = page.lines().next().and_then(|line| line.strip_prefix("# "));
    let Some(title) = title else { bail!("docs/{name} does not begin with a title") };
    let mut section = format!(
        "## {title}\n\nFrom [{name}]({name}), which says how this was measured, and what the rows and columns are.\n"
    );
    let mut heading = None;
    let mut tables = 0;
    let summary = page.split_once(SAMPLES).map_or(page, |(summary, _)| summary);
    for block in summary.split("\n\n").map(|block| block.trim_matches('\n')) {
        heading = block.strip_prefix("## ").or(heading);
        if block.starts_with(HOST) {
            let _ = write!(section, "\n{block}\n");
        } else if block.starts_with('|') {
            if let Some(heading) = heading.take() {
                let _ = write!(section, "\n### {heading}\n");
            }
            let _ = write!(section, "\n{block}\n");
            tables += 1;
        }
    }
    ensure!(tables > 0, "docs/{name} has no table: the command that it names writes it");
    Ok(section)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_counted_by_what_becomes_of_them() {
        let rows = "| `a` | honoured | x/y | none |\n| `b` | refused | x/y | why |\n| `c` | honoured | x/y | none |\n";
        let page = format!("# F\n\n- **honoured**: x\n\n## One\n\n| field | what |\n|---|---|\n{rows}");
        let section = fields(&page).unwrap();
        assert!(
            section.contains("| fields of | all | honoured | different | refused | client |\n"),
            "{section}"
        );
        assert!(section.ends_with("| One | 3 | 2 | 0 | 1 | 0 |\n"), "{section}");
        let said = |page: &str| fields(page).unwrap_err().to_string();
        assert!(said("# F\n").contains("no table"));
        assert!(said("## One\n\n").contains("no table of the fields of One"));
        assert!(said("## One\n\n| `a` | | x/y | |\n").contains("what becomes of the field: | `a`"));
    }

    #[test]
    fn tables_of_a_page_keep_their_headings_and_their_host() {
        let page = "# T\n\nWritten by hand.\n\nThe host had\ntwo.\n\n| a |\n|---|\n| 1 |\n\n\
                    ## None\n\n## Two\n\nWhy.\n\n| b |\n\n| c |\n\n## All samples\n\n| d |\n";
        let section = measured("t.md", page).unwrap();
        let (_, after) = section.split_once("columns are.\n").unwrap();
        assert_eq!(after, "\nThe host had\ntwo.\n\n| a |\n|---|\n| 1 |\n\n### Two\n\n| b |\n\n| c |\n");
        assert!(section.starts_with("## T\n\nFrom [t.md](t.md), "), "{section}");
        assert!(
            measured("t.md", "# T\n\nWords.\n").unwrap_err().to_string().contains("docs/t.md has no table")
        );
        assert!(measured("t.md", "| a |\n").is_err());
    }

    #[test]
    fn a_page_that_is_not_there_is_named() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FIELDS), "## One\n\n| `a` | honoured | x/y | none |\n").unwrap();
        let said = format!("{:#}", sections(dir.path()).unwrap_err());
        assert!(said.contains(MEASURED[0]), "{said}");
    }
}
