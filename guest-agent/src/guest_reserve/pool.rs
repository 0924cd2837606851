//! The pool of huge pages of the guest's kernel.

use std::{
    fs,
    io::{self, ErrorKind},
    path::Path,
};

use bulkhead_agent_api::HUGE_PAGE;

/// The kernel's pool of these pages (kernel, admin-guide/mm/hugetlbpage.rst).
const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
/// Has the kernel move pages, so that free ones are side by side.
const COMPACT: &str = "/proc/sys/vm/compact_memory";
/// Other memory that is left, bytes. The kernel needs some when it has much to do, and a container needs some to start.
const FLOOR: u64 = 32 << 20;

/// Why no huge pages are set aside for a container.
#[derive(Debug, thiserror::Error)]
pub enum HugePagesError {
    /// The guest has too little free memory, or in pieces that are too small.
    #[error(
        "linux.resources.hugepageLimits[2MB]: the guest can set aside only {got} of {asked} huge pages; lower the \
         limit, or give the pod more memory"
    )]
    TooFew {
        /// What the limit comes to.
        asked: u64,
        /// What there could be.
        got: u64,
    },
    /// The kernel refused.
    #[error("linux.resources.hugepageLimits[2MB]: setting huge pages aside: {0}")]
    Io(#[from] io::Error),
}

/// The pages that are set aside.
#[derive(Debug, Default)]
pub(super) struct Pool {
    of_pod: u64,
    of_containers: u64,
}

/// For whom pages are set aside.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// All containers of the pod together.
    Pod,
    /// One container.
    #[default]
    Container,
}

/// The kernel, or that of a test.
pub(super) trait Kernel {
    /// Asks for a pool of this many pages. Returns how many there are: fewer if memory is short, and more if files in a
    /// hugetlbfs have pages that no longer belong to the pool.
    fn set(&self, pages: u64) -> io::Result<u64>;
    /// How many there are.
    fn present(&self) -> io::Result<u64>;
    /// Makes free memory less fragmented, if possible.
    fn compact(&self);
    /// Memory for more pages, bytes.
    fn available(&self) -> io::Result<u64>;
}

pub(super) struct Guest;

impl Kernel for Guest {
    fn set(&self, pages: u64) -> io::Result<u64> {
        fs::write(POOL, pages.to_string())?;
        self.present()
    }

    fn present(&self) -> io::Result<u64> {
        present()
    }

    fn compact(&self) {
        if let Err(error) = fs::write(COMPACT, "1") {
            eprintln!("bulkhead-agent: writing to {COMPACT}: {error}");
        }
    }

    fn available(&self) -> io::Result<u64> {
        available_memory()
    }
}

impl Pool {
    /// How many there are to be.
    fn promised(&self) -> u64 {
        self.of_pod.max(self.of_containers)
    }

    fn of(&mut self, owner: Owner) -> &mut u64 {
        match owner {
            Owner::Pod => &mut self.of_pod,
            Owner::Container => &mut self.of_containers,
        }
    }

    /// Sets this many more pages aside, or none. Returns how many there are then.
    pub(super) fn add(
        &mut self,
        owner: Owner,
        asked: u64,
        kernel: &impl Kernel,
    ) -> Result<u64, HugePagesError> {
        let before = self.promised();
        *self.of(owner) = self.of(owner).saturating_add(asked);
        let more = self.promised() - before;
        let added = Self::grow(before, more, kernel);
        if added.is_err() {
            *self.of(owner) -= asked;
        }
        added.map_err(|error| match error {
            // What the container had already is its own too.
            HugePagesError::TooFew { asked: more, got } => {
                HugePagesError::TooFew { asked, got: got + (asked - more) }
            }
            other => other,
        })
    }

