//! containerd is restarted, or killed and started again by systemd, while it does what a request asks for.

use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Result, anyhow};

use super::lifecycle::{FaultInjector, Step};
use super::{Fault, TestBed};
use crate::command::Cmd;

/// The requests during which it is restarted.
const MOMENTS: [Step; 9] = [
    Step::Create,
    Step::Start,
    Step::Exec,
    Step::StartExec,
    Step::WaitExec,
    Step::DeleteExec,
    Step::Kill,
    Step::Wait,
    Step::Delete,
];

/// How far the request has come by then.
const DELAYS: [Duration; 2] = [Duration::ZERO, Duration::from_millis(150)];

pub(super) fn try_all(bed: &mut TestBed<'_>) -> Result<()> {
    for effect in [Effect::Restart, Effect::Kill] {
        for moment in MOMENTS {
            for delay in DELAYS {
                let when = format!("{moment}, after {} ms", delay.as_millis());
                let fault = Fault::new("containerd", effect.name(), when);
                bed.try_restart(&fault, &mut ContainerdRestart { effect, moment, delay, thread: None })?;
            }
        }
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Effect {
    Restart,
    Kill,
}

impl Effect {
    fn name(self) -> &'static str {
        match self {
            Self::Restart => "restart",
            Self::Kill => "SIGKILL",
        }
    }

    fn act(self) -> Result<()> {
        if let Self::Kill = self {
            Cmd::new("systemctl")
                .args(["kill", "--kill-whom=main", "--signal=SIGKILL", "containerd"])
                .run()?
                .succeeds()?;
        }
        // Also of one that systemd is about to start again.
        Cmd::new("systemctl").args(["restart", "containerd"]).run()?.succeeds()?;
        Ok(())
    }
}

struct ContainerdRestart {
    effect: Effect,
    moment: Step,
    delay: Duration,
    thread: Option<JoinHandle<Result<()>>>,
}

impl ContainerdRestart {
    fn join(&mut self) -> Result<()> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Err(_)) => Err(anyhow!("the thread that restarts containerd panicked")),
            Some(Ok(acted)) => acted,
            None => Ok(()),
        }
    }
}

impl FaultInjector for ContainerdRestart {
    fn before(&mut self, _: &str, step: Step) -> Result<()> {
        // The request after it is made to the new containerd.
        self.join()?;
        if step == self.moment {
            let (effect, delay) = (self.effect, self.delay);
            self.thread = Some(thread::spawn(move || {
                thread::sleep(delay);
                effect.act()
            }));
        }
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        self.join()
    }

    fn was_injected(&self) -> Result<bool> {
        Ok(true)
    }
}
