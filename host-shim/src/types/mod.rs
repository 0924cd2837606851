//! What all layers share: configuration, requests as they are read, texts and errors.

pub(crate) mod annotations;
pub(crate) mod block_io;
pub(crate) mod boot_files;
pub(crate) mod build;
pub(crate) mod config;
pub(crate) mod error;
pub(crate) mod event;
pub(crate) mod exit;
pub(crate) mod failure;
pub(crate) mod id_mappings;
pub(crate) mod lock;
pub(crate) mod log;
pub(crate) mod log_limit;
pub(crate) mod options;
pub(crate) mod pace;
pub(crate) mod request_error;
pub(crate) mod spec;
pub(crate) mod stdio_endpoint;
pub(crate) mod terminal;
pub(crate) mod text;
pub(crate) mod timeline;
pub(crate) mod traceparent;
