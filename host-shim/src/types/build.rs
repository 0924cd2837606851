//! Which build of Bulkhead this is.

use std::sync::LazyLock;

/// The version of Bulkhead.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit that it was built from, by `BULKHEAD_COMMIT` at compile time, which `cargo xtask` sets.
pub const COMMIT: &str = match option_env!("BULKHEAD_COMMIT") {
    Some(commit) if !commit.is_empty() => commit,
    _ => "unknown",
};

/// Both for people. The version is a word of its own, by which parts of one version know each other.
pub fn version_and_commit() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| format!("{VERSION} (commit {COMMIT})"));
    &TEXT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_a_word_and_the_commit_is_never_empty() {
        assert!(version_and_commit().split_whitespace().any(|word| word == VERSION));
        assert!(!COMMIT.is_empty() && version_and_commit().ends_with(&format!("(commit {COMMIT})")));
    }
}
