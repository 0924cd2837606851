#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| bulkhead_fuzz::check(bulkhead_host_shim::fuzz::template, bytes));
