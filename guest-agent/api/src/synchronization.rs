//! What an NTP daemon has told a kernel about the quality of its clock (adjtimex(2)). The shim reads it on the host,
//! and the agent tells the guest's kernel the same.
//!
//! This is unsafe because no safe function exists for adjtimex(2).

use std::io;

use nix::libc;

/// The quality of a clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Synchronization {
    /// Whether somebody keeps the clock right: STA_UNSYNC is not set.
    pub is_synchronized: bool,
    /// Microseconds by which the clock is wrong at most. Linux adds 500 each second, and limits it to 16 s.
    pub max_error_us: u32,
    /// Microseconds by which the clock is probably wrong.
    pub estimated_error_us: u32,
}

impl Synchronization {
    /// Linux says this of a clock that nobody keeps right.
    pub const NONE: Self =
        Self { is_synchronized: false, max_error_us: 16_000_000, estimated_error_us: 16_000_000 };

    /// That of this kernel's CLOCK_REALTIME. Everybody may read it.
    pub fn read() -> io::Result<Self> {
        // SAFETY: all-zero bytes are a valid timex. No mode is set, so the call changes nothing.
        let mut timex: libc::timex = unsafe { std::mem::zeroed() };
        // SAFETY: `timex` lives through the call, which writes it.
        if unsafe { libc::adjtimex(&raw mut timex) } < 0 {
            return Err(io::Error::last_os_error());
        }
        let microseconds = |value| u32::try_from(value).unwrap_or(Self::NONE.max_error_us);
        Ok(Self {
            is_synchronized: timex.status & libc::STA_UNSYNC == 0,
            max_error_us: microseconds(timex.maxerror),
            estimated_error_us: microseconds(timex.esterror),
        })
    }

    /// That of a clock that may be further from the right time by `us` microseconds.
    pub fn worse_by(self, us: u32) -> Self {
        Self {
            max_error_us: self.max_error_us.saturating_add(us),
            estimated_error_us: self.estimated_error_us.saturating_add(us),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_how_good_its_clock_is() {
        let read = Synchronization::read().unwrap();
        assert!(read.max_error_us <= Synchronization::NONE.max_error_us, "{read:?}");
        assert!(read.estimated_error_us <= Synchronization::NONE.estimated_error_us, "{read:?}");
        // Linux sets STA_UNSYNC when the error has reached the limit.
        assert!(read.is_synchronized || read.max_error_us > 0, "{read:?}");
    }

    #[test]
    fn an_error_grows_to_what_can_be_said() {
        let good = Synchronization { is_synchronized: true, max_error_us: 1000, estimated_error_us: 10 };
        let worse = Synchronization { is_synchronized: true, max_error_us: 1500, estimated_error_us: 510 };
        assert_eq!(good.worse_by(500), worse);
        assert_eq!(good.worse_by(u32::MAX).max_error_us, u32::MAX);
    }
}
