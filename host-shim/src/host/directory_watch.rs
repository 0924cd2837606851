//! Watches what becomes of the names in a directory of the host (inotify(7)).

use std::{
    io::{self, ErrorKind},
    os::fd::OwnedFd,
    thread,
    time::Duration,
};

use rustix::{
    fs::inotify::{self, CreateFlags, WatchFlags},
    io::Errno,
    mount::{MountPropagationFlags, mount_change},
    process::Uid,
    thread::set_thread_res_uid,
};
use tokio::{net::unix::pipe, time::sleep};

use crate::host::{blocking, no_symlinks};

/// From here on users are nobody's: systemd keeps no range there.
const NOBODYS: u32 = 1 << 31;

/// After the first event of a change, the others of it come within this time.
const SETTLES: Duration = Duration::from_millis(100);

/// How often events are read for one change. Somebody may cause them without end.
const MOST_READS: u32 = 64;

/// Makes a mount private that is attached nowhere. A copy of a shared mount is a peer of it, and any process of the
/// host may come to have a mount that is the slave of this peer (rslave, `HostToContainer`). Linux 6.12 passes nothing
/// on to the slaves of a mount that is attached nowhere: they would see no later mount of the host as long as the
/// directory is watched.
pub(crate) fn keep_apart(directory: &OwnedFd) -> Result<(), Errno> {
    mount_change(no_symlinks::proc_path(directory), MountPropagationFlags::PRIVATE)
}

/// A directory that is watched.
#[derive(Debug)]
pub(crate) struct Watch(OwnedFd);

impl Watch {
    /// Watches the directory for these events.
    pub(crate) fn new(directory: &OwnedFd, events: WatchFlags) -> io::Result<Self> {
        let watch = Self::of_nothing()?;
        watch.add(directory, events)?;
        Ok(watch)
    }

    /// Watches nothing yet.
    pub(crate) fn of_nothing() -> io::Result<Self> {
        // By default the kernel allows each user 128 inotify instances (fs.inotify.max_user_instances). kubelet needs
        // those of root to follow logs. So each shim makes its instances as a user of its own.
        let user = Uid::from_raw(NOBODYS | std::process::id());
        let make = move || {
            set_thread_res_uid(None, user, None)?;
            inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
        };
        // The thread stays that user.
        let thread = thread::Builder::new().stack_size(blocking::STACK).spawn(make)?;
        Ok(Self(thread.join().map_err(|_| io::Error::other("the thread ended with a panic"))??))
    }

    /// Watches this directory too, or again.
    pub(crate) fn add(&self, directory: &OwnedFd, events: WatchFlags) -> io::Result<()> {
        inotify::add_watch(&self.0, no_symlinks::proc_path(directory), events | WatchFlags::ONLYDIR)?;
        Ok(())
    }

    /// The changes from now on, and those since the watch began.
    pub(crate) fn changes(&self) -> io::Result<Changes> {
        // It is no pipe, but is waited for and read like one.
        Ok(Changes(pipe::Receiver::from_owned_fd_unchecked(self.0.try_clone()?)?))
    }
}

/// The changes of a directory.
#[derive(Debug)]
pub(crate) struct Changes(pipe::Receiver);

impl Changes {
    /// Waits for a change, and then so long until the rest of it is done.
    pub(crate) async fn next(&mut self) -> io::Result<()> {
        self.0.readable().await?;
        sleep(SETTLES).await;
        // Nobody needs to know which changes they are: the directory is read as a whole. If there are more events, the
        // next change has come already.
        let mut events = [0; 4096];
        for _ in 0..MOST_READS {
            match self.0.try_read(&mut events) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
