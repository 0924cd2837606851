//! The guest's memory, and its memory slots in KVM.

mod allocate;
mod error;
#[cfg(feature = "fuzz")]
pub mod fuzz_hook;
mod huge_pages;
mod mapping;
pub(crate) mod page;
mod regions;
mod slots;

pub use allocate::{Size, allocate, lay_out};
pub use error::MemoryError;
pub use huge_pages::Pool;
pub use mapping::{populate_for_writing, release, use_small_pages};
pub use regions::{GuestMemory, Region};
pub use slots::Slots;
