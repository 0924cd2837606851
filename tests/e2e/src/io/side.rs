//! A side of the comparison: a container, or a guest of QEMU. Its worker does what it is told.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::guest::Guest;
use crate::bench::memory::{find_shim, find_vmm};
use crate::cases::devices::Loop;
use crate::cases::programs::on_disk;
use crate::command::Cmd;
use crate::counts::{accept, kvm_counter, kvm_directory};
use crate::ctr::{Host, Runtime, Task};
use crate::image_root::ImageRoot;
use crate::network::{Bridge, GATEWAY, Namespace, address};

const WORKER: &str = include_str!("worker.py");
const NGINX: &str = include_str!("nginx.conf");
const DATABASE: &str = include_str!("database.sh");
pub(super) const MIB: usize = 1 << 20;
/// How long a piece of work, or the start of a side, may take on an ordinary machine.
const LIMIT: Duration = Duration::from_secs(120);
/// A VM's memory consists of blocks of so many MiB.
const BLOCK_MIB: u64 = 128;

/// Files that are unpacked: their number, and bytes of each.
const UNPACKED: [&str; 2] = ["200", "2048"];
/// Files of which the attributes are read.
const MANY: usize = 5000;
/// Directories that these are in.
const DIRECTORIES: usize = 10;
/// Bytes of the page that is asked for by HTTP.
const PAGE: usize = 100_000;
/// Bytes of a datagram, and how many are sent before the receiver answers. That many fit in a socket's buffer.
const DATAGRAM: usize = 64;
const BURST: usize = 100;

/// Where the workers' servers listen.
const HTTP_PORT: u16 = 8080;
const ACCEPTS_PORT: u16 = 8081;
const REDIS_PORT: u16 = 6379;

/// What a side has for itself.
pub(super) struct Place {
    pub(super) image: ImageRoot,
    pub(super) volume: TempDir,
    pub(super) disk: Loop,
    /// Its address on the bridge ends with this number.
    pub(super) number: u8,
}

/// A container or guest that runs.
pub(super) struct Side<'h> {
    orders: BufReader<TcpStream>,
    listener: TcpListener,
    datagrams: UdpSocket,
    limit: Duration,
    place: &'h Place,
    /// The block volume, as its programs name it.
    disk: String,
    /// KVM's counters, if it is in a VM.
    kvm: Option<PathBuf>,
    _container: Option<Task<'h>>,
    _guest: Option<Guest>,
}

/// Makes a database for pgbench in a directory of the host. Each volume gets a copy.
pub(super) fn make_database(host: &Host) -> Result<TempDir> {
    let directory = on_disk()?;
    Cmd::new("sh")
        .args(["-c", DATABASE, "sh", &directory.path().display().to_string()])
        .limit(host.patience(LIMIT))
        .run()?
        .succeeds()
        .context("cannot make a database")?;
    Ok(directory)
}

impl Place {
    pub(super) fn make(number: u8, database: &TempDir) -> Result<Self> {
        let image = ImageRoot::make()?;
        image.write("srv/worker.py", WORKER.as_bytes())?;
        image.write("srv/nginx.conf", NGINX.as_bytes())?;
        image.write("srv/page", &vec![b'x'; PAGE])?;
        write_many(&image.layer().join("srv/many"))?;
        let volume = on_disk()?;
        // The database's user looks for it there.
        fs::set_permissions(volume.path(), Permissions::from_mode(0o755))?;
        let database = database.path().join("database");
        Cmd::new("cp").args(["-a"]).args([database.as_path(), volume.path()]).run()?.succeeds()?;
        Ok(Self { image, volume, disk: Loop::new()?, number })
    }
}

/// What a worker connects to.
struct Listeners {
    listener: TcpListener,
    datagrams: UdpSocket,
    port: u16,
}

impl Listeners {
    fn bind() -> Result<Self> {
        let listener = TcpListener::bind((GATEWAY, 0)).context("cannot listen on the bridge")?;
        let port = listener.local_addr()?.port();
        let datagrams = UdpSocket::bind((GATEWAY, port)).context("cannot receive datagrams on the bridge")?;
        Ok(Self { listener, datagrams, port })
    }
}

