//! The targets as plain tests: on the programs that were saved, and on many that are made up.

use std::io;

#[test]
fn requests() -> io::Result<()> {
    bulkhead_fuzz::run_plain(env!("CARGO_MANIFEST_DIR"), bulkhead_agent_fuzz::TARGETS, "requests")
}
