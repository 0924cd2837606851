//! The list of the parts that a template was made of, damaged in any way: the template is removed, or was not
//! damaged, and nothing else is touched.

use std::fs;

use anyhow::{Result, ensure};
use bulkhead_fuzz::input::Input;
use bulkhead_vmm_api::Part;

use crate::vm::template::{PARTS, remove_outdated};

/// Damages the list as the bytes say.
pub fn template(bytes: &[u8]) -> Result<()> {
    let templates = tempfile::tempdir()?;
    let [damaged, unfinished] = ["damaged", "unfinished"].map(|name| templates.path().join(name));
    fs::create_dir(&damaged)?;
    fs::create_dir(&unfinished)?;
    let parts = serde_json::to_vec(&[Part::of("/proc/self/exe".as_ref())?])?;
    let mut text = parts.clone();
    let mut input = Input::new(bytes);
    while !input.is_over() {
        let place = usize::from(input.u8()).min(text.len());
        let end = place.saturating_add(input.u8().into()).min(text.len());
        let added = input.u8().into();
        text.splice(place..end, input.bytes(added).iter().copied());
    }
    fs::write(damaged.join(PARTS), &text)?;
    remove_outdated(templates.path());
    ensure!(unfinished.exists(), "a template that is being made is removed");
    ensure!(damaged.exists() || text != parts, "a template that is as it was is removed");
    let is_list = serde_json::from_slice::<Vec<Part>>(&text).is_ok();
    ensure!(is_list || !damaged.exists(), "a template of unknown parts is kept");
    Ok(())
}
