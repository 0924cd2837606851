//! What the spec of a container gets on its way to the guest: the places and numbers that are known only when the
//! container is prepared.

use std::{borrow::Cow, sync::Arc};

use bulkhead_agent_api::{HOST_SOCKETS_DIR, SHARE_DIR};

use crate::{
    host::{host_socket::HostSocket, socket_directory::SocketDirectory},
    pod::devices::{self, Disk, Numbers},
    types::spec::edit_json,
};

/// The sources of a container's bind mounts whose places in the guest are known only when its files are prepared.
#[derive(Debug, Clone, Default)]
pub(crate) struct MovedSources {
    /// Sockets of services of the host. The guest has its own in their places.
    pub(crate) sockets: Vec<Arc<HostSocket>>,
    /// Volumes that are the pod's: the index of the mount in the spec, and the path below the share.
    pub(crate) volumes: Vec<(usize, String)>,
    /// Directories in which services of the host may have sockets. These sources stay.
    pub(crate) directories: Vec<Arc<SocketDirectory>>,
}

/// The spec for the guest, with these sources.
pub(crate) fn with_moved_sources<'s>(
    spec_json: Cow<'s, [u8]>,
    id: &str,
    moved: &MovedSources,
) -> Result<Cow<'s, [u8]>, serde_json::Error> {
    if moved.sockets.is_empty() && moved.volumes.is_empty() {
        return Ok(spec_json);
    }
    edit_json(&spec_json, |document| {
        for socket in &moved.sockets {
            let source = format!("{HOST_SOCKETS_DIR}/{id}/{}", socket.index);
            document["mounts"][socket.index]["source"] = source.into();
        }
        for (index, place) in &moved.volumes {
            document["mounts"][*index]["source"] = format!("{SHARE_DIR}/{place}").into();
        }
    })
}

/// The spec for the guest, with the guest's numbers of the block devices that it has got from the host.
pub(crate) fn with_disks<'s>(
    spec_json: Cow<'s, [u8]>,
    disks: &[(Disk, Numbers)],
) -> Result<Cow<'s, [u8]>, serde_json::Error> {
    if disks.is_empty() {
        return Ok(spec_json);
    }
    edit_json(&spec_json, |document| devices::translate(document, disks))
}

/// The spec for the guest, whose root is at `place` in the guest.
pub(crate) fn with_root<'s>(
    spec_json: Cow<'s, [u8]>,
    place: Option<String>,
) -> Result<Cow<'s, [u8]>, serde_json::Error> {
    let Some(place) = place else { return Ok(spec_json) };
    edit_json(&spec_json, |document| document["root"]["path"] = place.into())
}
