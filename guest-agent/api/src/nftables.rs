//! Rules of nftables that lead what is sent to an address of the loopback interface to another port, as netlink
//! messages (linux/netfilter/nf_tables.h). The shim needs them on the host, and the agent in the guest.

use std::{
    io,
    net::IpAddr,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::{
    libc,
    sys::{
        socket::{
            AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, setsockopt, socket,
            sockopt,
        },
        time::{TimeVal, TimeValLike},
    },
};

/// Messages of one transaction are between these two (linux/netfilter/nfnetlink.h).
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const SUBSYSTEM: u16 = 10;

const NEW_TABLE: u16 = SUBSYSTEM << 8;
const NEW_CHAIN: u16 = SUBSYSTEM << 8 | 3;
const NEW_RULE: u16 = SUBSYSTEM << 8 | 6;

/// NFPROTO_INET: a table for IPv4 and IPv6.
const INET: u8 = 1;
/// NFPROTO_IPV4 and NFPROTO_IPV6.
const IPV4: u8 = 2;
const IPV6: u8 = 10;

/// NFT_TABLE_F_OWNER: the table is removed when this socket is closed, and nobody else can change it. Since Linux 5.12.
const OWNED: u32 = 2;
/// NF_INET_LOCAL_OUT.
const OUTPUT: u32 = 3;
/// NF_IP_PRI_NAT_DST.
const PRIORITY: i32 = -100;
/// NFT_REG_1.
const REGISTER: u32 = 1;
/// Keys of the expression `meta`: NFT_META_NFPROTO and NFT_META_L4PROTO.
const FAMILY: u32 = 15;
const PROTOCOL: u32 = 16;
/// NFT_PAYLOAD_NETWORK_HEADER and NFT_PAYLOAD_TRANSPORT_HEADER.
const NETWORK_HEADER: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;
/// NFT_NAT_DNAT.
const DESTINATION: u32 = 1;
/// NFT_CMP_EQ.
const EQUAL: u32 = 0;

/// How long an answer is waited for. The kernel queues all of them before send(2) returns.
const ANSWER_SECONDS: i64 = 10;

/// The size of a message's header, and of what follows it in each message of nftables (`struct nfgenmsg`).
const HEADER: usize = 16;
/// The largest answer that is read: an error and the message that it is about.
const ANSWER: usize = 8 << 10;

/// The protocol of what is redirected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    Tcp,
    Udp,
}

/// What is sent to an address, and where it arrives.
#[derive(Debug, Clone, Copy)]
pub struct Redirect {
    pub protocol: Protocol,
    /// An address of the loopback interface.
    pub address: IpAddr,
    /// None: any port.
    pub port: Option<u16>,
    /// The port of the same address to which it goes instead.
    pub to: u16,
}

/// Attributes one after another, each with its header and padding (netlink(7)).
#[derive(Default)]
struct Attributes(Vec<u8>);

