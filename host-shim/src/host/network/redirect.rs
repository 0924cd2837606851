//! Redirects between an interface of the pod and a tap of the VMM: a packet that arrives at one of them leaves by the
//! other.
//!
//! Each has an ingress qdisc with one u32 filter that matches every packet (some kernels lack `matchall`) and
//! redirects it (tc-mirred(8)). So packets bypass the host's IP stack and keep their segmentation offloads. The
//! interface keeps its name, its addresses and the CNI's settings of its peer.
//!
//! The host does not know which multicast groups the guest joins. A veth passes on all of them. Any other interface,
//! such as a macvlan, is told to do so, by a socket that the shim keeps.

use std::{
    fs::{self, File},
    io,
    os::fd::OwnedFd,
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

use bulkhead_vmm_api::{MOST_QUEUES, tap::pass_all_multicast};
use futures::TryStreamExt;
use nix::{
    errno::Errno::{self, EBUSY, EEXIST, EINVAL, ENODEV, ENOENT},
    sys::statfs::{NSFS_MAGIC, fstatfs},
};
use rtnetlink::{
    Handle, LinkGetRequest, LinkUnspec,
    packet_core::Nla,
    packet_route::{
        RouteNetlinkMessage,
        link::{InfoData, InfoKind, InfoTun, LinkAttribute, LinkInfo, LinkMessage},
        tc::{
            TcAction, TcActionAttribute, TcActionMirrorOption, TcActionOption, TcAttribute,
            TcFilterU32Option, TcHandle, TcMessage, TcMirrorActionType, TcOption,
        },
    },
};

use super::{NetworkError, dhcp, failed, is_tap, netns, refused, replies};
use crate::types::error::chain;

/// `htons(ETH_P_ALL)`, the protocol of a filter that is to see every packet (tc-u32(8)).
const ALL_PROTOCOLS: u16 = 0x0003_u16.to_be();

/// The ingress qdisc as the parent of a filter: `ffff:`.
pub(super) const INGRESS: u32 = 0xffff_0000;

/// Packets that wait in a tap for its guest, at most: as many as the kernel lets wait in a tap with one queue
/// (DEFAULT_TX_QUEUE_LEN of Ethernet interfaces). Each may have 64 KiB, which count for no cgroup.
const MOST_PACKETS: u32 = 1000;

/// IFLA_TUN_NUM_QUEUES and IFLA_TUN_NUM_DISABLED_QUEUES of linux/if_link.h.
const NUM_QUEUES: u16 = 8;
const NUM_DISABLED_QUEUES: u16 = 9;

/// What the kernel says of a redirect instead of the index of an interface that is gone.
const GONE: u32 = 0;

/// How long the removal of a qdisc is tried while a thread that was given up adds a filter to it, or while the tap of a
/// VMM that has ended is there.
const BUSY: Duration = Duration::from_secs(1);
const BUSY_PAUSE: Duration = Duration::from_millis(1);

/// What filters the packets that arrive at an interface.
enum Ingress {
    Nothing,
    /// A qdisc as [`redirect`] makes it first, without a filter.
    Empty,
    /// A qdisc with filters, which redirect some packets to these interfaces.
    Filters(Vec<u32>),
}

/// Whether the interface `index` has an ingress or clsact qdisc other than the redirect to one of `taps`. An empty
/// qdisc, and a redirect to a tap that is gone, count too.
pub(super) async fn is_filtered(
    handle: &Handle,
    index: u32,
    qdiscs: &[TcMessage],
    taps: &[u32],
) -> Result<bool, rtnetlink::Error> {
    Ok(match ingress(handle, index, qdiscs).await? {
        Ingress::Nothing => false,
        Ingress::Empty => true,
        Ingress::Filters(targets) => !targets.iter().any(|target| taps.contains(target)),
    })
}

/// Whether the interface has a redirect to one of these taps, a redirect to a tap that is gone, or only the beginning
/// of a redirect.
async fn is_ours(handle: &Handle, index: u32, taps: &[u32]) -> Result<bool, rtnetlink::Error> {
    Ok(match ingress(handle, index, &qdiscs(handle).await?).await? {
        Ingress::Nothing => false,
        Ingress::Empty => true,
        Ingress::Filters(targets) => targets.iter().any(|target| *target == GONE || taps.contains(target)),
    })
}

/// Those of all interfaces: the kernel is asked for no single one.
pub(super) async fn qdiscs(handle: &Handle) -> Result<Vec<TcMessage>, rtnetlink::Error> {
    handle.qdisc().get().execute().try_collect().await
}

async fn ingress(handle: &Handle, index: u32, qdiscs: &[TcMessage]) -> Result<Ingress, rtnetlink::Error> {
    let is_it =
        |qdisc: &&TcMessage| qdisc.header.index == index as i32 && qdisc.header.parent == TcHandle::INGRESS;
    let Some(qdisc) = qdiscs.iter().find(is_it) else { return Ok(Ingress::Nothing) };
    // The other kind is `clsact`.
    if !qdisc.attributes.contains(&TcAttribute::Kind("ingress".into())) {
        return Ok(Ingress::Filters(Vec::new()));
    }
    let filters: Vec<_> = handle.traffic_filter(index as i32).get().ingress().execute().try_collect().await?;
    if filters.is_empty() {
        return Ok(Ingress::Empty);
    }
    Ok(Ingress::Filters(filters.iter().flat_map(targets).collect()))
}

/// Connects the interface `index` and the tap `tap` in a network namespace. Answers to a name server there reach it, if
/// the host's kernel can find them out. Blocks.
pub(super) fn install(netns: &File, index: u32, tap: &str, passes_replies: bool) -> Result<(), NetworkError> {
    netns::inside(netns, async |handle| {
        disable_ipv6(tap).map_err(failed(format!("disabling IPv6 on {tap}")))?;
        let found = link(&handle, tap).await.map_err(refused(format!("looking for {tap}")))?;
        let tap_index = found.header.index;
        if has_several_queues(&found)
            && let Err(error) = save_memory(&handle, &found).await
        {
            tracing::warn!(tap, error = chain(&error), "the tap takes much memory of the host's kernel");
        }
        let up = LinkUnspec::new_with_index(tap_index).up().build();
        handle.link().set(up).execute().await.map_err(refused(format!("bringing {tap} up")))?;
        for (from, to) in [(tap_index, index), (index, tap_index)] {
            redirect(&handle, from, to).await.map_err(refused(format!("redirecting {from} to {to}")))?;
        }
        if let Err(error) = dhcp::pass(&handle, index, tap_index).await {
            tracing::warn!(
                error = chain(&error),
                "a DHCP client on the host, such as the CNI plugin dhcp, gets no answers for the pod's interface"
            );
        }
        if passes_replies {
            pass(&handle, index, tap_index).await;
        }
        Ok(())
    })
}

/// A tap with several queues has room for 256.
fn has_several_queues(tap: &LinkMessage) -> bool {
    tap.attributes.iter().any(|attribute| matches!(attribute, LinkAttribute::NumTxQueues(2..)))
}

/// Has a tap with several queues take little more of the kernel's memory than one with a single queue. Its queues
/// together hold as many packets for the guest. And packets go to them at once: otherwise the kernel makes a qdisc for
/// each queue for which it has room when the interface comes up, which takes 6 MiB.
async fn save_memory(handle: &Handle, tap: &LinkMessage) -> Result<(), rtnetlink::Error> {
    let index = tap.header.index;
    let length = LinkAttribute::TxQueueLen(MOST_PACKETS / queues(tap).unwrap_or(MOST_QUEUES.into()));
    let shorter = LinkUnspec::new_with_index(index).append_extra_attribute(length).build();
    handle.link().set(shorter).execute().await?;
    let mut message = TcMessage::with_index(index as i32);
    message.header.parent = TcHandle::ROOT;
    message.attributes.push(TcAttribute::Kind("noqueue".into()));
    match replies::create(handle, RouteNetlinkMessage::NewQueueDiscipline(message)).await {
        // It is from an earlier connection.
        Err(error) if is(&error, EEXIST) => Ok(()),
        other => other,
    }
}

/// Has the interface `index` in a network namespace pass on packets to all multicast groups until the socket is closed.
/// None: it does so anyway. Blocks.
pub(super) fn pass_multicast(netns: &File, index: u32) -> Result<Option<OwnedFd>, NetworkError> {
    netns::inside(netns, async |handle| {
        let asked = format!("having the interface {index} pass on multicast");
        let link = found(handle.link().get().match_index(index)).await.map_err(refused(&asked))?;
        if info(&link).any(|info| *info == LinkInfo::Kind(InfoKind::Veth)) {
            return Ok(None);
        }
        pass_all_multicast(index).map(Some).map_err(failed(asked))
    })
}

pub(super) fn name_of(link: &LinkMessage) -> &str {
    let name = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.as_str()),
        _ => None,
    });
    name.unwrap_or_default()
}

