//! The options of a runtime: from the section of the runtime in containerd's configuration, or from a client.
//! containerd writes them to the stdin of `start`, and sends them with each create request.

use std::path::PathBuf;

use protobuf::{Message, well_known_types::any::Any};
use serde::Deserialize;

use crate::types::config::CONFIG_PATH;

/// The options of a runtime that containerd has no options of its own for.
#[allow(warnings, clippy::all)]
mod generic {
    include!(concat!(env!("OUT_DIR"), "/runtimeoptions.rs"));
}

/// The options of runc.
#[allow(warnings, clippy::all)]
mod runc {
    include!(concat!(env!("OUT_DIR"), "/runcoptions.rs"));
}

const GENERIC: &str = "runtimeoptions.v1.Options";
const RUNC: &str = "containerd.runc.v1.Options";
/// What `ctr run --uidmap` sends to each runtime: who owns the streams. They are root's.
const OF_CTR: &str = "containerd.linux.runc.CreateOptions";

/// What the shim takes of the options.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Options {
    /// The shim's configuration.
    pub(crate) config: Option<PathBuf>,
    /// A cgroup of the host that the shim is to be in.
    pub(crate) shim_cgroup: Option<PathBuf>,
    /// The processes of the container get no session keyring of their own.
    pub(crate) no_new_keyring: bool,
    /// The user and group of the host to whom the streams of the container belong. 0: root, or nobody has been named.
    pub(crate) io_owner: (u32, u32),
}

/// Options that cannot be honoured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OptionsError {
    #[error("the options of the runtime cannot be read")]
    Message(#[from] protobuf::Error),
    #[error("the options of the runtime cannot be read")]
    Toml(#[from] toml::de::Error),
    #[error(
        "the options of the runtime: {0} is not implemented; write the configuration to a file, and its path there, as in \
         ConfigPath = \"{CONFIG_PATH}\""
    )]
    Unknown(String),
    #[error("the options of the runtime: {0} is runc's, and not implemented in a microVM")]
    Runc(&'static str),
    #[error(
        "the options of the runtime have the type {0:?}, which is another runtime's; {GENERIC} and {RUNC} are read"
    )]
    Type(String),
    #[error("the options of the runtime: ConfigPath {0:?} is not an absolute path")]
    ConfigPath(PathBuf),
}

/// The section of a runtime in containerd's configuration, where it has no `ConfigPath`.
#[derive(Deserialize, Default)]
#[serde(default, rename_all = "PascalCase")]
struct Section {
    shim_cgroup: String,
    binary_name: String,
    root: String,
    no_new_keyring: bool,
    /// Only runc needs it. The form of a cgroup's path says whose path it is.
    #[serde(rename = "SystemdCgroup")]
    _systemd_cgroup: bool,
    #[serde(flatten)]
    others: toml::Table,
}

impl Options {
    /// Whether a message has options that can be read. containerd 2.3 sends messages of other kinds beside them.
    pub(crate) fn are_in(message: &Any) -> bool {
        matches!(message.type_url.rsplit('/').next(), Some(GENERIC | RUNC))
    }

    /// Reads the message. An empty one, without a type, has no options.
    pub(crate) fn read(message: &Any) -> Result<Self, OptionsError> {
        match message.type_url.rsplit('/').next() {
            Some(GENERIC) => Self::from_generic(generic::Options::parse_from_bytes(&message.value)?),
            Some(RUNC) => Self::from_runc(&runc::Options::parse_from_bytes(&message.value)?),
            None | Some("" | OF_CTR) => Ok(Self::default()),
            Some(other) => Err(OptionsError::Type(other.into())),
        }
    }

    fn from_generic(options: generic::Options) -> Result<Self, OptionsError> {
        if options.config_path.is_empty() {
            let section = toml::from_slice::<Section>(&options.config_body)?;
            if let Some(name) = section.others.keys().next() {
                return Err(OptionsError::Unknown(name.clone()));
            }
            refuse(&[("BinaryName", !section.binary_name.is_empty()), ("Root", !section.root.is_empty())])?;
            let (shim_cgroup, no_new_keyring) = (path(&section.shim_cgroup), section.no_new_keyring);
            return Ok(Self { config: None, shim_cgroup, no_new_keyring, ..Self::default() });
        }
        let config = PathBuf::from(options.config_path);
        match config.is_absolute() {
            true => Ok(Self { config: Some(config), ..Self::default() }),
            false => Err(OptionsError::ConfigPath(config)),
        }
    }

