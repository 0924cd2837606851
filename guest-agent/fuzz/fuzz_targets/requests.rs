#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| bulkhead_fuzz::check(bulkhead_agent_fuzz::requests::run, bytes));
