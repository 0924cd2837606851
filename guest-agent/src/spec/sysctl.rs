//! `linux.sysctl`: kernel parameters of the container's own namespaces, and no others.

use std::{
    collections::HashMap,
    path::{Component, Path, PathBuf},
};

use super::error::SpecError;

/// Whether it is a parameter of network interfaces: of one, of all that exist (`conf/all`), or the initial value for
/// new ones (`conf/default`; kernel, networking/ip-sysctl.rst). `ip_forward` is another name of such a parameter.
pub(super) fn is_of_interfaces(path: &Path) -> bool {
    let is_in_their_directories =
        || path.components().any(|part| matches!(part.as_os_str().to_str(), Some("conf" | "neigh")));
    path == Path::new("net/ipv4/ip_forward") || path.starts_with("net") && is_in_their_directories()
}

/// Whether it is `forwarding` of all interfaces of IPv4 or IPv6, which changes other parameters.
fn is_forwarding_of_all(path: &Path) -> bool {
    const NAMES: [&str; 3] =
        ["net/ipv4/ip_forward", "net/ipv4/conf/all/forwarding", "net/ipv6/conf/all/forwarding"];
    NAMES.iter().any(|name| path == Path::new(name))
}

/// Files below /proc/sys and their values, sorted. First is what changes others. `namespaces` are the container's own,
/// as `CLONE_NEW*` bits.
pub(super) fn resolve(
    sysctls: &HashMap<String, String>,
    namespaces: u64,
) -> Result<Vec<(PathBuf, String)>, SpecError> {
    let mut resolved = sysctls
        .iter()
        .map(|(name, value)| {
            let path = path_of(name);
            let field = format!("linux.sysctl[{name}]");
            if !path.components().all(|part| matches!(part, Component::Normal(_))) {
                return Err(SpecError::invalid(&field, "is not the name of a kernel parameter".into()));
            }
            match namespace_of(&path) {
                Some((bit, _)) if namespaces & bit as u64 != 0 => Ok((path, value.clone())),
                Some((_, name)) => Err(SpecError::invalid(
                    &field,
                    format!("needs a {name} namespace of the container's own"),
                )),
                None => Err(SpecError::invalid(&field, "belongs to no namespace of a container".into())),
            }
        })
        .collect::<Result<Vec<_>, _>>()?;
    resolved.sort();
    resolved.sort_by_key(|(path, _)| !is_forwarding_of_all(path));
    Ok(resolved)
}

/// As sysctl(8) reads names: whichever of `.` and `/` comes first separates, and the other one stands for it.
fn path_of(name: &str) -> PathBuf {
    let first = name.find(['.', '/']).map(|at| name.as_bytes()[at]);
    if first == Some(b'/') {
        return name.into();
    }
    let swapped = name.chars().map(|c| match c {
        '.' => '/',
        '/' => '.',
        other => other,
    });
    swapped.collect::<String>().into()
}

fn namespace_of(path: &Path) -> Option<(libc::c_int, &'static str)> {
    const IPC: [&str; 8] = [
        "kernel/msgmax",
        "kernel/msgmnb",
        "kernel/msgmni",
        "kernel/sem",
        "kernel/shmall",
        "kernel/shmmax",
        "kernel/shmmni",
        "kernel/shm_rmid_forced",
    ];
    if path.starts_with("net") {
        Some((libc::CLONE_NEWNET, "network"))
    } else if path.starts_with("fs/mqueue") || IPC.iter().any(|name| path == Path::new(name)) {
        Some((libc::CLONE_NEWIPC, "ipc"))
    } else if path == Path::new("kernel/domainname") {
        Some((libc::CLONE_NEWUTS, "uts"))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u64 = (libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS) as u64;

    fn one(name: &str, namespaces: u64) -> Result<Vec<(PathBuf, String)>, SpecError> {
        resolve(&HashMap::from([(name.to_owned(), "1".to_owned())]), namespaces)
    }

    #[test]
    fn names_become_paths() {
        for (name, path) in [
            ("net.ipv4.ip_forward", "net/ipv4/ip_forward"),
            ("net/ipv4/conf/eth0.1/forwarding", "net/ipv4/conf/eth0.1/forwarding"),
            ("net.ipv4.conf.eth0/1.forwarding", "net/ipv4/conf/eth0.1/forwarding"),
            ("kernel.shmmax", "kernel/shmmax"),
        ] {
            assert_eq!(one(name, ALL).unwrap(), [(PathBuf::from(path), "1".to_owned())]);
        }
    }

    #[test]
    fn what_changes_others_is_set_first() {
        let names = ["net.ipv4.conf.all.accept_redirects", "net.ipv4.ip_forward", "kernel.shmmax"];
        let sysctls = names.map(|name| (name.to_owned(), "1".to_owned()));
        let resolved = resolve(&HashMap::from(sysctls), ALL).unwrap();
        let paths: Vec<_> = resolved.iter().map(|(path, _)| path.to_str().unwrap()).collect();
        let expected = ["net/ipv4/ip_forward", "kernel/shmmax", "net/ipv4/conf/all/accept_redirects"];
        assert_eq!(paths, expected);
    }

    #[test]
    fn parameters_of_interfaces_are_told_apart() {
        for (path, expected) in [
            ("net/ipv4/conf/eth0/rp_filter", true),
            ("net/ipv6/conf/all/disable_ipv6", true),
            ("net/ipv4/neigh/default/gc_thresh1", true),
            ("net/ipv4/ip_forward", true),
            ("net/core/somaxconn", false),
            ("kernel/shmmax", false),
        ] {
            assert_eq!(is_of_interfaces(Path::new(path)), expected, "{path}");
        }
    }

    #[test]
    fn parameters_of_the_whole_kernel_are_refused() {
        for name in ["kernel.core_pattern", "vm.swappiness", "net/../kernel/core_pattern", "", "/etc/passwd"]
        {
            assert!(one(name, ALL).is_err(), "{name}");
        }
        let error = one("net.core.somaxconn", 0).unwrap_err().to_string();
        assert!(error.contains("linux.sysctl[net.core.somaxconn]: needs a network namespace"), "{error}");
    }
}
