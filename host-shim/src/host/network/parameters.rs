//! Kernel parameters of the pod's network namespace that the guest is to have too.

use std::{
    fs::File,
    io::{self, Read},
    iter, mem,
};

use bulkhead_agent_api::{
    agent::KernelParameter,
    network_parameters::{DIRECTORY, FAMILIES, MAX_VALUE, OF_NAMESPACE, OfInterfaces},
};
use rtnetlink::{
    packet_core::Emitable,
    packet_route::link::{AfSpecInet, AfSpecInet6, AfSpecUnspec, LinkAttribute, LinkMessage},
};
use rustix::fs::{Mode, OFlags, openat};

use crate::types::error::chain;

/// The name of the loopback interface.
const LOOPBACK: &str = "lo";

/// What a namespace has that is not so in a new one of the guest's kernel.
#[derive(Debug, Default)]
pub(crate) struct Parameters {
    /// Those that are to be set before there is an interface, in this order.
    of_namespace: Vec<KernelParameter>,
    /// What an interface of the guest begins with then, in the order of [`FAMILIES`] and their lists.
    initial: [Vec<String>; FAMILIES.len()],
}

impl Parameters {
    /// Reads those of the namespace that this thread is in.
    pub(super) fn read(loopback: &OfInterface) -> Self {
        // These files show the network namespace of the thread that opens them.
        let directory = directory("");
        let mut of_namespace = Vec::new();
        for (name, expected) in OF_NAMESPACE {
            let found = value(directory.as_ref(), name);
            of_namespace.extend(different(name.into(), found, expected));
        }
        let initial = FAMILIES.map(|(family, list)| {
            let all = values(&format!("{family}/conf/all"), list);
            let default = values(&format!("{family}/conf/default"), list);
            // The kernel makes others of `forwarding` of `all`, which is set first.
            let forwards = all.first().cloned().flatten().unwrap_or_else(|| "0".into());
            let expected_of_all = |parameter: &OfInterfaces| match (family, parameter.name) {
                ("ipv4", "accept_redirects") if forwards != "0" => "0",
                _ => parameter.all.unwrap_or_default(),
            };
            let after = |parameter: &OfInterfaces, expected: &'static str| match parameter.name {
                "forwarding" => forwards.clone(),
                _ => expected.into(),
            };
            let mut add = |place: &str, parameter: &OfInterfaces, found, expected: &str| {
                let name = format!("{family}/conf/{place}/{}", parameter.name);
                of_namespace.extend(different(name, found, expected));
            };
            for (parameter, found) in iter::zip(list, &all) {
                add("all", parameter, found.clone(), expected_of_all(parameter));
            }
            for (parameter, found) in iter::zip(list, &default) {
                add("default", parameter, found.clone(), &after(parameter, parameter.default));
            }
            for parameter in list {
                let found = loopback.value(family, parameter);
                add(LOOPBACK, parameter, found, &after(parameter, parameter.loopback));
            }
            let initial = iter::zip(list, default);
            initial
                .map(|(parameter, found)| found.unwrap_or_else(|| after(parameter, parameter.default)))
                .collect()
        });
        Self { of_namespace, initial }
    }

    /// Those of the namespace itself, once.
    pub(crate) fn take_those_of_namespace(&mut self) -> Vec<KernelParameter> {
        mem::take(&mut self.of_namespace)
    }

    /// Those of an interface that are to be set in the guest.
    pub(crate) fn of_interface(&self, name: &str, interface: &OfInterface) -> Vec<KernelParameter> {
        let mut parameters = Vec::new();
        for ((family, list), initial) in iter::zip(FAMILIES, &self.initial) {
            for (parameter, expected) in iter::zip(list, initial) {
                let path = format!("{family}/conf/{name}/{}", parameter.name);
                parameters.extend(different(path, interface.value(family, parameter), expected));
            }
        }
        parameters
    }
}

/// Those of an interface, as the kernel sends them with it.
#[derive(Debug, Default)]
pub(crate) struct OfInterface {
    /// Numbers of 32 bits ([`OfInterfaces::place`]).
    ipv4: Vec<u8>,
    ipv6: Vec<u8>,
}

impl OfInterface {
    pub(super) fn of(link: &LinkMessage) -> Self {
        let mut found = Self::default();
        for attribute in &link.attributes {
            let LinkAttribute::AfSpecUnspec(families) = attribute else { continue };
            for family in families {
                match family {
                    AfSpecUnspec::Inet(parts) => {
                        let array = parts.iter().find_map(|part| match part {
                            AfSpecInet::DevConf(array) => Some(bytes(array)),
                            _ => None,
                        });
                        found.ipv4 = array.unwrap_or_default();
                    }
                    AfSpecUnspec::Inet6(parts) => {
                        let array = parts.iter().find_map(|part| match part {
                            AfSpecInet6::DevConf(array) => Some(bytes(array)),
                            _ => None,
                        });
                        found.ipv6 = array.unwrap_or_default();
                    }
                    _ => {}
                }
            }
        }
        found
    }

    pub(super) fn value(&self, family: &str, parameter: &OfInterfaces) -> Option<String> {
        let array = if family == "ipv4" { &self.ipv4 } else { &self.ipv6 };
        let (numbers, _) = array.as_chunks();
        Some(i32::from_ne_bytes(*numbers.get(parameter.place)?).to_string())
    }
}

fn bytes(array: &impl Emitable) -> Vec<u8> {
    let mut bytes = vec![0; array.buffer_len()];
    array.emit(&mut bytes);
    bytes
}

/// A parameter that this kernel has and that is not as expected.
fn different(name: String, found: Option<String>, expected: &str) -> Option<KernelParameter> {
    let value = found.filter(|found| found != expected)?;
    Some(KernelParameter { name, value, ..Default::default() })
}

fn values(path: &str, list: &[OfInterfaces]) -> Vec<Option<String>> {
    let directory = directory(path);
    let value = |parameter: &OfInterfaces| value(directory.as_ref(), parameter.name);
    list.iter().map(|parameter| parameter.all.and_then(|_| value(parameter))).collect()
}

/// From an open directory the kernel finds the files sooner. A kernel without IPv6 has no directory of it.
fn directory(path: &str) -> Option<File> {
    File::open(format!("{DIRECTORY}/{path}")).ok()
}

fn value(directory: Option<&File>, name: &str) -> Option<String> {
    match read(directory?, name) {
        Ok(value) => Some(value),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            tracing::warn!(parameter = name, error = chain(&error), "the guest does not get it from the pod");
            None
        }
    }
}

fn read(directory: &File, name: &str) -> io::Result<String> {
    let mut file = File::from(openat(directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?);
    // A list ends with the first read.
    let mut bytes = [0; MAX_VALUE + 1];
    let length = file.read(&mut bytes)?;
    let text = bytes.get(..length).filter(|text| text.len() <= MAX_VALUE);
    let text = text.ok_or_else(|| io::Error::other(format!("it has more than {MAX_VALUE} bytes")))?;
    Ok(String::from_utf8_lossy(text).trim_end().to_owned())
}
