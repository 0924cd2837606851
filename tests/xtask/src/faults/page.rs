//! docs/reliability.md: a section for each part.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::Result;

/// What the page says before its sections.
const HEAD: &str = "\
# Reliability

Written by `cargo xtask faults`, not by hand. `cargo xtask faults PART` renews the section of one part.

A container is created, started, joined by an exec, killed and deleted through containerd's API. Meanwhile something
goes wrong, at one moment. For each fault the run expects that:

- each request ends within 90 seconds (four times as long where the host is emulated), but Create within 200 seconds:
  the shim waits 180 seconds for a VM that starts;
- a request that fails says why;
- the exit status of each process is right: 137 of the one that was killed, 3 of the exec, or 137 if the pod ended
  first;
- the container can be removed when the fault is over;
- the host is as before: processes, mounts, links, cgroups, sockets, files of /run and /tmp, bundles, leases;
- a container beside it goes on, and its shim, its VMM and containerd have no more descriptors than before.

The columns on the right of a table say how many of the faults a client did not notice, and which request was the first
to fail because of the others.
";

/// The faults of a part.
#[derive(Debug, Default)]
pub(super) struct Section {
    kinds: BTreeMap<(String, String), Kind>,
    /// What each survivor used before and after.
    survivors: Vec<Vec<String>>,
}

/// The faults of a kind.
#[derive(Debug, Default)]
struct Kind {
    unnoticed: usize,
    /// By the request that failed first.
    noticed: BTreeMap<String, usize>,
    failures: Vec<String>,
}

impl Kind {
    fn as_expected(&self) -> usize {
        self.unnoticed + self.noticed.values().sum::<usize>()
    }
}

impl Section {
    /// Reads the lines `fault | WHAT | EFFECT | MOMENT | MESSAGES`, `failure | ...` of the same form, and
    /// `survivor | NAME | DESCRIPTORS | MEMORY`.
    pub(super) fn read(output: &str) -> Self {
        let mut section = Self::default();
        for line in output.lines() {
            let fields: Vec<_> = line.splitn(5, " | ").collect();
            if let ["survivor", values @ ..] = fields.as_slice() {
                section.survivors.push(values.iter().map(|value| (*value).to_owned()).collect());
            }
            let [outcome @ ("fault" | "failure"), what, effect, moment, said] = fields[..] else { continue };
            let kind = section.kinds.entry((what.to_owned(), effect.to_owned())).or_default();
            match said.trim() {
                said if outcome == "failure" => {
                    kind.failures.push(format!("{what}, {effect}, {moment}: {said}"));
                }
                "" => kind.unnoticed += 1,
                said => {
                    let request = said.split(':').next().unwrap_or_default();
                    *kind.noticed.entry(request.to_owned()).or_default() += 1;
                }
            }
        }
        section
    }

    pub(super) fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// What the page says of them. `run`: of which commit, and when.
    pub(super) fn text(&self, run: &str) -> Result<String> {
        let as_expected: usize = self.kinds.values().map(Kind::as_expected).sum();
        let failures: Vec<_> = self.kinds.values().flat_map(|kind| &kind.failures).collect();
        let mut text = format!("{run}: {as_expected}{AS_EXPECTED}{}{NOT}\n\n", failures.len());
        text.push_str(
            "| what | effect | faults | not noticed | first request that failed |\n|---|---|---|---|---|\n",
        );
        for ((what, effect), kind) in &self.kinds {
            let noticed: Vec<_> =
                kind.noticed.iter().map(|(request, count)| format!("`{request}` {count}")).collect();
            let (faults, noticed) = (kind.as_expected() + kind.failures.len(), noticed.join(", "));
            writeln!(text, "| `{what}` | {effect} | {faults} | {} | {noticed} |", kind.unnoticed)?;
        }
        for failure in failures {
            write!(text, "\nNot as expected: {failure}\n")?;
        }
        if !self.survivors.is_empty() {
            text.push_str("\n| survivor | before and after all faults | anonymous memory |\n|---|---|---|\n");
            for survivor in &self.survivors {
                writeln!(text, "| {} |", survivor.join(" | "))?;
            }
        }
        Ok(text)
    }
}

/// What a section's first line says between and after its two numbers.
const AS_EXPECTED: &str = " faults as expected, ";
const NOT: &str = " not.";

/// The numbers of faults that a section names: as expected, and not.
fn counted(section: &str) -> Option<(usize, usize)> {
    let line = section.lines().find(|line| line.contains(AS_EXPECTED))?;
    let (before, after) = line.split_once(AS_EXPECTED)?;
    let as_expected = before.rsplit(' ').next()?.parse().ok()?;
    Some((as_expected, after.strip_suffix(NOT)?.parse().ok()?))
}

/// The page with a new text of the section `title`, and with all other sections of `titles` that it has already.
pub(super) fn with_section(before: &str, titles: &[&str], title: &str, text: &str) -> String {
    let old: BTreeMap<&str, &str> =
        before.split("\n## ").skip(1).filter_map(|section| section.split_once("\n\n")).collect();
    let sections: Vec<(&str, &str)> = titles
        .iter()
        .filter_map(|name| Some((*name, if *name == title { text } else { old.get(name)? })))
        .collect();
    let counts: Vec<_> = sections.iter().filter_map(|(_, text)| counted(text)).collect();
    let (good, bad) = counts.iter().fold((0, 0), |sum, count| (sum.0 + count.0, sum.1 + count.1));
    let mut page = format!(
        "{HEAD}\n**{} of {} parts have run: {good} faults as expected, {bad} not.** (The part \"Many containers\" \
         counts its own.)\n",
        sections.len(),
        titles.len()
    );
    for (name, text) in sections {
        page.push_str(&format!("\n## {name}\n\n{}\n", text.trim_end()));
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "building\nfault | mkdir | ENOSPC | call 1 | Create: no space\n\
                          fault | mkdir | ENOSPC | call 2 | \nfault | mkdir | ENOSPC | call 3 | Create: a | b\n\
                          failure | mkdir | ENOSPC | call 4 | expected  x came y\n\
                          survivor | shim | 5 -> 5 descriptors | 900 -> 904 KiB\n";

    #[test]
    fn faults_are_counted_by_what_the_client_noticed() {
        let text = Section::read(OUTPUT).text("Commit abc").unwrap();
        assert!(text.contains("Commit abc: 3 faults as expected, 1 not."), "{text}");
        assert!(text.contains("| `mkdir` | ENOSPC | 4 | 1 | `Create` 2 |"), "{text}");
        assert!(text.contains("Not as expected: mkdir, ENOSPC, call 4: expected  x came y"), "{text}");
        assert!(text.contains("| shim | 5 -> 5 descriptors | 900 -> 904 KiB |"), "{text}");
    }

    #[test]
    fn a_section_is_replaced_and_the_others_stay() {
        let titles = ["One", "Two", "Three"];
        let text = Section::read(OUTPUT).text("Commit abc").unwrap();
        let page = with_section("", &titles, "Two", &text);
        let page = with_section(&page, &titles, "One", "Commit abc: 7 faults as expected, 0 not.\n");
        let page = with_section(&page, &titles, "One", "Commit def: 8 faults as expected, 0 not.\n");
        assert!(page.contains("**2 of 3 parts have run: 11 faults as expected, 1 not.**"), "{page}");
        assert!(page.find("## One\n\nCommit def").unwrap() < page.find("## Two\n\nCommit abc").unwrap());
        assert!(!page.contains("7 faults") && !page.contains("## Three"), "{page}");
        assert_eq!(with_section(&page, &titles, "Two", &text), page);
    }
}
