//! The channels of a network interface, which are its pairs of queues, by the ioctl of ethtool(8). libc and nix have no
//! types for it.

use std::io;

use super::offload::request;

/// Commands of linux/ethtool.h.
const GET_CHANNELS: u32 = 0x3c;
const SET_CHANNELS: u32 = 0x3d;

/// `struct ethtool_channels`.
#[repr(C)]
#[derive(Default)]
struct Channels {
    command: u32,
    most_receiving: u32,
    most_sending: u32,
    most_other: u32,
    most_combined: u32,
    receiving: u32,
    sending: u32,
    other: u32,
    combined: u32,
}

/// Has the interface `index` of the caller's network namespace use `wanted` channels, or as many as it has. One that
/// uses as many or more is left alone, and so is one that has none. Returns how many it used and uses.
pub fn raise_channels(index: u32, wanted: u32) -> io::Result<(u32, u32)> {
    let mut channels = Channels { command: GET_CHANNELS, ..Channels::default() };
    match request(index, &mut channels) {
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => return Ok((0, 0)),
        other => other?,
    }
    let (used, wanted) = (channels.combined, wanted.min(channels.most_combined));
    if wanted <= used {
        return Ok((used, used));
    }
    request(index, &mut Channels { command: SET_CHANNELS, combined: wanted, ..channels })?;
    Ok((used, wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_without_channels_is_left_alone() {
        // The loopback interface.
        assert_eq!(raise_channels(1, 4).unwrap(), (0, 0));
        assert!(raise_channels(u32::MAX, 4).is_err());
    }
}
