//! Huge pages of containers.
//!
//! On a host, its operator sets huge pages aside, and kubelet counts them. A guest begins with none. It sets aside what
//! the limits of its containers come to: each limit when the container is created, until it is deleted. A limit of the
//! sandbox container is that of the whole pod: those of the others are a part of it. The shim has given the guest the
//! memory for them. Containers have that much less of other memory.

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{
    Reserve,
    pool::{Guest, HugePagesError, Owner, Pool},
};

impl Reserve {
    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add_huge_pages(&self, owner: Owner, pages: u64) -> Result<(), HugePagesError> {
        let Some(boot) = self.boot.filter(|_| pages > 0) else { return Ok(()) };
        let mut pool = self.pool();
        let there = pool.add(owner, pages, &Guest)?;
        if let Err(error) = self.hold_huge_pages(boot, there) {
            // This is the error that counts.
            let put_back =
                pool.remove(owner, pages, &Guest).and_then(|there| self.hold_huge_pages(boot, there));
            if let Err(error) = put_back {
                eprintln!("bulkhead-agent: giving back {pages} huge pages: {error}");
            }
            return Err(error.into());
        }
        Ok(())
    }

    fn remove_huge_pages(&self, owner: Owner, pages: u64) -> io::Result<()> {
        let Some(boot) = self.boot.filter(|_| pages > 0) else { return Ok(()) };
        let mut pool = self.pool();
        let there = pool.remove(owner, pages, &Guest)?;
        // The pages are given up already. That is not undone, although the containers cannot use the memory yet.
        if let Err(error) = self.hold_huge_pages(boot, there) {
            eprintln!(
                "bulkhead-agent: the containers cannot use the memory of {pages} huge pages that were given up: {error}"
            );
        }
        Ok(())
    }
}

/// The huge pages that are set aside for a container. Setting their number and dropping this take the kernel some time.
#[derive(Debug, Default)]
pub struct HugePages {
    reserve: Arc<Reserve>,
    owner: Owner,
    count: u64,
}

impl HugePages {
    /// None yet.
    pub fn none(reserve: &Arc<Reserve>, owner: Owner) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self { reserve: Arc::clone(reserve), owner, count: 0 }))
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Changes their number. After an error it is as before.
    pub fn set(&mut self, count: u64) -> Result<(), HugePagesError> {
        if count > self.count {
            self.reserve.add_huge_pages(self.owner, count - self.count)?;
        } else {
            self.reserve.remove_huge_pages(self.owner, self.count - count)?;
        }
        self.count = count;
        Ok(())
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Err(error) = self.set(0) {
            eprintln!("bulkhead-agent: giving up {} huge pages: {error}", self.count);
        }
    }
}
