//! AppArmor profiles of the host. The kernel gives back the binary policy from which it has a profile, and the guest's
//! kernel loads it.

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Read},
    path::{Path, PathBuf},
};

use bulkhead_agent_api::MAX_APPARMOR_POLICY;

use crate::types::request_error::{RequestError, invalid, unimplemented};

/// Where sysfs is mounted.
const SYS: &str = "/sys";
/// What the kernel has loaded, in [`SYS`]: a directory for each profile.
const PROFILES: &str = "kernel/security/apparmor/policy/profiles";
/// A file in [`SYS`] that begins with Y if AppArmor is enabled.
const ENABLED: &str = "module/apparmor/parameters/enabled";

/// The longest name of a profile that is compared.
const LONGEST_NAME: u64 = 4096;

/// The binary policy of a profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Policy {
    pub(crate) profile: String,
    pub(crate) binary: Vec<u8>,
}

impl Policy {
    /// Reads the policy of the profile that `process.apparmorProfile` names. None: it names none. On a host without
    /// AppArmor, a name is an error, as with runc.
    pub(crate) fn of_host(name: Option<&str>) -> Result<Option<Self>, RequestError> {
        Self::of(Path::new(SYS), name)
    }

    fn of(sys: &Path, name: Option<&str>) -> Result<Option<Self>, RequestError> {
        match name {
            None | Some("" | "unconfined") => Ok(None),
            Some(name) if fs::read(sys.join(ENABLED)).is_ok_and(|enabled| enabled.starts_with(b"Y")) => {
                Self::read(&sys.join(PROFILES), name).map(Some)
            }
            Some(name) => Err(refuse(name, "AppArmor is not enabled on this host")),
        }
    }

    fn read(profiles: &Path, name: &str) -> Result<Self, RequestError> {
        // A name is never a part of a path.
        if name.contains("//&") || name.starts_with(':') {
            return Err(unimplemented(
                format!("process.apparmorProfile {name:?}"),
                ": a container has one profile of the host's own namespace, neither a stack nor that of a namespace",
            ));
        }
        // The policy of a profile has its children and hats too.
        let top = name.split_once("//").map_or(name, |(top, _)| top);
        let listed = directory_of(profiles, top)
            .map_err(|source| RequestError::Read { path: profiles.to_owned(), source })?;
        let Some(directory) = listed else {
            return Err(refuse(name, "the host's kernel has no such profile; load it with apparmor_parser"));
        };
        let path = directory.join("raw_data");
        let file = match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(refuse(
                    name,
                    "the host's kernel does not give back its policy; set the kernel's parameter \
                     apparmor.export_binary=1 and load the profile again",
                ));
            }
            other => other.map_err(|source| RequestError::Read { path: path.clone(), source })?,
        };
        let mut binary = Vec::new();
        file.take(MAX_APPARMOR_POLICY as u64 + 1)
            .read_to_end(&mut binary)
            .map_err(|source| RequestError::Read { path, source })?;
        if binary.len() > MAX_APPARMOR_POLICY {
            return Err(refuse(name, format!("its policy has more than {MAX_APPARMOR_POLICY} bytes")));
        }
        Ok(Self { profile: name.into(), binary })
    }
}

fn refuse(name: &str, reason: impl std::fmt::Display) -> RequestError {
    invalid("process.apparmorProfile", format!("{name:?}: {reason}"))
}

