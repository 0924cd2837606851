//! The offloads of a network interface, by the ioctl of ethtool(8). libc and nix have no types for it.

use std::{io, os::fd::AsRawFd};

use super::result::check;

/// Commands of linux/ethtool.h, and the set of strings that has the names of the offloads.
const GET_STRINGS: u32 = 0x1b;
const GET_COUNT: u32 = 0x37;
const SET_FEATURES: u32 = 0x3b;
const FEATURE_NAMES: u32 = 4;
/// Bytes of a name, and the most names: a kernel keeps the offloads in 64 bits.
const NAME_LEN: usize = 32;
const MAX_NAMES: usize = 64;

/// `struct ethtool_sset_info` for one set.
#[repr(C)]
struct Count {
    command: u32,
    reserved: u32,
    sets: u64,
    count: u32,
}

/// `struct ethtool_gstrings`.
#[repr(C)]
struct Names {
    command: u32,
    set: u32,
    count: u32,
    names: [[u8; NAME_LEN]; MAX_NAMES],
}

/// `struct ethtool_sfeatures`. A bit of a word is an offload.
#[repr(C)]
struct Features {
    command: u32,
    words: u32,
    features: [Word; MAX_NAMES / 32],
}

/// `struct ethtool_set_features_block`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Word {
    valid: u32,
    requested: u32,
}

/// Enables the offload that ethtool(8) calls `name` for the interface `index` of the caller's network namespace. Does
/// nothing if its device does not have it. Returns NotFound if the kernel knows no such offload.
pub fn enable_offload(index: u32, name: &str) -> io::Result<()> {
    let mut count = Count { command: GET_COUNT, reserved: 0, sets: 1 << FEATURE_NAMES, count: 0 };
    request(index, &mut count)?;
    if count.count as usize > MAX_NAMES {
        return Err(io::Error::other("the kernel has more than 64 offloads"));
    }
    // The kernel writes as many names as it has, which it was asked for.
    let mut names = Names {
        command: GET_STRINGS,
        set: FEATURE_NAMES,
        count: count.count,
        names: [[0; NAME_LEN]; MAX_NAMES],
    };
    request(index, &mut names)?;
    let is_it = |bytes: &[u8; NAME_LEN]| bytes.split(|byte| *byte == 0).next() == Some(name.as_bytes());
    let bit = names.names.iter().position(is_it).ok_or(io::ErrorKind::NotFound)?;
    let words = count.count.div_ceil(32);
    let mut features = Features { command: SET_FEATURES, words, features: [Word::default(); MAX_NAMES / 32] };
    if let Some(word) = features.features.get_mut(bit / 32) {
        *word = Word { valid: 1 << (bit % 32), requested: 1 << (bit % 32) };
    }
    request(index, &mut features)
}

/// Sends a request of ethtool: a structure of the command in its first field, with room for all that the kernel writes.
pub(super) fn request<T>(index: u32, argument: &mut T) -> io::Result<()> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
    // SAFETY: all-zero bytes are a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // SAFETY: the name has IF_NAMESIZE bytes.
    if unsafe { libc::if_indextoname(index, request.ifr_name.as_mut_ptr()) }.is_null() {
        return Err(io::Error::last_os_error());
    }
    request.ifr_ifru.ifru_data = std::ptr::from_mut(argument).cast();
    // SAFETY: SIOCETHTOOL reads an ifreq, which leads to a structure of the command in its first field. The kernel
    // writes to this structure, and not beyond its end: the caller has compared the number of names with its room.
    check(i64::from(unsafe {
        libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as libc::Ioctl, &raw mut request)
    }))
    .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offload_is_found_by_its_name() {
        // The loopback interface has it always.
        enable_offload(1, "tx-udp-segmentation").unwrap();
        assert_eq!(enable_offload(1, "tx-none").unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(enable_offload(u32::MAX, "tx-udp-segmentation").is_err());
    }
}
