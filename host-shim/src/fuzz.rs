//! The fuzz targets of the shim, as functions of bytes: what a hostile guest can send, and damaged files. Only
//! `host-shim/fuzz` uses them.

mod answers;
mod template;
mod words;

pub use self::{answers::answers, template::template, words::words};

/// All targets, by their names for `cargo fuzz`.
pub const TARGETS: &[bulkhead_fuzz::Named] =
    &[("answers", answers), ("words", words), ("template", template)];

/// A text that the guest had a say in, which is about to be logged or shown.
fn check_text(text: &str) -> anyhow::Result<()> {
    anyhow::ensure!(text.len() <= 4096, "a line of {} bytes", text.len());
    anyhow::ensure!(!text.contains(char::is_control), "a line that does something: {text:?}");
    Ok(())
}
