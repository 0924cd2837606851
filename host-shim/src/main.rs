//! The program; all of it is in the library of this package, for the sake of its fuzz targets.

use std::process::ExitCode;

fn main() -> ExitCode {
    bulkhead_host_shim::main()
}