impl Attributes {
    fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        let length = value.len() + 4;
        self.0.extend((length as u16).to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    fn number(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    fn text(self, kind: u16, value: &str) -> Self {
        self.bytes(kind, &[value.as_bytes(), b"\0"].concat())
    }

    fn nested(self, kind: u16, value: Attributes) -> Self {
        const NESTED: u16 = 1 << 15;
        self.bytes(kind | NESTED, &value.0)
    }

    /// An expression of a rule: its name, and its attributes.
    fn expression(self, name: &str, attributes: Attributes) -> Self {
        self.nested(1, Attributes::default().text(1, name).nested(2, attributes))
    }

    /// Goes on with the rule if the register has this value.
    fn compare(self, value: &[u8]) -> Self {
        let value = Attributes::default().bytes(1, value);
        let compare = Attributes::default().number(1, REGISTER).number(2, EQUAL).nested(3, value);
        self.expression("cmp", compare)
    }

    /// Loads a property of the packet into the register.
    fn meta(self, key: u32) -> Self {
        self.expression("meta", Attributes::default().number(1, REGISTER).number(2, key))
    }

    /// Loads bytes of one of the packet's headers into the register.
    fn payload(self, header: u32, offset: u32, length: usize) -> Self {
        let payload = Attributes::default().number(1, REGISTER).number(2, header).number(3, offset);
        self.expression("payload", payload.number(4, length as u32))
    }
}

/// The messages of one transaction.
#[derive(Default)]
struct Batch {
    bytes: Vec<u8>,
    sequence: u32,
}

impl Batch {
    fn message(&mut self, kind: u16, flags: i32, family: u8, resource: u16, attributes: &Attributes) {
        let length = HEADER + 4 + attributes.0.len();
        self.bytes.extend((length as u32).to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(((libc::NLM_F_REQUEST | flags) as u16).to_ne_bytes());
        self.bytes.extend(self.sequence.to_ne_bytes());
        self.bytes.extend([0; 4]);
        self.bytes.extend([family, 0]);
        self.bytes.extend(resource.to_be_bytes());
        self.bytes.extend(&attributes.0);
        self.sequence += 1;
    }

    fn create(&mut self, kind: u16, attributes: &Attributes) {
        self.message(kind, libc::NLM_F_CREATE | libc::NLM_F_ACK, INET, 0, attributes);
    }
}

/// Redirects what is sent in this thread's network namespace. `name` is the name of the table and of its one chain. The
/// rules last as long as the returned socket.
pub fn redirect(name: &str, redirects: &[Redirect]) -> io::Result<OwnedFd> {
    let mut batch = Batch::default();
    batch.message(BATCH_BEGIN, 0, 0, SUBSYSTEM, &Attributes::default());
    batch.create(NEW_TABLE, &Attributes::default().text(1, name).number(2, OWNED));
    let hook = Attributes::default().number(1, OUTPUT).bytes(2, &PRIORITY.to_be_bytes());
    let chain = Attributes::default().text(1, name).text(3, name).nested(4, hook).text(7, "nat");
    batch.create(NEW_CHAIN, &chain);
    for redirect in redirects {
        let rule = Attributes::default().text(1, name).text(2, name).nested(4, expressions(*redirect));
        batch.create(NEW_RULE, &rule);
    }
    let acknowledged = batch.sequence - 1;
    batch.message(BATCH_END, 0, 0, SUBSYSTEM, &Attributes::default());

    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkNetFilter,
    )?;
    setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::seconds(ANSWER_SECONDS))?;
    send(socket.as_raw_fd(), &batch.bytes, MsgFlags::empty())?;
    let mut answers = 0;
    while answers < acknowledged {
        let mut buffer = [0; ANSWER];
        let length = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        answers += check(&buffer[..length])?;
    }
    Ok(socket)
}

fn expressions(Redirect { protocol, address, port, to }: Redirect) -> Attributes {
    let (family, address, offset) = match address {
        IpAddr::V4(address) => (IPV4, address.octets().to_vec(), 16),
        IpAddr::V6(address) => (IPV6, address.octets().to_vec(), 24),
    };
    let protocol = match protocol {
        Protocol::Tcp => libc::IPPROTO_TCP,
        Protocol::Udp => libc::IPPROTO_UDP,
    };
    let mut rule = Attributes::default()
        .meta(FAMILY)
        .compare(&[family])
        .payload(NETWORK_HEADER, offset, address.len())
        .compare(&address)
        .meta(PROTOCOL)
        .compare(&[protocol as u8]);
    if let Some(port) = port {
        // The destination is the second field of both headers.
        rule = rule.payload(TRANSPORT_HEADER, 2, 2).compare(&port.to_be_bytes());
    }
    let to = Attributes::default().bytes(1, &to.to_be_bytes());
    // Without an address: it stays.
    let nat = Attributes::default().number(1, DESTINATION).number(2, family.into()).number(5, REGISTER);
    rule.expression("immediate", Attributes::default().number(1, REGISTER).nested(2, to))
        .expression("nat", nat)
}

/// Returns how many acknowledgements there are in the kernel's `answer`, or the first error.
fn check(answer: &[u8]) -> io::Result<u32> {
    let broken = || io::Error::other("the answer of the kernel is broken");
    let mut count = 0;
    let mut left = answer;
    while !left.is_empty() {
        let field = |range| left.get(range).and_then(|bytes: &[u8]| bytes.try_into().ok());
        let length = field(0..4).map(u32::from_ne_bytes).ok_or_else(broken)? as usize;
        // The header is followed by a negative error number, or 0.
        let error = field(HEADER..HEADER + 4).map(i32::from_ne_bytes).ok_or_else(broken)?;
        if error != 0 {
            return Err(io::Error::from_raw_os_error(-error));
        }
        count += 1;
        left = left.get(length.max(HEADER).next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(count)
}