/// The directory of the profile of this name. The kernel changes letters of the name to make that of the directory, and
/// adds a number.
fn directory_of(profiles: &Path, name: &str) -> io::Result<Option<PathBuf>> {
    for entry in fs::read_dir(profiles)? {
        let directory = entry?.path();
        match read_name(&directory.join("name")) {
            Ok(found) if found == name.as_bytes() => return Ok(Some(directory)),
            // Another one, or one that was removed meanwhile.
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

fn read_name(path: &Path) -> io::Result<Vec<u8>> {
    let mut name = Vec::new();
    File::open(path)?.take(LONGEST_NAME).read_to_end(&mut name)?;
    if name.last() == Some(&b'\n') {
        name.pop();
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the kernel shows profiles.
    struct Loaded(tempfile::TempDir);

    impl Loaded {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn with(self, directory: &str, name: &str, policy: &[u8]) -> Self {
            let directory = self.0.path().join(directory);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("name"), format!("{name}\n")).unwrap();
            fs::write(directory.join("raw_data"), policy).unwrap();
            self
        }

        fn error(&self, name: &str) -> String {
            Policy::read(self.0.path(), name).unwrap_err().to_string()
        }

        fn policy(&self, name: &str) -> Vec<u8> {
            Policy::read(self.0.path(), name).unwrap().binary
        }
    }

    #[test]
    fn a_profile_is_found_by_its_name() {
        let loaded = Loaded::new().with("usr.bin.man.3", "/usr/bin/man", b"of man").with(
            "docker-default.12",
            "docker-default",
            b"of docker",
        );
        assert_eq!(loaded.policy("docker-default"), b"of docker");
        assert_eq!(loaded.policy("/usr/bin/man"), b"of man");
        assert_eq!(loaded.policy("/usr/bin/man//groff"), b"of man", "its child is in the same policy");
        let error = loaded.error("docker");
        assert!(
            error.starts_with("process.apparmorProfile: \"docker\": the host's kernel has no"),
            "{error}"
        );
    }

    #[test]
    fn a_name_leads_nowhere_else() {
        let loaded = Loaded::new().with("profiles/a.1", "a", b"of a").with("secret", "other", b"secret");
        let inner = loaded.0.path().join("profiles");
        Policy::read(&inner, "a").unwrap();
        for name in ["../secret", "a.1/../../secret", "a.1", "", ".", "a\n", "A"] {
            let error = Policy::read(&inner, name).unwrap_err().to_string();
            assert!(error.contains("has no such profile"), "{name:?}: {error}");
        }
        for name in ["a//&b", ":ns:a", "a//&:ns:b"] {
            let error = loaded.error(name);
            assert!(error.contains("is not implemented") && error.contains(&format!("{name:?}")), "{error}");
        }
    }

    #[test]
    fn a_policy_that_cannot_be_sent_is_refused() {
        let loaded = Loaded::new()
            .with("most.1", "most", &vec![0; MAX_APPARMOR_POLICY])
            .with("more.2", "more", &vec![0; MAX_APPARMOR_POLICY + 1])
            .with("none.3", "none", b"");
        assert_eq!(loaded.policy("most").len(), MAX_APPARMOR_POLICY);
        assert!(loaded.error("more").contains("more than 2097152 bytes"));
        fs::remove_file(loaded.0.path().join("none.3/raw_data")).unwrap();
        assert!(loaded.error("none").contains("apparmor.export_binary=1"));
    }

    #[test]
    fn only_a_host_with_apparmor_has_profiles() {
        let sys = tempfile::tempdir().unwrap();
        let error = || Policy::of(sys.path(), Some("p")).unwrap_err().to_string();
        for none in [None, Some(""), Some("unconfined")] {
            assert_eq!(Policy::of(sys.path(), none).unwrap(), None);
        }
        assert_eq!(error(), "process.apparmorProfile: \"p\": AppArmor is not enabled on this host");
        let enabled = sys.path().join(ENABLED);
        fs::create_dir_all(enabled.parent().unwrap()).unwrap();
        fs::write(&enabled, "N\n").unwrap();
        assert!(error().ends_with("AppArmor is not enabled on this host"));
        fs::write(&enabled, "Y\n").unwrap();
        // securityfs is not mounted.
        assert_eq!(error(), format!("cannot read {}", sys.path().join(PROFILES).display()));
        let profile = sys.path().join(PROFILES).join("p.1");
        fs::create_dir_all(&profile).unwrap();
        fs::write(profile.join("name"), "p\n").unwrap();
        fs::write(profile.join("raw_data"), "policy").unwrap();
        let expected = Policy { profile: "p".into(), binary: b"policy".into() };
        assert_eq!(Policy::of(sys.path(), Some("p")).unwrap(), Some(expected));
    }
}
