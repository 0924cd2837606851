//! Compares the files and the network of a container with those of a container of runc.
//!
//! Both containers run all the time, each with a root, a volume and a network of its own. They take turns, and every
//! other round goes backwards (A B, B A, ...), so that what disturbs the host for a while disturbs both. The containers
//! measure the time.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use tempfile::TempDir;

use crate::bench::facts;
use crate::cases::programs::on_disk;
use crate::containerd::Version;
use crate::counts::accept;
use crate::ctr::{Host, Runtime, Task};
use crate::image_root::ImageRoot;
use crate::network::{Bridge, GATEWAY, Namespace};

const WORKER: &str = include_str!("io/worker.py");
const MIB: usize = 1 << 20;
/// How long a piece of work may take on an ordinary machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Files that are unpacked: their number, and bytes of each.
const UNPACKED: [&str; 2] = ["500", "2048"];
/// Files of which the attributes are read.
const MANY: usize = 5000;
/// Directories that these are in.
const DIRECTORIES: usize = 10;
/// MiB of a file that is read for the first time.
const COLD: usize = 8;
/// MiB that are sent.
const SENT: usize = 4;
/// Bytes that go back and forth.
const TRIPS: usize = 100;

/// What was measured. `cargo xtask bench io` reads it.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    facts: BTreeMap<&'static str, String>,
    rows: Vec<Row>,
}

/// A kind of work, and how long it took in each round.
#[derive(Debug, Serialize)]
struct Row {
    what: &'static str,
    runc_ms: Vec<f64>,
    bulkhead_ms: Vec<f64>,
}

/// A kind of work.
struct Work {
    what: &'static str,
    /// What the host does before it. It gets the number of the round.
    prepare: fn(&Side<'_>, u32) -> Result<()>,
    /// Does it, and returns how long it took.
    run: fn(&Side<'_>) -> Result<Duration>,
}

const WORKS: &[Work] = &[
    Work {
        what: "500 buffered writes of 4 KiB at random, volume",
        prepare: nothing,
        run: |side| side.order("write_at_random /data 500"),
    },
    Work {
        what: "500 buffered writes of 4 KiB at random, root",
        prepare: nothing,
        run: |side| side.order("write_at_random /srv 500"),
    },
    Work {
        what: "5,000 reads of 4 KiB at random, cached, volume",
        prepare: nothing,
        run: |side| side.order("read_at_random /data 5000"),
    },
    Work {
        what: "16 MiB read again by 1 MiB, root",
        prepare: nothing,
        run: |side| side.order("read /srv/file"),
    },
    Work {
        what: "8 MiB read for the first time by 1 MiB, volume",
        prepare: |side, round| side.write_cold(round),
        run: |side| side.order("read /data/cold"),
    },
    Work {
        what: "500 files of 2 KiB unpacked by tar, volume",
        prepare: nothing,
        run: |side| side.order("unpack /data"),
    },
    Work {
        what: "500 files of 2 KiB unpacked by tar, root",
        prepare: nothing,
        run: |side| side.order("unpack /srv"),
    },
    Work {
        what: "attributes of 5,000 files for the first time, volume",
        prepare: |side, _| side.write_many(),
        run: |side| side.order("stat_all /data/many"),
    },
    Work {
        what: "attributes of the same files again, volume",
        prepare: nothing,
        run: |side| side.order("stat_all /data/many"),
    },
    Work {
        what: "attributes of 5,000 files again, root",
        prepare: nothing,
        run: |side| side.order("stat_all /srv/many"),
    },
    Work {
        what: "5 writes of 4 KiB, each with fsync, from each of 8 threads, volume",
        prepare: nothing,
        run: |side| side.order("sync 8 5"),
    },
    Work {
        what: "start of Python with five imports, repeated",
        prepare: nothing,
        run: |side| side.order("start_python"),
    },
    Work { what: "`gcc hello.c`, repeated", prepare: nothing, run: |side| side.order("compile_program") },
    Work { what: "4 MiB of TCP out of the container", prepare: nothing, run: |side| side.receive() },
    Work { what: "4 MiB of TCP into the container", prepare: nothing, run: |side| side.send() },
    Work { what: "100 round trips of TCP", prepare: nothing, run: |side| side.answer() },
];

/// What a container has for itself.
struct Place {
    image: ImageRoot,
    volume: TempDir,
    namespace: Namespace,
}

/// A running container.
struct Side<'h> {
    orders: BufReader<TcpStream>,
    listener: TcpListener,
    limit: Duration,
    place: &'h Place,
    _task: Task<'h>,
}

/// Takes `rounds` samples of all work of both runtimes, after a round that does not count: it fills the caches.
pub(crate) fn compare(archive: &Path, rounds: u32) -> Result<Report> {
    ensure!(rounds > 0, "no round, no numbers");
    let runc = Host::prepare(Runtime::Runc, Version::of_containerd()?, archive)?;
    let bulkhead = runc.with(Runtime::Bulkhead);
    let bridge = Bridge::new()?;
    let places = [Place::make(&bridge, 2)?, Place::make(&bridge, 3)?];
    let sides = [Side::start(&runc, &places[0])?, Side::start(&bulkhead, &places[1])?];
    let row = |work: &Work| Row { what: work.what, runc_ms: Vec::new(), bulkhead_ms: Vec::new() };
    let mut rows: Vec<Row> = WORKS.iter().map(row).collect();
    for round in 0..=rounds {
        eprintln!("round {round} of {rounds}{}", if round == 0 { ", which does not count" } else { "" });
        for (work, row) in WORKS.iter().zip(&mut rows) {
            let mut turns = [(&sides[0], &mut row.runc_ms), (&sides[1], &mut row.bulkhead_ms)];
            if round % 2 == 0 {
                turns.reverse();
            }
            for (side, samples) in turns {
                (work.prepare)(side, round).with_context(|| format!("before {}", work.what))?;
                let took = (work.run)(side).context(work.what)?;
                if round > 0 {
                    samples.push(took.as_secs_f64() * 1e3);
                }
            }
        }
    }
    let mut facts = facts()?;
    // These are of VMs that this does not boot.
    facts.retain(|fact, _| !matches!(*fact, "QEMU" | "booted VMs"));
    Ok(Report { facts, rows })
}

impl Place {
    fn make(bridge: &Bridge, number: u8) -> Result<Self> {
        let image = ImageRoot::make()?;
        image.write("srv/worker.py", WORKER.as_bytes())?;
        write_many(&image.layer().join("srv/many"))?;
        Ok(Self { image, volume: on_disk()?, namespace: bridge.namespace(number)? })
    }
}

impl<'h> Side<'h> {
    fn start(host: &'h Host, place: &'h Place) -> Result<Self> {
        let listener = TcpListener::bind((GATEWAY, 0)).context("cannot listen on the bridge")?;
        let port = listener.local_addr()?.port().to_string();
        let container = place.namespace.container(host).bind(place.volume.path(), "/data", "rbind:rw");
        let task = place.image.detach(host, container, &["python3", "/srv/worker.py", GATEWAY, &port])?;
        let limit = host.patience(LIMIT);
        let orders = BufReader::new(accept(&listener, limit)?);
        let side = Self { orders, listener, limit, place, _task: task };
        side.order(&format!("prepare {}", UNPACKED.join(" ")))?;
        Ok(side)
    }

