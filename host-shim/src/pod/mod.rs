//! A pod: its VM, its containers, and what they have on the host.

pub(crate) mod container;
pub(crate) mod cri;
pub(crate) mod lifecycle;
pub(crate) mod machine;
pub(crate) mod request;
pub(crate) mod role;
