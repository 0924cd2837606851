//! The files of a pod that its containers share: /etc/hosts, /etc/hostname, /etc/resolv.conf and /dev/shm. containerd
//! makes them and mounts them into each container, unless it leaves the pod to the shim: then they are the shim's,
//! too.

use std::{
    fs::{self, Permissions},
    io,
    os::unix::fs::PermissionsExt,
    path::Path,
};

use serde_json::{Value, json};

use crate::host::{journal::Journal, rootfs::RootfsError, share::make_tmpfs};

/// Where they are in the pod's state directory.
const DIRECTORY: &str = "etc";

/// Containers may write to the files, and would fill the host's /run otherwise.
const TMPFS_SIZE: &str = "size=1m,mode=0755";
/// The tmpfs itself, its root, and the files.
const TMPFS_INODES: usize = 5;

const HOSTS: &str = "hosts";
const HOSTNAME: &str = "hostname";
const RESOLV_CONF: &str = "resolv.conf";

/// What they are made of.
#[derive(Debug)]
pub(crate) struct SandboxFiles<'a> {
    pub(crate) hostname: &'a str,
    /// None: the host's.
    pub(crate) resolv_conf: Option<&'a str>,
}

impl SandboxFiles<'_> {
    /// Makes them in the pod's state directory. Blocks.
    pub(crate) fn make(&self, journal: &mut Journal, state: &Path) -> Result<(), RootfsError> {
        let directory = state.join(DIRECTORY);
        make_tmpfs(journal, &directory, TMPFS_SIZE, TMPFS_INODES)
            .map_err(|source| RootfsError::Share { path: directory.clone(), source })?;
        let resolv_conf = match self.resolv_conf {
            Some(text) => text.to_owned(),
            None => of_host(RESOLV_CONF)?,
        };
        let hosts = of_host(HOSTS)?;
        for (name, text) in
            [(HOSTS, hosts), (HOSTNAME, format!("{}\n", self.hostname)), (RESOLV_CONF, resolv_conf)]
        {
            let path = directory.join(name);
            let mode = Permissions::from_mode(0o644);
            fs::write(&path, text)
                .and_then(|()| fs::set_permissions(&path, mode))
                .map_err(|source| RootfsError::Share { path: path.clone(), source })?;
        }
        Ok(())
    }
}

/// A file of the host's /etc; nothing if it has none.
fn of_host(name: &str) -> Result<String, RootfsError> {
    let path = Path::new("/etc").join(name);
    match fs::read_to_string(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        other => other.map_err(|source| RootfsError::Share { path, source }),
    }
}

/// Whether the pod has such files.
pub(crate) fn are_made(state: &Path) -> bool {
    state.join(DIRECTORY).is_dir()
}

/// Mounts them in the spec of a container, but where it has a mount of its own.
pub(crate) fn mount_in(document: &mut Value, state: &Path) {
    let is_read_only = document.pointer("/root/readonly") == Some(&Value::Bool(true));
    let access = if is_read_only { "ro" } else { "rw" };
    let Some(document) = document.as_object_mut() else { return };
    let Some(mounts) = document.entry("mounts").or_insert_with(|| json!([])).as_array_mut() else { return };
    for name in [HOSTS, HOSTNAME, RESOLV_CONF] {
        let destination = Path::new("/etc").join(name);
        if !mounts.iter().any(|mount| mount["destination"] == json!(destination)) {
            mounts.push(bind(&destination, &state.join(DIRECTORY).join(name), access));
        }
    }
    // Without a word about it a container gets a tmpfs that is its own. What this one names is not on the host: Role
    // knows it as the pod's, which the guest has.
    let shm = Path::new("/dev/shm");
    mounts.retain(|mount| mount["destination"] != json!(shm) || mount["type"] != "tmpfs");
    if !mounts.iter().any(|mount| mount["destination"] == json!(shm)) {
        mounts.push(bind(shm, &state.join("shm"), "rw"));
    }
}

fn bind(destination: &Path, source: &Path, access: &str) -> Value {
    json!({
        "destination": destination, "type": "bind", "source": source, "options": ["rbind", "rprivate", access],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{pod::container_role::Role, testing::private_mounts};

    #[test]
    fn the_files_are_as_the_pod_says_and_go_with_it() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        assert!(!are_made(dir.path()));
        let files = SandboxFiles { hostname: "db-1", resolv_conf: Some("nameserver 10.0.0.10\n") };
        files.make(&mut journal, dir.path()).unwrap();
        assert!(are_made(dir.path()));
        let read = |name: &str| fs::read_to_string(dir.path().join("etc").join(name)).unwrap();
        assert_eq!(
            (read(HOSTNAME).as_str(), read(RESOLV_CONF).as_str()),
            ("db-1\n", "nameserver 10.0.0.10\n")
        );
        assert_eq!(read(HOSTS), of_host(HOSTS).unwrap());
        // A container that writes without end fills its pod's files, and nothing else.
        let full = fs::write(dir.path().join("etc/hosts"), vec![0; 2 << 20]).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        journal.undo().unwrap();
        assert!(!are_made(dir.path()));
    }

    #[test]
    fn a_container_gets_what_it_does_not_mount_itself() {
        let mut spec = json!({"root": {"readonly": true}, "mounts": [
            {"destination": "/etc/hosts", "type": "bind", "source": "/kubelet/hosts"},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm"},
        ]});
        let state = Path::new("/run/bulkhead/k8s.io/s");
        mount_in(&mut spec, state);
        let options = |access| json!(["rbind", "rprivate", access]);
        assert_eq!(
            spec["mounts"],
            json!([
                {"destination": "/etc/hosts", "type": "bind", "source": "/kubelet/hosts"},
                {"destination": "/etc/hostname", "type": "bind", "source": state.join("etc/hostname"), "options": options("ro")},
                {"destination": "/etc/resolv.conf", "type": "bind", "source": state.join("etc/resolv.conf"), "options": options("ro")},
                {"destination": "/dev/shm", "type": "bind", "source": state.join("shm"), "options": options("rw")},
            ])
        );
        let member = Role::Member { sandbox_id: "s".into() };
        assert!(member.is_pod_shm(Path::new("/dev/shm"), &state.join("shm")));
    }

    #[test]
    fn a_volume_at_dev_shm_stays() {
        let volume = json!({"destination": "/dev/shm", "type": "bind", "source": "/kubelet/volume"});
        let mut spec = json!({ "mounts": [volume] });
        mount_in(&mut spec, Path::new("/run/bulkhead/k8s.io/s"));
        assert_eq!(spec["mounts"][0], volume);
        assert_eq!(spec["mounts"].as_array().unwrap().len(), 4);
    }
}
