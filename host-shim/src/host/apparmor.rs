//! AppArmor profiles of the host. The kernel gives back the binary policy from which it has a profile, and the guest's
//! kernel loads it.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, ErrorKind, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use bulkhead_agent_api::MAX_APPARMOR_POLICY;

use crate::types::request_error::{RequestError, invalid, unimplemented};

/// Where sysfs is mounted.
const SYS: &str = "/sys";
/// What the kernel has loaded, in [`SYS`]: a directory for each profile.
const PROFILES: &str = "kernel/security/apparmor/policy/profiles";
/// The same of a profile's children, in its directory.
const CHILDREN: &str = "profiles";
/// A file in [`SYS`] that begins with Y if AppArmor is enabled.
const ENABLED: &str = "module/apparmor/parameters/enabled";

/// The longest name of a profile that is compared.
const LONGEST_NAME: u64 = 4096;
/// A profile and those below it have this number of profiles at most.
const MAX_TREE: usize = 1024;

/// The binary policy of a profile, and of those below it: its children and hats, which it may change to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Policy {
    pub(crate) profile: String,
    /// One part for each time that the host's kernel got a profile of the policy, in this order. apparmor_parser loads
    /// a profile and its children one by one, unless it has them in its cache.
    pub(crate) parts: Vec<Part>,
}

/// What the host's kernel got at one time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    /// The kernel counts them: a later part has a larger number.
    pub(crate) revision: u64,
    pub(crate) policy: Arc<[u8]>,
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
        let named = find(profiles, name)?;
        // What was loaded later replaces what was loaded before, in the guest as on the host.
        let mut loaded = BTreeMap::new();
        for directory in tree(&named.top, name)? {
            match Loaded::of(&directory)? {
                Some(data) => _ = loaded.insert(data.revision, data.path),
                None if named.path.contains(&directory) => {
                    return Err(refuse(
                        name,
                        "the host's kernel does not give back its policy; set the kernel's parameter \
                         apparmor.export_binary=1 and load the profile again",
                    ));
                }
                // It was not loaded: the kernel has made it, or removed it meanwhile.
                None => {}
            }
        }
        let mut left = MAX_APPARMOR_POLICY;
        let mut parts = Vec::new();
        for (revision, path) in loaded {
            let policy = read_at_most(&path, left as u64 + 1).map_err(|source| reading(path, source))?;
            left = left.checked_sub(policy.len()).ok_or_else(|| {
                refuse(name, format!("its policy has more than {MAX_APPARMOR_POLICY} bytes"))
            })?;
            parts.push(Part { revision, policy: policy.into() });
        }
        Ok(Self { profile: name.into(), parts })
    }
}

fn refuse(name: &str, reason: impl std::fmt::Display) -> RequestError {
    invalid("process.apparmorProfile", format!("{name:?}: {reason}"))
}

fn reading(path: impl Into<PathBuf>, source: io::Error) -> RequestError {
    RequestError::Read { path: path.into(), source }
}

/// The directories of a profile.
struct Named {
    /// That of the profile which is below no other.
    top: PathBuf,
    /// From that one to the one that is named.
    path: Vec<PathBuf>,
}

/// Finds the profile of this name, in which `//` is between a profile and its child.
fn find(profiles: &Path, name: &str) -> Result<Named, RequestError> {
    let mut path: Vec<PathBuf> = Vec::new();
    for part in name.split("//") {
        let place = path.last().map_or_else(|| profiles.to_owned(), |parent| parent.join(CHILDREN));
        let found = match directory_of(&place, part) {
            // It has no children.
            Err(error) if error.kind() == ErrorKind::NotFound && !path.is_empty() => None,
            other => other.map_err(|source| reading(place, source))?,
        };
        path.push(found.ok_or_else(|| {
            refuse(name, "the host's kernel has no such profile; load it with apparmor_parser")
        })?);
    }
    let top = path.first().cloned().unwrap_or_default();
    Ok(Named { top, path })
}

