//! How errors are shown: each error names its own fields, and its causes follow it.

use std::{error::Error, io};

use nix::errno::Errno;

use crate::types::text::one_line;

/// An error and its causes in one line.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = describe(error);
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {}", describe(error));
        cause = error.source();
    }
    one_line(&text)
}

/// The system's own errors read as in all that containerd and runc say: "no such file or directory".
fn describe(error: &(dyn Error + 'static)) -> String {
    match error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) {
        Some(errno) => Errno::from_raw(errno).desc().to_lowercase(),
        None => error.to_string(),
    }
}
