//! Ids of containers and of their processes.

use super::error::ContainerError;

/// As containerd demands of ids, which also makes them names of files.
pub(super) fn check_id(id: &str) -> Result<(), ContainerError> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let begins_well = id.starts_with(|c: char| c.is_ascii_alphanumeric());
    if begins_well && id.len() <= 200 && id.chars().all(is_allowed) {
        Ok(())
    } else {
        Err(ContainerError::Id(id.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_plain_names() {
        for id in ["demo", "0a-b_c.d", "f00"] {
            check_id(id).unwrap();
        }
        for id in ["", ".", "..", "a/b", "-a", ".a", "a b", "\u{e4}", &"a".repeat(201)] {
            assert!(check_id(id).is_err(), "{id:?}");
        }
    }
}