    fn from_runc(options: &runc::Options) -> Result<Self, OptionsError> {
        refuse(&[
            ("NoPivotRoot", options.no_pivot_root),
            ("BinaryName", !options.binary_name.is_empty()),
            ("Root", !options.root.is_empty()),
            ("CriuImagePath", !options.criu_image_path.is_empty()),
            ("CriuWorkPath", !options.criu_work_path.is_empty()),
        ])?;
        let (shim_cgroup, no_new_keyring) = (path(&options.shim_cgroup), options.no_new_keyring);
        Ok(Self { config: None, shim_cgroup, no_new_keyring, io_owner: (options.io_uid, options.io_gid) })
    }
}

fn refuse(options: &[(&'static str, bool)]) -> Result<(), OptionsError> {
    match options.iter().find(|(_, is_set)| *is_set) {
        Some((name, _)) => Err(OptionsError::Runc(name)),
        None => Ok(()),
    }
}

fn path(text: &str) -> Option<PathBuf> {
    (!text.is_empty()).then(|| text.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(type_url: &str, message: &impl Message) -> Any {
        let mut any = Any::new();
        any.type_url = format!("types.containerd.io/{type_url}");
        any.value = message.write_to_bytes().unwrap();
        any
    }

    fn generic(path: &str, body: &str) -> Result<Options, String> {
        let mut options = generic::Options::new();
        options.config_path = path.into();
        options.config_body = body.into();
        Options::read(&message(GENERIC, &options)).map_err(|error| error.to_string())
    }

    #[test]
    fn options_name_a_configuration() {
        let found = generic("/etc/other.toml", "Read = \"by containerd\"").unwrap();
        assert_eq!(found, Options { config: Some("/etc/other.toml".into()), ..Options::default() });
        assert_eq!(generic("", ""), Ok(Options::default()));
        assert!(generic("other.toml", "").unwrap_err().contains("\"other.toml\""));
        let error = generic("", "templates = false").unwrap_err();
        assert!(error.contains("templates is not implemented") && error.contains("ConfigPath"), "{error}");
        assert!(generic("", "{").unwrap_err().contains("cannot be read"));
    }

    #[test]
    fn the_shim_may_have_a_cgroup_and_runcs_own_options_are_refused_by_name() {
        let cgroup = Options { shim_cgroup: Some("/shims".into()), ..Options::default() };
        assert_eq!(generic("", "ShimCgroup = \"/shims\""), Ok(cgroup.clone()));
        let of_runc = |change: fn(&mut runc::Options)| {
            let mut options = runc::Options::new();
            change(&mut options);
            Options::read(&message(RUNC, &options)).map_err(|error| error.to_string())
        };
        assert_eq!(of_runc(|options| options.shim_cgroup = "/shims".into()), Ok(cgroup));
        let keyring = Options { no_new_keyring: true, ..Options::default() };
        assert_eq!(of_runc(|options| options.no_new_keyring = true), Ok(keyring.clone()));
        assert_eq!(generic("", "NoNewKeyring = true"), Ok(keyring));
        let named = |name: &str| {
            format!("the options of the runtime: {name} is runc's, and not implemented in a microVM")
        };
        let owner = Options { io_owner: (1000, 0), ..Options::default() };
        assert_eq!(of_runc(|options| options.io_uid = 1000), Ok(owner));
        assert_eq!(of_runc(|options| options.binary_name = "crun".into()), Err(named("BinaryName")));
        assert_eq!(of_runc(|options| options.root = "/run/x".into()), Err(named("Root")));
        assert_eq!(generic("", "BinaryName = \"crun\""), Err(named("BinaryName")));
        assert_eq!(generic("", "SystemdCgroup = true"), Ok(Options::default()));
        for none in [Any::new(), message(OF_CTR, &runc::Options::new())] {
            assert_eq!(Options::read(&none).unwrap(), Options::default());
        }
        let other = message("another.Options", &runc::Options::new());
        assert!(!Options::are_in(&other) && Options::are_in(&message(RUNC, &runc::Options::new())));
        let other = Options::read(&other).unwrap_err().to_string();
        assert!(other.contains("\"another.Options\", which is another runtime's"), "{other}");
        let mut broken = message(GENERIC, &generic::Options::new());
        broken.value = vec![0xff];
        assert!(Options::read(&broken).is_err());
    }
}
