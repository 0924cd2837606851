//! What becomes of each field of a request: of the OCI spec, of the CRI's messages, and of the flags of `docker run`.
//! docs/fields.md is written from these lists. Each row names a test that shows it.

pub(crate) mod cri;
pub(crate) mod docker;
#[cfg(test)]
mod oci;
#[cfg(test)]
mod page;
#[cfg(test)]
mod source;

/// What becomes of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// It has the effect that it has on runc.
    Honoured,
    /// The request fails, and the error names the field.
    Refused,
    /// It has an effect, but not quite that on runc.
    Different,
    /// containerd or docker does it without the runtime.
    Client,
}

/// A field, and what becomes of it.
#[derive(Debug)]
#[cfg_attr(not(test), expect(dead_code, reason = "only the page and the tests need all of it"))]
pub(crate) struct Row {
    /// The path of the field, or the flag.
    pub(crate) name: &'static str,
    state: State,
    /// What shows it: an end-to-end case, `group/case`, or a unit test, `agent:test`, `shim:test` or `vmm:test`.
    test: &'static str,
    /// Why it is refused, or what is different.
    why: &'static str,
}

const fn honoured(name: &'static str, test: &'static str) -> Row {
    Row { name, state: State::Honoured, test, why: "" }
}

const fn refused(name: &'static str, test: &'static str, why: &'static str) -> Row {
    Row { name, state: State::Refused, test, why }
}

const fn different(name: &'static str, test: &'static str, why: &'static str) -> Row {
    Row { name, state: State::Different, test, why }
}

const fn client(name: &'static str, test: &'static str) -> Row {
    Row { name, state: State::Client, test, why: "" }
}
