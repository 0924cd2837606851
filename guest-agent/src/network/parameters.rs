//! Kernel parameters that a container's network namespace has from the pod's namespace on the host.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::BorrowedFd,
    path::{Component, Path, PathBuf},
};

use bulkhead_agent_api::{agent::KernelParameter, network_parameters::DIRECTORY};
use nix::sched::{CloneFlags, setns};

/// The request makes no sense.
#[derive(Debug, thiserror::Error)]
#[error("the name {name:?} is not that of a kernel parameter below {DIRECTORY}")]
pub struct InvalidName {
    /// As the request has it.
    name: String,
}

/// A parameter and its value.
#[derive(Debug)]
pub struct Parameter {
    /// Below [`DIRECTORY`].
    path: PathBuf,
    value: String,
}

impl TryFrom<KernelParameter> for Parameter {
    type Error = InvalidName;

    fn try_from(KernelParameter { name, value, .. }: KernelParameter) -> Result<Self, InvalidName> {
        let path = PathBuf::from(&name);
        let mut parts = path.components();
        if name.is_empty() || !parts.all(|part| matches!(part, Component::Normal(_))) {
            return Err(InvalidName { name });
        }
        Ok(Self { path, value })
    }
}

impl Parameter {
    fn set(&self) -> io::Result<()> {
        // The file shows the network namespace of the thread that opens it.
        let file = File::options().write(true).open(Path::new(DIRECTORY).join(&self.path));
        file?.write_all(self.value.as_bytes())
    }
}

/// What a request says.
pub fn all(parameters: Vec<KernelParameter>) -> Result<Vec<Parameter>, InvalidName> {
    parameters.into_iter().map(Parameter::try_from).collect()
}

/// Removes those that the spec of a container sets: files below /proc/sys.
pub fn leave_out(parameters: &mut Vec<Parameter>, in_spec: &[PathBuf]) {
    parameters.retain(|parameter| {
        let is_same = |path: &PathBuf| path.strip_prefix("net").is_ok_and(|path| path == parameter.path);
        !in_spec.iter().any(is_same)
    });
}

/// Sets them in the network namespace of the process `pidfd`, and leaves this thread in it.
pub fn set(pidfd: BorrowedFd<'_>, parameters: &[Parameter]) -> io::Result<()> {
    setns(pidfd, CloneFlags::CLONE_NEWNET)?;
    set_here(parameters);
    Ok(())
}

/// Sets them in the network namespace of this thread. What the kernel refuses is no reason to be without a pod: its
/// host can have a kernel with other values.
pub(super) fn set_here(parameters: &[Parameter]) {
    let refused = |parameter| Parameter::set(parameter).err().map(|error| (parameter, error));
    for (parameter, error) in parameters.iter().filter_map(refused).collect::<Vec<_>>() {
        // Some are only possible after others. For what the kernel does not have, it would look for a module again.
        let again = if error.kind() == io::ErrorKind::NotFound { Err(error) } else { parameter.set() };
        if let Err(error) = again {
            let Parameter { path, value } = parameter;
            let path = path.display();
            eprintln!(
                "bulkhead-agent: the kernel parameter net/{path} is not {value:?} as on the host: {error}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, thread};

    use nix::sched::unshare;

    use super::*;

    fn parameter(name: &str, value: &str) -> KernelParameter {
        KernelParameter { name: name.into(), value: value.into(), ..Default::default() }
    }

    #[test]
    fn only_files_below_the_directory_are_written() {
        for name in ["", "/etc/passwd", "../kernel/core_pattern", "ipv4/conf/../x/forwarding", "./x"] {
            let error = all(vec![parameter(name, "1")]).unwrap_err().to_string();
            assert_eq!(
                error,
                format!("the name {name:?} is not that of a kernel parameter below {DIRECTORY}")
            );
        }
        assert!(all(vec![parameter("ipv4/conf/eth0.7/forwarding", "1")]).is_ok());
    }

    #[test]
    fn those_of_the_spec_are_left_out() {
        let names = ["ipv4/tcp_sack", "core/somaxconn", "ipv4/conf/eth0/arp_ignore"];
        let mut parameters = all(names.map(|name| parameter(name, "1")).to_vec()).unwrap();
        leave_out(&mut parameters, &["net/core/somaxconn".into(), "kernel/shmmax".into()]);
        let left: Vec<_> = parameters.iter().map(|parameter| parameter.path.to_str().unwrap()).collect();
        assert_eq!(left, [names[0], names[2]]);
    }

    #[test]
    fn what_is_refused_stops_no_other() {
        let seen = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("these tests make network namespaces: run them as root");
            let wanted = [
                ("ipv4/no_such_parameter", "1"),
                ("ipv4/tcp_congestion_control", "none"),
                // Only possible after the next.
                ("ipv4/ip_local_port_range", "100\t60000"),
                ("ipv4/ip_unprivileged_port_start", "80"),
            ];
            let wanted = wanted.map(|(name, value)| parameter(name, value));
            set_here(&all(wanted.to_vec()).unwrap());
            let read = |name: &str| fs::read_to_string(Path::new(DIRECTORY).join(name)).unwrap();
            [read("ipv4/ip_local_port_range"), read("ipv4/ip_unprivileged_port_start")]
        };
        let seen = thread::scope(|scope| scope.spawn(seen).join().unwrap());
        assert_eq!(seen, ["100\t60000\n", "80\n"]);
    }
}
