//! `bulkhead metrics`: what the pods of this host use and how they started, for Prometheus.

mod exposition;
mod server;

use std::{
    io::Write,
    path::{Path, PathBuf},
    str::FromStr,
};

use bulkhead_host_shim::operator::Sampler;
use rustix::{fs::Mode, process::umask};
use tokio::net::{TcpListener, UnixListener};

use crate::error::CommandError;

/// Where the metrics are served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// An address and a port, or a name and a port.
    Tcp(String),
    /// A Unix socket.
    Unix(PathBuf),
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix:") {
            Some(path) if path.starts_with('/') => Ok(Self::Unix(path.into())),
            Some(_) => Err("the path of a socket begins with /".into()),
            None => match text.rsplit_once(':') {
                Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                    Ok(Self::Tcp(text.into()))
                }
                Some((host, port)) if !host.is_empty() && is_number(port) => {
                    Err(format!("the port {port} is not between 0 and 65535"))
                }
                _ => Err("expected ADDRESS:PORT or unix:/PATH".into()),
            },
        }
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Prints the metrics once.
pub(crate) fn print(out: &mut impl Write, root: &Path) -> Result<(), CommandError> {
    let node = Sampler::default().sample(root);
    let node = node.map_err(|source| CommandError::List { path: root.into(), source })?;
    out.write_all(exposition::text(&node).as_bytes()).map_err(CommandError::Output)
}

/// Serves the metrics until this command is ended by SIGTERM or SIGINT.
pub(crate) fn serve(out: &mut impl Write, endpoint: &Endpoint, root: &Path) -> Result<(), CommandError> {
    let failed = |source| CommandError::Listen { endpoint: endpoint.to_string(), source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let served = runtime.block_on(async {
        let mut said = |at: String| {
            // Whoever starts this waits for the line.
            writeln!(out, "serving metrics at {at}").and_then(|()| out.flush()).map_err(CommandError::Output)
        };
        match endpoint {
            Endpoint::Tcp(address) => {
                let listener = TcpListener::bind(address).await.map_err(failed)?;
                said(format!("http://{}/metrics", listener.local_addr().map_err(failed)?))?;
                server::serve(listener, root).await.map_err(failed)
            }
            Endpoint::Unix(path) => {
                let _socket = server::Socket::reserve(path).map_err(failed)?;
                // Only the user of this command may connect, from the first moment. This command makes no other file.
                umask(Mode::RWXG | Mode::RWXO);
                let listener = UnixListener::bind(path).map_err(failed)?;
                said(endpoint.to_string())?;
                server::serve(listener, root).await.map_err(failed)
            }
        }
    });
    // A pod that hangs may keep a thread.
    runtime.shutdown_background();
    served
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => formatter.write_str(address),
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_an_address_or_a_socket() {
        assert_eq!("127.0.0.1:9659".parse(), Ok(Endpoint::Tcp("127.0.0.1:9659".into())));
        assert_eq!("127.0.0.1:0".parse(), Ok(Endpoint::Tcp("127.0.0.1:0".into())));
        assert_eq!("[::1]:9659".parse(), Ok(Endpoint::Tcp("[::1]:9659".into())));
        assert_eq!("unix:/run/m.sock".parse(), Ok(Endpoint::Unix("/run/m.sock".into())));
        for wrong in ["", "9659", ":9659", "host:", "host:70000", "unix:m.sock", "/run/m.sock"] {
            assert!(wrong.parse::<Endpoint>().is_err(), "{wrong}");
        }
        let error = "127.0.0.1:99999".parse::<Endpoint>();
        assert_eq!(error, Err("the port 99999 is not between 0 and 65535".into()));
    }
}
