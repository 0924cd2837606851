//! The guest kernel.

use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::cache::Cache;
use crate::tools::Tools;

/// Builds the guest kernel.
pub(crate) fn build(_cache: &Cache, _tools: &Tools) -> Result<PathBuf> {
    bail!("the kernel build is not there yet")
}