pub(super) fn info(link: &LinkMessage) -> impl Iterator<Item = &LinkInfo> {
    let info = link.attributes.iter().filter_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(info) => Some(info),
        _ => None,
    });
    info.flatten()
}

/// How many queues a tap has, attached or not. None: the kernel does not say it.
fn queues(tap: &LinkMessage) -> Option<u32> {
    let data = info(tap).find_map(|info| match info {
        LinkInfo::Data(InfoData::Tun(data)) => Some(data),
        _ => None,
    })?;
    let counts =
        data.iter().filter(|attribute| [NUM_QUEUES, NUM_DISABLED_QUEUES].contains(&attribute.kind()));
    let count = |attribute: &InfoTun| {
        let mut bytes = [0; 4];
        (attribute.value_len() == bytes.len()).then(|| attribute.emit_value(&mut bytes))?;
        Some(u32::from_ne_bytes(bytes))
    };
    counts.map(count).sum::<Option<u32>>().filter(|count| *count > 0)
}

/// Lets the answers to a name server through that has been started since these interfaces and taps were connected.
/// Blocks.
pub(super) fn pass_replies(netns: &File, connected: &[(u32, String)]) -> Result<(), NetworkError> {
    netns::inside(netns, async |handle| {
        for (index, tap) in connected {
            let found = link(&handle, tap).await.map_err(refused(format!("looking for {tap}")))?;
            pass(&handle, *index, found.header.index).await;
        }
        Ok(())
    })
}

