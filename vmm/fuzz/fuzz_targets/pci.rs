#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| bulkhead_vmm_fuzz::check(bulkhead_vmm_fuzz::pci::run, bytes));
