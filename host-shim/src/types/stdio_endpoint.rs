//! Where the streams of a process go, as the URIs of a request say.

use std::path::PathBuf;

/// Where the streams of a process go.
#[derive(Debug, Clone, Default)]
pub(crate) struct StdioPlan {
    pub(crate) stdin: Endpoint,
    pub(crate) stdout: Endpoint,
    pub(crate) stderr: Endpoint,
}

/// Where a stream goes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Endpoint {
    /// /dev/null.
    #[default]
    Nowhere,
    /// A FIFO of containerd's client, or else a file.
    Path(PathBuf),
    /// A file that output is appended to.
    File(PathBuf),
    /// A program of the host, one for both streams of output.
    Logger(LoggerPlan),
}

/// A stream that goes somewhere we cannot go.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EndpointError {
    #[error("{stream} {uri}: the {scheme} scheme is not implemented; use a FIFO, file:// or binary://")]
    Scheme { stream: &'static str, uri: String, scheme: String },
    #[error("{stream} {uri}: only output can go to a file or a logger")]
    Input { stream: &'static str, uri: String },
    #[error("{stream} {uri}: it does not name an absolute path")]
    Path { stream: &'static str, uri: String },
    #[error("stderr {uri}: a logger takes both streams of output, or none")]
    OtherLogger { uri: String },
}

/// A logger that is yet to be started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LoggerPlan {
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<String>,
}

impl StdioPlan {
    pub(crate) fn parse(
        terminal: bool,
        stdin: &str,
        stdout: &str,
        stderr: &str,
    ) -> Result<Self, EndpointError> {
        // A terminal has one stream of output. containerd names no other, and runc's shim opens no other.
        let stderr = if terminal { "" } else { stderr };
        let plan = Self {
            stdin: Endpoint::parse("stdin", stdin)?,
            stdout: Endpoint::parse("stdout", stdout)?,
            stderr: Endpoint::parse("stderr", stderr)?,
        };
        match (&plan.stdout, &plan.stderr) {
            (Endpoint::Logger(one), Endpoint::Logger(other)) if one == other => Ok(plan),
            (Endpoint::Logger(_), Endpoint::Nowhere) => Ok(plan),
            (Endpoint::Logger(_), _) | (_, Endpoint::Logger(_)) => {
                Err(EndpointError::OtherLogger { uri: stderr.into() })
            }
            _ => Ok(plan),
        }
    }
}

impl Endpoint {
    /// Reads what the request says of `stream`.
    pub(crate) fn parse(stream: &'static str, uri: &str) -> Result<Self, EndpointError> {
        match uri.split_once("://") {
            None if uri.is_empty() => Ok(Self::Nowhere),
            None => Ok(Self::Path(uri.into())),
            Some(("fifo", path)) => Ok(Self::Path(path.into())),
            Some(("file" | "binary", _)) if stream == "stdin" => {
                Err(EndpointError::Input { stream, uri: uri.into() })
            }
            // Options after a `?`, such as maxSize, are for containerd's own loggers.
            Some(("file", path)) => decode(path.split('?').next().unwrap_or_default())
                .map(PathBuf::from)
                .filter(|path| path.is_absolute())
                .map(Self::File)
                .ok_or_else(|| EndpointError::Path { stream, uri: uri.into() }),
            Some(("binary", program)) => LoggerPlan::parse(program)
                .map(Self::Logger)
                .ok_or_else(|| EndpointError::Path { stream, uri: uri.into() }),
            Some((scheme, _)) => {
                Err(EndpointError::Scheme { stream, uri: uri.into(), scheme: scheme.into() })
            }
        }
    }
}

impl LoggerPlan {
    /// Reads what follows `binary://`: the program's absolute path, and after a `?` its arguments, each key before its
    /// value. None if it is no such thing.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (path, query) = text.split_once('?').unwrap_or((text, ""));
        let program = PathBuf::from(decode(path)?);
        let mut args = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            args.extend([decode(&key.replace('+', " "))?, decode(&value.replace('+', " "))?]);
        }
        program.is_absolute().then_some(Self { program, args })
    }
}

/// Undoes the percent-encoding of a part of a URI (RFC 3986, 2.1). None if it is damaged.
pub(crate) fn decode(text: &str) -> Option<String> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        let mut digit = || char::from(bytes.next()?).to_digit(16);
        decoded.push(if byte == b'%' { u8::try_from(digit()? * 16 + digit()?).ok()? } else { byte });
    }
    String::from_utf8(decoded).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read() {
        let parse = |uri| Endpoint::parse("stdout", uri).map_err(|e| e.to_string());
        assert_eq!(parse(""), Ok(Endpoint::Nowhere));
        assert_eq!(parse("/run/f"), Ok(Endpoint::Path("/run/f".into())));
        assert_eq!(parse("file:///log?maxSize=1"), Ok(Endpoint::File("/log".into())));
        assert_eq!(
            parse("npipe:////./pipe").unwrap_err(),
            "stdout npipe:////./pipe: the npipe scheme is not implemented; use a FIFO, file:// or binary://"
        );
        let logger = LoggerPlan::parse("/bin/l?a=b").unwrap();
        assert_eq!(parse("binary:///bin/l?a=b"), Ok(Endpoint::Logger(logger)));
        assert_eq!(parse("file:///a%20b"), Ok(Endpoint::File("/a b".into())));
        assert_eq!(parse("binary://l").unwrap_err(), "stdout binary://l: it does not name an absolute path");
        for uri in ["file:///x", "binary:///x"] {
            assert!(Endpoint::parse("stdin", uri).is_err());
        }
    }
}
