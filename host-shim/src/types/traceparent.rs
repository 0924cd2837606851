//! The span that a request belongs to, as its client names it: `traceparent` of W3C Trace Context, version 00.

use std::fmt::{self, Display, Formatter};

use serde::{Deserialize, Serialize};

/// What a request or a record says is no `traceparent`.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("it is not 00-<32 hexadecimal digits>-<16 hexadecimal digits>-<2 hexadecimal digits>")]
pub struct NotATraceparent;

/// A span of the client of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Traceparent {
    /// Neither of the two is 0.
    trace: u128,
    span: u64,
    flags: u8,
}

/// The flag that says that the client records its span.
const SAMPLED: u8 = 1;

impl Traceparent {
    /// The id of the trace, as collectors write it.
    pub fn trace_id(&self) -> String {
        format!("{:032x}", self.trace)
    }

    /// The id of the client's span, as collectors write it.
    pub fn span_id(&self) -> String {
        format!("{:016x}", self.span)
    }

    /// Whether the client records its span.
    pub fn is_sampled(&self) -> bool {
        self.flags & SAMPLED != 0
    }
}

impl TryFrom<&str> for Traceparent {
    type Error = NotATraceparent;

    fn try_from(text: &str) -> Result<Self, NotATraceparent> {
        let fields: Vec<_> = text.splitn(5, '-').collect();
        let ["00", trace, span, flags] = *fields.as_slice() else { return Err(NotATraceparent) };
        let (trace, span) = (number(trace, 32)?, number(span, 16)?);
        if trace == 0 || span == 0 {
            return Err(NotATraceparent);
        }
        // They have as many digits as their types.
        Ok(Self { trace, span: span as u64, flags: number(flags, 2)? as u8 })
    }
}

/// The number of this many lower-case digits.
fn number(text: &str, digits: usize) -> Result<u128, NotATraceparent> {
    let are_digits = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if text.len() != digits || !are_digits {
        return Err(NotATraceparent);
    }
    u128::from_str_radix(text, 16).map_err(|_| NotATraceparent)
}

impl TryFrom<String> for Traceparent {
    type Error = NotATraceparent;

    fn try_from(text: String) -> Result<Self, NotATraceparent> {
        text.as_str().try_into()
    }
}

impl Display for Traceparent {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        write!(formatter, "00-{:032x}-{:016x}-{:02x}", self.trace, self.span, self.flags)
    }
}

impl From<Traceparent> for String {
    fn from(parent: Traceparent) -> Self {
        parent.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ids_of_a_traceparent_are_kept() {
        let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let parent = Traceparent::try_from(text).unwrap();
        assert_eq!(parent.trace_id(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(parent.span_id(), "00f067aa0ba902b7");
        assert!(parent.is_sampled());
        let json = serde_json::to_string(&parent).unwrap();
        assert_eq!(json, format!("\"{text}\""));
        assert_eq!(serde_json::from_str::<Traceparent>(&json).unwrap(), parent);
        // Other flags may be added to this version.
        assert!(!Traceparent::try_from(text.replace("-01", "-02").as_str()).unwrap().is_sampled());
        assert!(Traceparent::try_from(text.replace("-01", "-03").as_str()).unwrap().is_sampled());
    }

    #[test]
    fn anything_else_is_refused() {
        let (trace, span) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
        for text in [
            String::new(),
            format!("00-{trace}-{span}"),
            format!("00-{trace}-{span}-01-"),
            format!("00-{trace}-{span}-01-more"),
            format!("00-{trace}-{span}-1"),
            format!("01-{trace}-{span}-01"),
            format!("ff-{trace}-{span}-01"),
            format!(" 00-{trace}-{span}-01"),
            format!("00-{}-{span}-01", trace.to_uppercase()),
            format!("00-{trace}0-{span}-01"),
            format!("00-{}-{span}-01", &trace[1..]),
            format!("00-{}-{span}-01", "0".repeat(32)),
            format!("00-{trace}-{}-01", "0".repeat(16)),
            format!("00-{trace}-+{}-01", &span[1..]),
            format!("00-{trace}-{}é-01", &span[2..]),
            "-".repeat(1 << 20),
        ] {
            assert_eq!(Traceparent::try_from(text.as_str()), Err(NotATraceparent), "{text}");
        }
    }
}
