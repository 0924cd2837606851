//! The commands of a quick start, and what they have to print. A page is written so that it can be executed: each block
//! `sh` is a script, and a block `text` after it is its output, in which `...` stands for a part that differs.

use anyhow::{Result, ensure};

/// How the expected output writes a part that differs. A line that has nothing else stands for any number of lines.
const ANYTHING: &str = "...";

/// A script of a page.
#[derive(Debug, PartialEq)]
pub(super) struct Step {
    pub(super) script: String,
    /// What it has to print. None: the page does not say.
    expected: Option<String>,
}

impl Step {
    /// Fails if the script has printed something else, and shows both.
    pub(super) fn check(&self, output: &str) -> Result<()> {
        let Some(expected) = &self.expected else { return Ok(()) };
        ensure!(
            is_as_expected(expected, output),
            "`{}`\nexpected:\n{expected}\ncame:\n{output}",
            self.script.trim_end()
        );
        Ok(())
    }
}

/// The scripts of a page, in their order.
pub(super) fn steps(page: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        let Some(kind) = line.strip_prefix("```") else { continue };
        let block: String =
            lines.by_ref().take_while(|line| *line != "```").map(|line| format!("{line}\n")).collect();
        match (kind, steps.last_mut()) {
            ("sh", _) => steps.push(Step { script: block, expected: None }),
            ("text", Some(step)) => step.expected = Some(block),
            _ => {}
        }
    }
    steps
}

/// The first block of this kind in a page.
pub(super) fn block(page: &str, kind: &str) -> Option<String> {
    let mut lines = page.lines().skip_while(|line| line.strip_prefix("```") != Some(kind));
    lines.next()?;
    Some(lines.take_while(|line| *line != "```").map(|line| format!("{line}\n")).collect())
}

/// Whether each line of the output is as the page has it, in order. The width of columns does not count.
fn is_as_expected(expected: &str, output: &str) -> bool {
    are_as_expected(&words(expected), &words(output))
}

fn are_as_expected(expected: &[String], output: &[String]) -> bool {
    match expected {
        [] => output.is_empty(),
        [first, rest @ ..] if first == ANYTHING => {
            (0..=output.len()).any(|left_out| are_as_expected(rest, &output[left_out..]))
        }
        [first, rest @ ..] => match output {
            [line, others @ ..] => matches(first, line) && are_as_expected(rest, others),
            [] => false,
        },
    }
}

/// The lines, with one space between words.
fn words(text: &str) -> Vec<String> {
    text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// Whether a line has all literal parts of the pattern, in order, and nothing else where the pattern has no `...`. What
/// differs may be nothing, and then the spaces around it are one.
fn matches(pattern: &str, line: &str) -> bool {
    let mut parts = pattern.split(ANYTHING).map(str::trim);
    let Some(mut left) = parts.next().and_then(|first| line.strip_prefix(first)) else { return false };
    let mut parts = parts.peekable();
    let mut is_open = false;
    while let Some(part) = parts.next() {
        is_open = true;
        if parts.peek().is_none() {
            return left.ends_with(part);
        }
        let Some((_, rest)) = left.split_once(part) else { return false };
        left = rest;
    }
    is_open || left.is_empty()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::dist::source_dir;

    #[test]
    fn scripts_come_with_their_output() {
        let page =
            "# A\n```sh\nls\nid\n```\ntext\n```text\na ...\n```\n```toml\nx = 1\n```\n```sh\ntrue\n```\n";
        let step = |script: &str, expected: Option<&str>| Step {
            script: script.to_owned(),
            expected: expected.map(str::to_owned),
        };
        assert_eq!(steps(page), [step("ls\nid\n", Some("a ...\n")), step("true\n", None)]);
        assert_eq!(block(page, "toml").as_deref(), Some("x = 1\n"));
        assert_eq!(block(page, "yaml"), None);
    }

    #[test]
    fn only_what_the_page_leaves_open_may_differ() {
        for (expected, output, is_right) in [
            ("hello\n", "hello\n", true),
            ("hello\n", "hello, world\n", false),
            ("hello\n", "", false),
            ("6.12...-bulkhead\n", "6.12.95-bulkhead\n", true),
            ("6.12...-bulkhead\n", "6.12.95\n", false),
            ("ID   STATE ...\nx    running  1 ...\n", "ID  STATE    AGE\nx   running  1    2s\n", true),
            ("ID  STATE\n", "ID  STATE\nx   running\n", false),
            ("... STATE ... SIZE\n", "NAME STATE AGE SIZE\n", true),
            ("NAME ... STATE ... CLONES\n", "NAME  STATE  SIZE  CLONES\n", true),
            ("... SIZE ... STATE\n", "NAME STATE AGE SIZE\n", false),
            ("...\nb ...\n...\n", "a\na\nb 1\nc\n", true),
            ("...\nb\n...\n", "b\n", true),
            ("...\nb\n...\n", "a\nc\n", false),
            ("a\n...\n", "b\na\n", false),
            ("...\nb\n", "a\nb\nc\n", false),
        ] {
            assert_eq!(is_as_expected(expected, output), is_right, "{expected} {output}");
        }
    }

    #[test]
    #[allow(clippy::unwrap_used)]
    fn the_pages_have_scripts_and_outputs() {
        for page in ["containerd", "docker", "kubernetes"] {
            let path = source_dir().join(format!("docs/quickstart-{page}.md"));
            let steps = steps(&fs::read_to_string(path).unwrap());
            assert!(steps.len() > 5 && steps.iter().any(|step| step.expected.is_some()), "{page}: {steps:?}");
        }
    }
}
