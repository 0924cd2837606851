//! One line of `bulkhead check`.

use std::{
    error::Error,
    io::{self, Write},
};

use bulkhead_host_shim::operator::chain;
use serde::Serialize;

/// What a check has found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// What was checked, in a word or two.
    pub(crate) check: String,
    pub(crate) status: Status,
    /// What is the case.
    pub(crate) found: String,
    /// What to do about it.
    pub(crate) remedy: Option<String>,
}

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Status {
    /// As it should be.
    Ok,
    /// Some pods do not run, or something works less well or less securely. A runtime handler or a network that is
    /// missing is no more than this: ctr and docker need neither, and a node may get them later.
    Warn,
    /// No pods can run at all, or docker's pods cannot, or Kubernetes' pods cannot.
    Fail,
}

impl Finding {
    pub(crate) fn ok(check: &str, found: impl Into<String>) -> Self {
        Self { check: check.into(), status: Status::Ok, found: found.into(), remedy: None }
    }

    pub(crate) fn warn(check: &str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { check: check.into(), status: Status::Warn, found: found.into(), remedy: Some(remedy.into()) }
    }

    pub(crate) fn fail(check: &str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { check: check.into(), status: Status::Fail, found: found.into(), remedy: Some(remedy.into()) }
    }

    /// A failure because of an error. The message of the error ends with its remedy, if it has one.
    pub(crate) fn error(
        check: &str,
        error: &(dyn Error + 'static),
        remedy: Option<&str>,
        otherwise: &str,
    ) -> Self {
        let text = chain(error);
        let found = remedy.and_then(|remedy| text.strip_suffix(remedy)?.strip_suffix("; ")).unwrap_or(&text);
        Self::fail(check, found, remedy.unwrap_or(otherwise))
    }

    /// The status of a finding that is not ok, by whether pods can run nevertheless.
    pub(crate) fn bad(
        pods_run: bool,
        check: &str,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        if pods_run { Self::warn(check, found, remedy) } else { Self::fail(check, found, remedy) }
    }

    /// Prints a line, and one more for the remedy.
    pub(crate) fn print(&self, out: &mut impl Write) -> io::Result<()> {
        let Self { check, status, found, remedy } = self;
        writeln!(out, "{:<4}  {check}: {found}", status.name())?;
        match remedy {
            Some(remedy) => writeln!(out, "      -> {remedy}"),
            None => Ok(()),
        }
    }
}

impl Status {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}