async fn pass(handle: &Handle, index: u32, tap: u32) {
    if let Err(error) = replies::pass(handle, index, tap).await {
        tracing::warn!(
            error = chain(&error),
            "docker's name server resolves the names of containers only: the host's kernel lacks cls_flower or act_ct"
        );
    }
}

/// Removes the redirects from the tap `tap`, and from the interface `index` to this tap if it is given, in a network
/// namespace. Both may be gone. Blocks.
pub(super) fn uninstall(netns: &File, index: Option<u32>, tap: &str) -> Result<(), NetworkError> {
    netns::inside(netns, async |handle| {
        let found = match link(&handle, tap).await {
            Err(e) if is_gone(&e) => None,
            found => Some(found.map_err(refused(format!("looking for {tap}")))?.header.index),
        };
        if let Some(found) = found {
            remove_all(&handle, found, tap).await?;
        }
        let Some(index) = index else { return Ok(()) };
        let name = format!("the interface {index}");
        if is_ours(&handle, index, found.as_slice()).await.map_err(looking_at(&name))? {
            remove_all(&handle, index, &name).await?;
        }
        Ok(())
    })
}

/// Removes the redirect from the interface `name` in the network namespace `path`, which was to the tap of a VMM that
/// has ended. Either of them may be gone. The other redirect ended with the tap. What another program has there stays.
/// So does what another pod has: this may be tried again much later. Blocks.
pub(crate) fn remove(path: &Path, name: &str) -> Result<(), NetworkError> {
    let netns = match netns::open(path) {
        Err(NetworkError::Namespace { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(());
        }
        other => other?,
    };
    if !is_namespace(&netns) {
        return Ok(());
    }
    netns::inside(&netns, async |handle| {
        let index = match link(&handle, name).await {
            Err(e) if is_gone(&e) => return Ok(()),
            other => other.map_err(refused(format!("looking for {name}")))?.header.index,
        };
        let begun = Instant::now();
        while !is_ours(&handle, index, &[]).await.map_err(looking_at(name))? {
            let taps = taps(&handle).await.map_err(refused("reading its interfaces"))?;
            let may_end = is_ours(&handle, index, &taps).await.map_err(looking_at(name))?;
            if !may_end || begun.elapsed() >= BUSY {
                return Ok(());
            }
            sleep(BUSY_PAUSE);
        }
        remove_all(&handle, index, name).await
    })
}

/// The taps of VMMs in the network namespace of `handle`.
async fn taps(handle: &Handle) -> Result<Vec<u32>, rtnetlink::Error> {
    let links: Vec<_> = handle.link().get().execute().try_collect().await?;
    Ok(taps_in(&links))
}

/// The indices of those of these interfaces that are taps of VMMs.
pub(super) fn taps_in(links: &[LinkMessage]) -> Vec<u32> {
    links.iter().filter(|link| is_tap(name_of(link))).map(|link| link.header.index).collect()
}

/// Where a filter of u32 redirects packets to.
fn targets(filter: &TcMessage) -> impl Iterator<Item = u32> {
    let options = filter.attributes.iter().filter_map(|attribute| match attribute {
        TcAttribute::Options(options) => Some(options),
        _ => None,
    });
    let actions = options.flatten().filter_map(|option| match option {
        TcOption::U32(TcFilterU32Option::Action(actions)) => Some(actions),
        _ => None,
    });
    let of_action = |action: &TcAction| {
        action.attributes.iter().find_map(|attribute| match attribute {
            TcActionAttribute::Options(options) => options.iter().find_map(target),
            _ => None,
        })
    };
    actions.flatten().filter_map(of_action)
}

fn target(option: &TcActionOption) -> Option<u32> {
    match option {
        TcActionOption::Mirror(TcActionMirrorOption::Parms(to))
            if to.eaction == TcMirrorActionType::EgressRedir =>
        {
            Some(to.ifindex)
        }
        _ => None,
    }
}

fn looking_at(name: &str) -> impl FnOnce(rtnetlink::Error) -> NetworkError {
    refused(format!("looking at the ingress qdisc of {name}"))
}

/// Removes the ingress qdisc of an interface and the redirects from it. It may be gone.
async fn remove_all(handle: &Handle, index: u32, name: &str) -> Result<(), NetworkError> {
    let begun = Instant::now();
    loop {
        match remove_ingress(handle, index).await {
            Err(e) if is_gone(&e) => return Ok(()),
            Err(e) if is(&e, EBUSY) && begun.elapsed() < BUSY => sleep(BUSY_PAUSE),
            other => return other.map_err(refused(format!("removing the ingress qdisc of {name}"))),
        }
    }
}

/// Without its mount the path of a namespace is an ordinary file.
fn is_namespace(file: &File) -> bool {
    fstatfs(file).is_ok_and(|stat| stat.filesystem_type() == NSFS_MAGIC)
}

/// Disables IPv6 on the tap, so that the host's kernel sends no packets to the guest.
fn disable_ipv6(name: &str) -> io::Result<()> {
    // The file shows the network namespace of the thread that opens it.
    match fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1") {
        // The kernel has no IPv6.
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

async fn link(handle: &Handle, name: &str) -> Result<LinkMessage, rtnetlink::Error> {
    found(handle.link().get().match_name(name)).await
}

/// The interface for which the kernel is asked.
async fn found(request: LinkGetRequest) -> Result<LinkMessage, rtnetlink::Error> {
    request.execute().try_next().await?.ok_or(rtnetlink::Error::RequestFailed)
}

async fn redirect(handle: &Handle, from: u32, to: u32) -> Result<(), rtnetlink::Error> {
    let index = from as i32;
    handle.qdisc().add(index).ingress().execute().await?;
    let filter = handle.traffic_filter(index).add().parent(INGRESS).protocol(ALL_PROTOCOLS);
    let added = filter.redirect(to)?.execute().await;
    if added.is_err() {
        // Otherwise the next attempt would find it, and take it for that of another program.
        remove_ingress(handle, from).await?;
    }
    added
}

pub(super) async fn remove_ingress(handle: &Handle, index: u32) -> Result<(), rtnetlink::Error> {
    let mut request = handle.qdisc().del(index as i32);
    let header = &mut request.message_mut().header;
    header.parent = TcHandle::INGRESS;
    header.handle = INGRESS.into();
    request.execute().await
}

/// ENODEV: there is no such interface. EINVAL and ENOENT: it has no ingress qdisc (kernels differ).
fn is_gone(error: &rtnetlink::Error) -> bool {
    [ENODEV, EINVAL, ENOENT].iter().any(|errno| is(error, *errno))
}

pub(super) fn is(error: &rtnetlink::Error, errno: Errno) -> bool {
    let rtnetlink::Error::NetlinkError(message) = error else { return false };
    message.raw_code() == -(errno as i32)
}