    /// Adds `more` pages to those that there are `before`.
    fn grow(before: u64, more: u64, kernel: &impl Kernel) -> Result<u64, HugePagesError> {
        let wanted = before.saturating_add(more);
        // The kernel would take all free memory before it found that this is too little. Pages that files keep from
        // earlier containers count too.
        let free = kernel.available()?.saturating_sub(FLOOR) / HUGE_PAGE;
        let possible = kernel.present()?.saturating_add(free);
        if more > 0 && wanted > possible {
            return Err(HugePagesError::TooFew { asked: more, got: possible.saturating_sub(before) });
        }
        let reached = Self::reach(wanted, kernel);
        if reached.as_ref().is_ok_and(|got| *got >= wanted) {
            return Ok(reached?);
        }
        if let Err(error) = kernel.set(before) {
            eprintln!("bulkhead-agent: giving back huge pages: {error}");
        }
        Err(HugePagesError::TooFew { asked: more, got: reached?.saturating_sub(before) })
    }

    fn reach(wanted: u64, kernel: &impl Kernel) -> io::Result<u64> {
        let got = kernel.set(wanted)?;
        if got >= wanted {
            return Ok(got);
        }
        kernel.compact();
        kernel.set(wanted)
    }

    /// Gives up this many pages. Returns how many there are then. After an error all is as before.
    pub(super) fn remove(&mut self, owner: Owner, pages: u64, kernel: &impl Kernel) -> io::Result<u64> {
        let before = *self.of(owner);
        *self.of(owner) = before.saturating_sub(pages);
        kernel.set(self.promised()).inspect_err(|_| *self.of(owner) = before)
    }
}

/// How many huge pages the kernel has.
pub(super) fn present() -> io::Result<u64> {
    let text = fs::read_to_string(Path::new(POOL))?;
    text.trim().parse().map_err(io::Error::other)
}

