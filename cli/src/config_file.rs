//! The option that names the configuration of Bulkhead.

use std::path::PathBuf;

use bulkhead_host_shim::operator::{CONFIG_PATH, Config};
use clap::Args;

use crate::error::CommandError;

/// Which configuration a command uses.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub(crate) struct ConfigFile {
    /// The configuration of Bulkhead. Without this option it is /etc/bulkhead/config.toml, which need not exist.
    ///
    /// Its drop-ins are in the directory of the same name with the extension `d`.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}

impl ConfigFile {
    pub(crate) fn path(&self) -> PathBuf {
        self.config.clone().unwrap_or_else(|| CONFIG_PATH.into())
    }

    /// Whether there is such a file. The defaults hold without one.
    pub(crate) fn exists(&self) -> bool {
        // An error of another kind is reported when the file is read.
        self.path().try_exists().unwrap_or(true)
    }

    /// Reads it. A file that was named must exist.
    pub(crate) fn load(&self) -> Result<Config, CommandError> {
        match &self.config {
            Some(path) if !self.exists() => Err(CommandError::NoConfig { path: path.clone() }),
            _ => Ok(Config::load(&self.path())?),
        }
    }
}