impl<'h> Side<'h> {
    /// Starts a container.
    pub(super) fn of_container(host: &'h Host, place: &'h Place, namespace: &'h Namespace) -> Result<Self> {
        let listeners = Listeners::bind()?;
        let disk = place.disk.path().to_owned();
        let container = namespace
            .container(host)
            .bind(place.volume.path(), "/data", "rbind:rw")
            .flags(["--device", &disk]);
        let port = listeners.port.to_string();
        let task = place.image.detach(host, container, &["python3", "/srv/worker.py", GATEWAY, &port])?;
        let limit = host.patience(LIMIT);
        let orders = accept(&listeners.listener, limit)?;
        let kvm = match host.runtime() {
            Runtime::Runc => None,
            Runtime::Bulkhead => Some(kvm_directory(find_vmm(find_shim(Runtime::Bulkhead, task.id())?)?)?),
        };
        let side = Self { kvm, _container: Some(task), ..Self::new(listeners, orders, place, limit)? };
        Self { disk, ..side }.prepared()
    }

    /// Boots a guest of QEMU.
    pub(super) fn of_guest(host: &Host, place: &'h Place, bridge: &Bridge, memory_mib: u64) -> Result<Self> {
        let listeners = Listeners::bind()?;
        let limit = host.patience(LIMIT);
        let guest = Guest::boot(place, bridge, memory_mib, listeners.port, limit)?;
        let orders = accept(&listeners.listener, limit)?;
        let kvm = Some(kvm_directory(guest.pid())?);
        let side = Self { kvm, _guest: Some(guest), ..Self::new(listeners, orders, place, limit)? };
        Self { disk: Guest::DISK.to_owned(), ..side }.prepared()
    }

    fn new(listeners: Listeners, orders: TcpStream, place: &'h Place, limit: Duration) -> Result<Self> {
        let Listeners { listener, datagrams, .. } = listeners;
        datagrams.set_read_timeout(Some(limit))?;
        let orders = BufReader::new(orders);
        let disk = String::new();
        Ok(Self {
            orders,
            listener,
            datagrams,
            limit,
            place,
            disk,
            kvm: None,
            _container: None,
            _guest: None,
        })
    }

    /// Makes the files, and starts the servers.
    fn prepared(self) -> Result<Self> {
        self.order(&format!("prepare {}", UNPACKED.join(" ")))?;
        Ok(self)
    }

    /// The memory that its programs see, in whole blocks. What the kernel keeps for itself is less than a block.
    pub(super) fn memory_mib(&self) -> Result<u64> {
        self.begin("memory_kib")?;
        let mib = self.answer_of_worker()? / 1024.0;
        Ok((mib.ceil() as u64).next_multiple_of(BLOCK_MIB))
    }

    /// The exits of its vCPUs since they were made; None: there is no VM.
    pub(super) fn exits(&self) -> Result<Option<f64>> {
        self.kvm.as_deref().map(|kvm| kvm_counter(kvm, "exits")).transpose()
    }

    /// Has the worker do something, and waits until it has done it.
    pub(super) fn order(&self, line: &str) -> Result<Duration> {
        self.begin(line)?;
        self.end()
    }

    /// The same with the block volume.
    pub(super) fn order_disk(&self, function: &str, arguments: &str) -> Result<Duration> {
        self.order(&format!("{function} {} {arguments}", self.disk))
    }

    fn begin(&self, line: &str) -> Result<()> {
        Ok(self.orders.get_ref().write_all(format!("{line}\n").as_bytes())?)
    }

    /// The time that the worker has measured.
    fn end(&self) -> Result<Duration> {
        Ok(Duration::try_from_secs_f64(self.answer_of_worker()?)?)
    }

    fn answer_of_worker(&self) -> Result<f64> {
        let mut answer = String::new();
        // One line comes, and nothing after it.
        BufReader::new(self.orders.get_ref()).read_line(&mut answer).context("the worker does not answer")?;
        answer.trim().parse().with_context(|| format!("the worker answers {answer:?}"))
    }

    /// Replaces a file that the worker has read.
    pub(super) fn write_cold(&self, round: u32, mib: usize) -> Result<()> {
        let path = self.place.volume.path();
        fs::write(path.join("new"), vec![round as u8; mib * MIB])?;
        Ok(fs::rename(path.join("new"), path.join("cold"))?)
    }

    /// Replaces the files whose attributes the worker has read.
    pub(super) fn write_many(&self) -> Result<()> {
        let many = self.place.volume.path().join("many");
        if many.exists() {
            fs::remove_dir_all(&many)?;
        }
        write_many(&many)
    }

    /// Receives what the worker sends.
    pub(super) fn receive(&self, mib: usize) -> Result<Duration> {
        self.begin(&format!("send {mib}"))?;
        let mut stream = accept(&self.listener, self.limit)?;
        let mut data = Vec::new();
        stream.read_to_end(&mut data)?;
        ensure!(data.len() == mib * MIB, "the worker has sent {} bytes", data.len());
        stream.write_all(b".")?;
        self.end()
    }

