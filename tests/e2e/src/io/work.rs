//! The kinds of work that are compared.

use std::time::Duration;

use anyhow::Result;

use super::side::Side;

/// A kind of work.
pub(super) struct Work {
    pub(super) what: &'static str,
    /// What comes before it. It gets the number of the round.
    pub(super) prepare: fn(&Side<'_>, u32) -> Result<()>,
    /// Does it, and returns how long it took.
    pub(super) run: fn(&Side<'_>) -> Result<Duration>,
}

const fn work(what: &'static str, run: fn(&Side<'_>) -> Result<Duration>) -> Work {
    Work { what, prepare: |_, _| Ok(()), run }
}

/// The name of a kind of work says how much of it is done. The order matters: some rows are about what the one before
/// them has left in the caches.
pub(super) const WORKS: &[Work] = &[
    work("500 buffered writes of 4 KiB at random, volume", |side| side.order("write_at_random /data 500")),
    work("1,000 reads of 4 KiB at random from the file just written, volume", |side| {
        side.order("read_at_random /data/file 1000")
    }),
    work("2,000 reads of 4 KiB at random from a file that was read whole before, volume", |side| {
        side.order("read_again /data/still 2000")
    }),
    work("500 buffered writes of 4 KiB at random, root", |side| side.order("write_at_random /srv 500")),
    work("16 MiB read again by 1 MiB, root", |side| side.order("read /srv/still")),
    Work {
        what: "8 MiB read for the first time by 1 MiB, volume",
        prepare: |side, round| side.write_cold(round, 8),
        run: |side| side.order("read /data/cold"),
    },
    work("200 files of 2 KiB unpacked by tar, volume", |side| side.order("unpack /data")),
    work("200 files of 2 KiB unpacked by tar, root", |side| side.order("unpack /srv")),
    Work {
        what: "attributes of 5,000 files for the first time, volume",
        prepare: |side, _| side.write_many(),
        run: |side| side.order("stat_all /data/many"),
    },
    work("attributes of the same files again, volume", |side| side.order("stat_all /data/many")),
    work("attributes of 5,000 files again, root", |side| side.order("stat_all /srv/many")),
    work("5 writes of 4 KiB, each with fsync, from each of 8 threads, volume", |side| side.order("sync 8 5")),
    work("500 reads of 4 KiB at random with O_DIRECT, block volume", |side| {
        side.order_disk("read_blocks_at_random", "500")
    }),
    work("500 writes of 4 KiB at random with O_DIRECT, block volume", |side| {
        side.order_disk("write_blocks_at_random", "500")
    }),
    work("16 MiB read by 1 MiB with O_DIRECT, block volume", |side| side.order_disk("read_blocks", "16")),
    work("16 MiB written by 1 MiB with O_DIRECT, block volume", |side| side.order_disk("write_blocks", "16")),
    work("start of Python with five imports, repeated", |side| side.order("start_python")),
    work("start of Node with four modules, repeated", |side| side.order("start_node")),
    work("`java -version`, repeated", |side| side.order("start_java")),
    work("`gcc hello.c`, repeated", |side| side.order("compile_program")),
    work("16 MiB of TCP out", |side| side.receive(16)),
    work("16 MiB of TCP in", |side| side.send(16)),
    work("100 round trips of TCP", |side| side.answer(100)),
    work("4,000 datagrams of 64 bytes out, UDP", |side| side.receive_datagrams(40)),
    work("4,000 datagrams of 64 bytes in, UDP", |side| side.send_datagrams(40)),
    work("50 connections of TCP in, one after the other", |side| side.make_connections(50)),
    work("20 pages of 100 KB by HTTP from nginx", |side| side.ask_for_pages(20)),
    work("1,500 times SET of Redis from 10 connections", |side| side.ask_redis("set", 1500)),
    work("1,500 times GET of Redis from 10 connections", |side| side.ask_redis("get", 1500)),
    work("50 transactions of pgbench (TPC-B), database in the volume", |side| side.order("pgbench 50")),
    work("500 transactions of pgbench -S (select only), database in the volume", |side| {
        side.order("pgbench 500 -S")
    }),
];
