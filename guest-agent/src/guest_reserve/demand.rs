//! Containers without a memory limit need more memory than the guest has.
//!
//! The shim adds memory to the guest, but it takes time until the memory is there. Meanwhile the kernel must not kill a
//! process for the want of it. So there is a mark below the limit of all containers. Above the mark the kernel slows
//! down whoever takes memory, the more the further it is exceeded. It also tells the agent, which asks the shim.

use std::{io, sync::Arc, time::Duration};

use tokio::{task::spawn_blocking, time::sleep};

use super::Reserve;
use crate::cgroup::containers::{self, Usage};

/// The pause between two checks of what the containers use, while they are above the mark.
const REST: Duration = Duration::from_millis(20);

/// Whether containers with this mark need more memory. File pages that were used once do not count, because programs
/// that read or write much data would fill any memory with them. But the containers need more memory as well if the
/// kernel cannot drop these pages fast enough.
fn is_needed(mark: u64, usage: Usage) -> bool {
    let kept = usage.charged.saturating_sub(usage.droppable);
    kept >= mark / 4 * 3 || usage.charged > mark + mark / 32
}

impl Reserve {
    /// Waits until the containers need more memory than the guest has. If the guest cannot get more, it waits for ever.
    /// Returns whether memory is needed. It is not if a later call was made.
    pub async fn wait_demand(self: &Arc<Self>, can_grow: bool) -> io::Result<bool> {
        let mut calls = self.demand_calls.subscribe();
        let mut call = 0;
        self.demand_calls.send_modify(|calls| {
            *calls += 1;
            call = *calls;
        });
        let needed = async {
            let reserve = Arc::clone(self);
            let mark =
                spawn_blocking(move || reserve.mark(call, can_grow)).await.map_err(io::Error::other)??;
            match mark {
                Some(mark) => needed_above(mark).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            _ = calls.wait_for(|calls| *calls != call) => Ok(false),
            needed = needed => needed.map(|()| true),
        }
    }
}

async fn needed_above(mark: u64) -> io::Result<()> {
    let mut times = 0;
    while !is_needed(mark, containers::usage()?) {
        times = containers::above_mark(times).await?;
        sleep(REST).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    #[test]
    fn memory_is_needed_when_what_stays_comes_near_the_mark() {
        let is_needed = |charged, droppable| is_needed(128, Usage { charged, droppable });
        assert!(!is_needed(0, 0) && !is_needed(95, 0) && is_needed(96, 0));
        // A file that is read once, and one that cannot be written back as fast as it grows.
        assert!(!is_needed(128, 100) && !is_needed(132, 100) && is_needed(133, 133));
        assert!(is_needed(128, 32) && !is_needed(10, 20));
    }

    #[tokio::test]
    async fn a_later_call_ends_an_earlier_one() {
        let reserve = Arc::new(Reserve::default());
        let first = tokio::spawn({
            let reserve = Arc::clone(&reserve);
            async move { reserve.wait_demand(true).await }
        });
        tokio::task::yield_now().await;
        let second = reserve.wait_demand(true);
        // A kernel that is not a guest's has no mark.
        assert!(timeout(Duration::from_millis(20), second).await.is_err());
        assert!(!first.await.unwrap().unwrap());
    }

    #[test]
    fn a_call_that_was_overtaken_does_not_set_its_mark() {
        let reserve = Reserve::default();
        reserve.demand_calls.send_replace(2);
        assert!(reserve.follow(2, false).is_some());
        assert!(reserve.follow(1, true).is_none());
        assert!(!reserve.lock().can_grow);
    }
}