    /// Has the worker do something, and waits until it has done it.
    fn order(&self, line: &str) -> Result<Duration> {
        self.begin(line)?;
        self.end()
    }

    fn begin(&self, line: &str) -> Result<()> {
        Ok(self.orders.get_ref().write_all(format!("{line}\n").as_bytes())?)
    }

    /// The time that the worker has measured.
    fn end(&self) -> Result<Duration> {
        let mut answer = String::new();
        // One line comes, and nothing after it.
        BufReader::new(self.orders.get_ref()).read_line(&mut answer).context("the worker does not answer")?;
        let seconds = answer.trim().parse().with_context(|| format!("the worker answers {answer:?}"))?;
        Ok(Duration::try_from_secs_f64(seconds)?)
    }

    /// Replaces a file that the container has read.
    fn write_cold(&self, round: u32) -> Result<()> {
        let path = self.place.volume.path();
        fs::write(path.join("new"), vec![round as u8; COLD * MIB])?;
        Ok(fs::rename(path.join("new"), path.join("cold"))?)
    }

    /// Replaces the files whose attributes the container has read.
    fn write_many(&self) -> Result<()> {
        let many = self.place.volume.path().join("many");
        if many.exists() {
            fs::remove_dir_all(&many)?;
        }
        write_many(&many)
    }

    /// Receives what the worker sends.
    fn receive(&self) -> Result<Duration> {
        self.begin(&format!("send {SENT}"))?;
        let mut stream = accept(&self.listener, self.limit)?;
        let mut data = Vec::new();
        stream.read_to_end(&mut data)?;
        ensure!(data.len() == SENT * MIB, "the worker has sent {} bytes", data.len());
        stream.write_all(b".")?;
        self.end()
    }

    /// Sends to the worker.
    fn send(&self) -> Result<Duration> {
        self.begin(&format!("receive {SENT}"))?;
        let mut stream = accept(&self.listener, self.limit)?;
        stream.write_all(&vec![b'x'; SENT * MIB])?;
        drop(stream);
        self.end()
    }

    /// Answers each byte of the worker.
    fn answer(&self) -> Result<Duration> {
        self.begin(&format!("round_trips {TRIPS}"))?;
        let mut stream = accept(&self.listener, self.limit)?;
        stream.set_nodelay(true)?;
        for _ in 0..TRIPS {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            stream.write_all(&byte)?;
        }
        self.end()
    }
}

fn nothing(_: &Side<'_>, _: u32) -> Result<()> {
    Ok(())
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
