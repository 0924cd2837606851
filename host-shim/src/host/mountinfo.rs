//! Paths of the kernel's table of mounts, proc_pid_mountinfo(5).

use std::{ffi::OsString, os::unix::ffi::OsStringExt, path::PathBuf};

/// A path of the table, in which blanks, line ends and backslashes are three octal digits after a backslash.
pub(super) fn unescape(field: &[u8]) -> PathBuf {
    let mut path = Vec::new();
    let mut rest = field;
    while let [byte, after @ ..] = rest {
        let octal =
            after.get(..3).filter(|_| *byte == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(escaped) => {
                path.push(escaped);
                rest = after.get(3..).unwrap_or_default();
            }
            None => {
                path.push(*byte);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(path))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_path_is_that_of_the_mount() {
        assert_eq!(unescape(b"/a\\040b\\134c\\012"), Path::new("/a b\\c\n"));
        assert_eq!(unescape(b"/plain\\04"), Path::new("/plain\\04"));
    }
}