    /// Sends to the worker.
    pub(super) fn send(&self, mib: usize) -> Result<Duration> {
        self.begin(&format!("receive {mib}"))?;
        let mut stream = accept(&self.listener, self.limit)?;
        stream.write_all(&vec![b'x'; mib * MIB])?;
        drop(stream);
        self.end()
    }

    /// Answers each byte of the worker.
    pub(super) fn answer(&self, trips: usize) -> Result<Duration> {
        self.begin(&format!("round_trips {trips}"))?;
        let mut stream = accept(&self.listener, self.limit)?;
        stream.set_nodelay(true)?;
        for _ in 0..trips {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            stream.write_all(&byte)?;
        }
        self.end()
    }

    /// Receives datagrams of the worker, and answers after each burst.
    pub(super) fn receive_datagrams(&self, bursts: usize) -> Result<Duration> {
        self.begin(&format!("send_datagrams {bursts} {BURST} {DATAGRAM}"))?;
        for _ in 0..bursts {
            let from = self.burst()?;
            self.datagrams.send_to(b".", from)?;
        }
        self.end()
    }

    fn burst(&self) -> Result<SocketAddr> {
        let mut datagram = [0; DATAGRAM];
        let mut receive = || self.datagrams.recv_from(&mut datagram).context("a datagram was lost");
        for _ in 1..BURST {
            receive()?;
        }
        Ok(receive()?.1)
    }

    /// Sends datagrams to the worker, which answers after each burst.
    pub(super) fn send_datagrams(&self, bursts: usize) -> Result<Duration> {
        self.begin(&format!("receive_datagrams {bursts} {BURST} {DATAGRAM}"))?;
        let mut answer = [0];
        for _ in 0..bursts {
            let (_, to) = self.datagrams.recv_from(&mut answer).context("a datagram was lost")?;
            for _ in 0..BURST {
                self.datagrams.send_to(&[b'x'; DATAGRAM], to)?;
            }
        }
        self.end()
    }

    fn connect(&self, port: u16) -> Result<TcpStream> {
        let address: SocketAddr = format!("{}:{port}", address(self.place.number)).parse()?;
        let stream = TcpStream::connect_timeout(&address, self.limit)
            .with_context(|| format!("the worker does not listen at {address}"))?;
        stream.set_read_timeout(Some(self.limit))?;
        Ok(stream)
    }

    /// Connects to the worker again and again. Each time both ends close the connection.
    pub(super) fn make_connections(&self, count: usize) -> Result<Duration> {
        self.begin(&format!("accept {count}"))?;
        let begin = Instant::now();
        for _ in 0..count {
            let mut stream = self.connect(ACCEPTS_PORT)?;
            stream.shutdown(Shutdown::Write)?;
            ensure!(stream.read(&mut [0])? == 0, "the worker sends something");
        }
        let took = begin.elapsed();
        self.end()?;
        Ok(took)
    }

    /// Asks the worker's nginx for a page.
    pub(super) fn ask_for_pages(&self, count: usize) -> Result<Duration> {
        let begin = Instant::now();
        for _ in 0..count {
            let mut stream = self.connect(HTTP_PORT)?;
            stream.write_all(b"GET /page HTTP/1.0\r\n\r\n")?;
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer)?;
            let is_whole = answer.starts_with(b"HTTP/1.1 200") && answer.len() > PAGE;
            ensure!(is_whole, "no page, but {} bytes", answer.len());
        }
        Ok(begin.elapsed())
    }

    /// Has redis-benchmark send commands to the worker's Redis from ten connections.
    pub(super) fn ask_redis(&self, command: &str, count: u32) -> Result<Duration> {
        let finished = Cmd::new("redis-benchmark")
            .args(["-h", &address(self.place.number), "-p", &REDIS_PORT.to_string(), "--csv", "-c", "10"])
            .args(["-n", &count.to_string(), "-t", command])
            .limit(self.limit)
            .run()?;
        let text = finished.succeeds()?.text();
        // "SET","1234.56","0.5",...
        let row = text.lines().find(|line| line.starts_with(&format!("\"{}\"", command.to_uppercase())));
        let rate = row.and_then(|row| row.split('"').nth(3)?.parse::<f64>().ok());
        let rate = rate.with_context(|| format!("redis-benchmark says no rate: {text}"))?;
        Ok(Duration::try_from_secs_f64(f64::from(count) / rate)?)
    }
}

/// Makes a directory with many files.
fn write_many(directory: &Path) -> Result<()> {
    for index in 0..MANY {
        let below = directory.join((index % DIRECTORIES).to_string());
        if index < DIRECTORIES {
            fs::create_dir_all(&below)?;
        }
        fs::write(below.join(format!("file-{index}")), "")?;
    }
    Ok(())
}