/// Memory that processes could use, bytes.
pub(super) fn available_memory() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let kib = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB"));
    let kib = kib.and_then(|kib| kib.trim().parse::<u64>().ok());
    kib.map(|kib| kib << 10)
        .ok_or_else(|| io::Error::new(ErrorKind::InvalidData, "/proc/meminfo has no MemAvailable"))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// A kernel with memory for some pages, of which only a part can be found before it is compacted.
    #[derive(Default)]
    struct Memory {
        pages: u64,
        found: Cell<u64>,
        pool: Cell<u64>,
        /// Pages that files have.
        used: Cell<u64>,
        /// So many of the next changes of the pool fail.
        failures: Cell<u32>,
    }

    impl Memory {
        fn of(pages: u64, found: u64) -> Self {
            Self { pages, found: Cell::new(found), ..Self::default() }
        }
    }

    impl Kernel for Memory {
        fn set(&self, pages: u64) -> io::Result<u64> {
            if self.failures.get() > 0 {
                self.failures.set(self.failures.get() - 1);
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            self.pool.set(pages.min(self.found.get()).max(self.used.get()));
            Ok(self.pool.get())
        }

        fn present(&self) -> io::Result<u64> {
            Ok(self.pool.get())
        }

        fn compact(&self) {
            self.found.set(self.found.get() + 2);
        }

        fn available(&self) -> io::Result<u64> {
            Ok((self.pages - self.pool.get()) * HUGE_PAGE + FLOOR + 1)
        }
    }

    #[test]
    fn pages_are_there_as_a_whole_or_not_at_all() {
        let kernel = Memory::of(10, 4);
        let mut pool = Pool::default();
        let one = Owner::Container;
        assert_eq!(pool.add(one, 3, &kernel).unwrap(), 3);
        // The kernel finds the second one after it has moved pages.
        assert_eq!((pool.add(one, 2, &kernel).unwrap(), kernel.pool.get()), (5, 5));
        let too_few = |result: Result<u64, HugePagesError>| match result {
            Err(HugePagesError::TooFew { asked, got }) => (asked, got),
            other => panic!("{other:?}"),
        };
        assert_eq!(too_few(pool.add(one, 5, &kernel)), (5, 3));
        assert_eq!(kernel.pool.get(), 5);
        // It is not even asked for more than there is memory for.
        kernel.found.set(100);
        assert_eq!(too_few(pool.add(one, 1 << 60, &kernel)), (1 << 60, 5));
        assert_eq!((pool.remove(one, 3, &kernel).unwrap(), kernel.pool.get()), (2, 2));
        assert_eq!(pool.remove(one, 7, &kernel).unwrap(), 0);
    }

    #[test]
    fn limits_of_containers_are_a_part_of_that_of_the_pod() {
        let kernel = Memory::of(10, 8);
        let mut pool = Pool::default();
        assert_eq!(pool.add(Owner::Pod, 4, &kernel).unwrap(), 4);
        assert_eq!(pool.add(Owner::Container, 3, &kernel).unwrap(), 4);
        assert_eq!(pool.add(Owner::Container, 3, &kernel).unwrap(), 6);
        // Eight and the two that are found after it has moved pages.
        match pool.add(Owner::Container, 9, &kernel) {
            Err(HugePagesError::TooFew { asked: 9, got: 4 }) => {}
            other => panic!("{other:?}"),
        }
        assert_eq!((pool.promised(), kernel.pool.get()), (6, 6));
        assert_eq!(pool.remove(Owner::Container, 3, &kernel).unwrap(), 4);
        assert_eq!(pool.remove(Owner::Container, 3, &kernel).unwrap(), 4);
        assert_eq!(pool.remove(Owner::Pod, 4, &kernel).unwrap(), 0);
    }

    #[test]
    fn the_guest_keeps_some_memory() {
        let kernel = Memory::of(10, 10);
        let possible = kernel.available().unwrap() / HUGE_PAGE;
        assert_eq!(possible, 10 + FLOOR / HUGE_PAGE);
        let mut pool = Pool::default();
        match pool.add(Owner::Container, 11, &kernel) {
            Err(HugePagesError::TooFew { asked: 11, got: 10 }) => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(pool.add(Owner::Container, 10, &kernel).unwrap(), 10);
    }

    #[test]
    fn pages_that_files_keep_are_used_again() {
        let kernel = Memory::of(10, 10);
        let mut pool = Pool::default();
        let one = Owner::Container;
        pool.add(one, 8, &kernel).unwrap();
        kernel.used.set(6);
        assert_eq!(pool.remove(one, 8, &kernel).unwrap(), 6);
        // There is memory for four more.
        assert_eq!(pool.add(one, 9, &kernel).unwrap(), 9);
        kernel.used.set(0);
        assert_eq!(pool.remove(one, 9, &kernel).unwrap(), 0);
    }

    #[test]
    fn a_change_that_fails_changes_nothing() {
        let kernel = Memory::of(10, 3);
        let mut pool = Pool::default();
        let one = Owner::Container;
        pool.add(one, 2, &kernel).unwrap();
        for failures in [1, 2] {
            kernel.failures.set(failures);
            assert!(matches!(pool.add(one, 1, &kernel), Err(HugePagesError::Io(_))));
            kernel.failures.set(0);
            assert_eq!((pool.promised(), kernel.pool.get()), (2, 2));
        }
        kernel.failures.set(1);
        assert!(pool.remove(one, 1, &kernel).is_err());
        assert_eq!(pool.promised(), 2);
        // The failed removal has given up nothing, so both pages are still there.
        assert_eq!(pool.remove(one, 2, &kernel).unwrap(), 0);
    }

    #[test]
    fn the_error_names_the_field_and_both_numbers() {
        let error = HugePagesError::TooFew { asked: 512, got: 100 }.to_string();
        assert_eq!(
            error,
            "linux.resources.hugepageLimits[2MB]: the guest can set aside only 100 of 512 huge pages; lower the \
             limit, or give the pod more memory"
        );
    }
}
