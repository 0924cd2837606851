//! The commit that the programs are built from, which they say with their version.

use std::env;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The variable by which the programs get it when they are compiled.
pub(crate) const VARIABLE: &str = "BULKHEAD_COMMIT";

/// What they say if it is not known.
const UNKNOWN: &str = "unknown";

/// The commit of the source tree: that of the variable, if it is set, as for a build from an archive, or else git's.
pub(crate) fn of_tree(root: &Path) -> String {
    let set = env::var(VARIABLE).ok().filter(|commit| !commit.is_empty());
    set.unwrap_or_else(|| match by_git(root) {
        Ok(commit) => commit.unwrap_or_else(|| UNKNOWN.into()),
        Err(error) => {
            eprintln!("xtask: the programs will not say which commit they were built from: {error:#}");
            UNKNOWN.into()
        }
    })
}

/// The commit that is checked out, with `-dirty` if a file of it was changed. None: the tree is no clone.
fn by_git(root: &Path) -> Result<Option<String>> {
    // Git would find a clone in a directory above too.
    if !root.join(".git").exists() {
        return Ok(None);
    }
    let commit = git(root, &["rev-parse", "--verify", "HEAD"])?;
    // What is not in the clone is most likely not in the programs.
    let changed = git(root, &["status", "--porcelain", "--untracked-files=no"])?;
    let dirty = if changed.is_empty() { "" } else { "-dirty" };
    Ok(Some(format!("{commit}{dirty}")))
}

fn git(root: &Path, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("git");
    command.current_dir(root).args(arguments).stdin(Stdio::null());
    let output = command.output().context("cannot run git")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let first = said.lines().next().unwrap_or("it gave no reason");
        bail!("git {}: {first}", arguments.join(" "));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_tree_without_git_has_no_commit_and_one_that_git_refuses_has_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(by_git(dir.path()).unwrap(), None);
        fs::write(dir.path().join(".git"), "gitdir: /nonexistent\n").unwrap();
        let error = format!("{:#}", by_git(dir.path()).unwrap_err());
        assert!(error.starts_with("git rev-parse --verify HEAD: fatal: "), "{error}");
    }

    #[test]
    fn a_clone_has_its_commit_and_says_if_it_was_changed() {
        let dir = tempfile::tempdir().unwrap();
        let git = |arguments: &[&str]| git(dir.path(), arguments).unwrap();
        git(&["init", "--quiet"]);
        fs::write(dir.path().join("file"), "1\n").unwrap();
        git(&["add", "file"]);
        let name = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"];
        git(&[&name[..], &["commit", "--quiet", "--message", "A"]].concat());
        let commit = by_git(dir.path()).unwrap().unwrap();
        assert!(commit.len() >= 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit()), "{commit}");
        fs::write(dir.path().join("other"), "").unwrap();
        assert_eq!(by_git(dir.path()).unwrap().as_ref(), Some(&commit));
        fs::write(dir.path().join("file"), "2\n").unwrap();
        assert_eq!(by_git(dir.path()).unwrap(), Some(format!("{commit}-dirty")));
    }
}
