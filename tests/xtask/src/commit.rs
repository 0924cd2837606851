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

/// What git gives to its hooks, and what makes it use another repository than that of its directory.
const OF_REPOSITORY: [&str; 5] =
    ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"];

fn git(root: &Path, arguments: &[&str]) -> Result<String> {
    run(&mut command(root), arguments)
}

/// A git that knows of no other repository than that of `root`.
fn command(root: &Path) -> Command {
    let mut command = Command::new("git");
    command.current_dir(root).stdin(Stdio::null());
    for variable in OF_REPOSITORY {
        command.env_remove(variable);
    }
    command
}

fn run(command: &mut Command, arguments: &[&str]) -> Result<String> {
    command.args(arguments);
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
        // The hooks of the user who runs this test must not run in it.
        let git = |arguments: &[&str]| {
            run(command(dir.path()).env("GIT_CONFIG_GLOBAL", "/dev/null"), arguments).unwrap()
        };
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

    /// As in a hook of git, which gets these variables.
    #[test]
    fn another_repository_is_not_used() {
        // A test must not change the environment that it shares with others, so another process has it.
        let there = tempfile::tempdir().unwrap();
        let name = "commit::tests::a_clone_has_its_commit_and_says_if_it_was_changed";
        let mut test = Command::new(env::current_exe().unwrap());
        test.args(["--exact", name]).env("GIT_DIR", there.path().join("git")).stdin(Stdio::null());
        let output = test.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
        assert_eq!(there.path().read_dir().unwrap().count(), 0);
    }
}