/// The directory of the profile of this name. The kernel changes letters of the name to make that of the directory, and
/// adds a number.
fn directory_of(profiles: &Path, name: &str) -> io::Result<Option<PathBuf>> {
    for entry in fs::read_dir(profiles)? {
        let directory = entry?.path();
        match read_at_most(&directory.join("name"), LONGEST_NAME) {
            Ok(found) if found.strip_suffix(b"\n").unwrap_or(&found) == name.as_bytes() => {
                return Ok(Some(directory));
            }
            // Another one, or one that was removed meanwhile.
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// The directory of a profile, and those of all that are below it.
fn tree(top: &Path, name: &str) -> Result<Vec<PathBuf>, RequestError> {
    let mut found = vec![top.to_owned()];
    let mut next = 0;
    while let Some(directory) = found.get(next) {
        let children = directory.join(CHILDREN);
        next += 1;
        let entries = match fs::read_dir(&children) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            other => other.map_err(|source| reading(&children, source))?,
        };
        for entry in entries {
            found.push(entry.map_err(|source| reading(&children, source))?.path());
            if found.len() > MAX_TREE {
                return Err(refuse(name, format!("there are more than {MAX_TREE} profiles below it")));
            }
        }
    }
    Ok(found)
}

/// What the kernel was given at one time.
struct Loaded {
    /// The kernel counts: what it got later has a larger number.
    revision: u64,
    path: PathBuf,
}

impl Loaded {
    /// That from which the kernel has the profile of this directory. None: the kernel does not say.
    fn of(profile: &Path) -> Result<Option<Self>, RequestError> {
        let path = profile.join("raw_data");
        // The link leads to a file among those about the same time.
        let link = match fs::read_link(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            other => other.map_err(|source| reading(&path, source))?,
        };
        let file = profile.join(link).with_file_name("revision");
        let text = fs::read_to_string(&file).map_err(|source| reading(&file, source))?;
        let revision = text.trim_end().parse().map_err(|error| reading(&file, io::Error::other(error)))?;
        Ok(Some(Self { revision, path }))
    }
}

fn read_at_most(path: &Path, bytes: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    File::open(path)?.take(bytes).read_to_end(&mut content)?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the kernel shows profiles.
    struct Shown(tempfile::TempDir);

    impl Shown {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn with(self, directory: &str, name: &str, policy: &[u8]) -> Self {
            let revision = fs::read_dir(self.0.path().join("raw_data")).map_or(0, Iterator::count);
            self.with_part(directory, name, revision, policy)
        }

        /// A profile from what the kernel was given at this time.
        fn with_part(self, directory: &str, name: &str, revision: usize, policy: &[u8]) -> Self {
            let directory = self.0.path().join("profiles").join(directory);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("name"), format!("{name}\n")).unwrap();
            let data = self.0.path().join("raw_data").join(revision.to_string());
            fs::create_dir_all(&data).unwrap();
            fs::write(data.join("raw_data"), policy).unwrap();
            fs::write(data.join("revision"), format!("{revision}\n")).unwrap();
            std::os::unix::fs::symlink(data.join("raw_data"), directory.join("raw_data")).unwrap();
            self
        }

        fn read(&self, name: &str) -> Result<Vec<Vec<u8>>, RequestError> {
            let policy = Policy::read(&self.0.path().join("profiles"), name)?;
            Ok(policy.parts.into_iter().map(|part| part.policy.to_vec()).collect())
        }

        fn error(&self, name: &str) -> String {
            self.read(name).unwrap_err().to_string()
        }

        fn policy(&self, name: &str) -> Vec<u8> {
            self.read(name).unwrap().concat()
        }
    }

    #[test]
    fn a_profile_is_found_by_its_name() {
        let loaded = Shown::new().with("usr.bin.man.3", "/usr/bin/man", b"of man").with(
            "docker-default.12",
            "docker-default",
            b"of docker",
        );
        assert_eq!(loaded.policy("docker-default"), b"of docker");
        assert_eq!(loaded.policy("/usr/bin/man"), b"of man");
        let error = loaded.error("docker");
        assert!(
            error.starts_with("process.apparmorProfile: \"docker\": the host's kernel has no"),
            "{error}"
        );
    }

    #[test]
    fn what_is_below_a_profile_comes_along_in_the_order_in_which_it_was_loaded() {
        // The first one was loaded again, by itself, after the others.
        let shown = Shown::new()
            .with_part("a.1", "a", 12, b"a,")
            .with_part("a.1/profiles/b.2", "b", 9, b"a,a//b,")
            .with_part("a.1/profiles/b.2/profiles/c.3", "c", 10, b"a//b//c,")
            .with_part("a.1/profiles/d.4", "d", 9, b"a,a//b,")
            .with_part("other.5", "other", 11, b"other,");
        let null = shown.0.path().join("profiles/a.1/profiles/null.6");
        fs::create_dir(&null).unwrap();
        fs::write(null.join("name"), "null\n").unwrap();
        for name in ["a", "a//b", "a//d", "a//b//c"] {
            assert_eq!(shown.policy(name), b"a,a//b,a//b//c,a,", "{name}");
        }
        assert_eq!(shown.read("a").unwrap().len(), 3);
        for name in ["b", "a//c", "a//b//d", "other//a", "a//", "//a", "a//b//c//d"] {
            assert!(shown.error(name).contains("has no such profile"), "{name}");
        }
        assert!(shown.error("a//null").contains("apparmor.export_binary=1"));
    }

    #[test]
    fn a_name_leads_nowhere_else() {
        let loaded = Shown::new().with("a.1", "a", b"of a").with("../secret", "other", b"secret");
        assert_eq!(loaded.policy("a"), b"of a");
        for name in ["../secret", "a.1/../../secret", "a.1", "", ".", "a\n", "A"] {
            let error = loaded.error(name);
            assert!(error.contains("has no such profile"), "{name:?}: {error}");
        }
        for name in ["a//&b", ":ns:a", "a//&:ns:b"] {
            let error = loaded.error(name);
            assert!(error.contains("is not implemented") && error.contains(&format!("{name:?}")), "{error}");
        }
    }

    #[test]
    fn a_policy_that_cannot_be_sent_is_refused() {
        let loaded = Shown::new()
            .with("most.1", "most", &vec![0; MAX_APPARMOR_POLICY])
            .with("more.2", "more", &vec![0; MAX_APPARMOR_POLICY + 1])
            .with("none.3", "none", b"");
        assert_eq!(loaded.policy("most").len(), MAX_APPARMOR_POLICY);
        assert!(loaded.error("more").contains("more than 2097152 bytes"));
        fs::remove_file(loaded.0.path().join("profiles/none.3/raw_data")).unwrap();
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
        let shown = Shown::new().with("p.1", "p", b"policy");
        let profiles = sys.path().join(PROFILES);
        fs::create_dir_all(profiles.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(shown.0.path().join("profiles"), profiles).unwrap();
        let parts = vec![Part { revision: 0, policy: b"policy".as_slice().into() }];
        let expected = Policy { profile: "p".into(), parts };
        assert_eq!(Policy::of(sys.path(), Some("p")).unwrap(), Some(expected));
    }
}
