//! The pages of a template that its clones touch while their first container is made.

use serde::{Deserialize, Serialize};

/// The file of a [`WorkingSet`] beside [`crate::MEMORY_FILE`]. A template may have none.
pub const WORKING_SET_FILE: &str = "working_set.json";

/// The largest size of that file, in bytes.
pub const LONGEST_WORKING_SET: u64 = 1 << 18;

/// Pages that follow one another in [`crate::MEMORY_FILE`]: the number of the first, and how many. A page has 4096
/// bytes.
pub type Run = (u32, u32);

/// What was touched. The runs do not overlap.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkingSet {
    /// Pages that were only read or executed.
    pub read: Vec<Run>,
    /// Pages that were written, so that a clone has copies of its own.
    pub written: Vec<Run>,
}
