//! `cargo xtask faults`: lets things go wrong in the rig, and writes docs/reliability.md.

mod page;
mod picture;
mod soak;

use std::fs;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, anyhow, ensure};
use clap::{Args, ValueEnum};

use crate::cache::Cache;
use crate::conformance;
use crate::dist::{self, Profile, source_dir};
use crate::e2e::{self, E2E};
use crate::page::day;
use crate::progress::step;
use crate::rig::{Io, Limit, Payload, Rig};
use crate::tools::Tools;

use page::Section;
use soak::Soak;

/// How long a part may be silent. A fault takes a minute at most.
const SILENCE: Duration = Duration::from_secs(10 * 60);

const PAGE: &str = "docs/reliability.md";
/// Where the pictures are, beside the page.
const PICTURES: &str = "pictures";

#[derive(Args)]
pub(crate) struct FaultArguments {
    /// Only these parts. The others keep their sections of the page.
    #[arg(value_enum)]
    parts: Vec<Part>,
    /// Containers of the soak.
    #[arg(long, default_value_t = 2000)]
    cycles: u32,
    /// Minutes after which the soak runs no more containers.
    #[arg(long, default_value_t = 120)]
    minutes: u32,
}

/// Faults of one sort, which run in a rig of their own and have a section of the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// A system call of the shim fails, or kills it.
    Calls,
    /// The shim or the VMM is killed or stopped.
    Processes,
    /// containerd is restarted or killed.
    Containerd,
    /// The agent in the guest ends, stops to answer, or answers nonsense.
    Agent,
    /// The host lacks something: room in /run, descriptors, memory, an answer of a file system.
    Resources,
    /// Many containers, with faults among them.
    Soak,
}

impl Part {
    /// As the end-to-end tests' program calls it.
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// The title of its section.
    fn title(self) -> &'static str {
        match self {
            Self::Calls => "System calls of the shim",
            Self::Processes => "Processes",
            Self::Containerd => "containerd",
            Self::Agent => "The agent in the guest",
            Self::Resources => "Resources of the host",
            Self::Soak => "Many containers",
        }
    }

    fn command(self, FaultArguments { cycles, minutes, .. }: &FaultArguments) -> Vec<String> {
        match self {
            Self::Soak => format!("{E2E} soak --cycles {cycles} --minutes {minutes}"),
            _ => format!("{E2E} faults {}", self.name()),
        }
        .split(' ')
        .map(str::to_owned)
        .collect()
    }
}

/// Runs the parts, some of them side by side, and writes the page. The exit status is 0 if each fault ended as
/// expected.
pub(crate) fn run(cache: &Cache, tools: &Tools, arguments: &FaultArguments) -> Result<u8> {
    let commit = conformance::commit()?;
    let payload = Payload::new(cache, &[dist::build(cache, tools, Profile::Shipped)?.put()])?;
    let rig = Rig::ensure(cache, tools)?;
    let parts = if arguments.parts.is_empty() { Part::value_variants() } else { &arguments.parts };
    let left = Mutex::new(parts.iter());
    // In a function of its own, so that the lock is held for a moment only.
    let take = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let page = Mutex::new(());
    let work = || -> Result<bool> {
        let mut is_good = true;
        while let Some(part) = take() {
            let (output, status) = run_part(*part, &rig, &payload, arguments)?;
            is_good &= status == 0;
            let error = if status == 0 { "" } else { output.lines().last().unwrap_or_default() };
            // After each part: a later one may fail.
            let _page = page.lock().unwrap_or_else(PoisonError::into_inner);
            write(*part, &output, &commit, error)?;
        }
        Ok(is_good)
    };
    let workers = e2e::rigs_at_once()?;
    let results: Vec<Result<bool>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        let join = |thread: ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked")))
        };
        threads.into_iter().map(join).collect()
    });
    let is_good = results.into_iter().collect::<Result<Vec<_>>>()?.iter().all(|is_good| *is_good);
    Ok(u8::from(!is_good))
}

/// Runs a part on a host of its own. Returns what it has printed, and its exit status.
fn run_part(part: Part, rig: &Rig, payload: &Payload, arguments: &FaultArguments) -> Result<(String, u8)> {
    let mut session = step(&format!("starting a host for {part:?}"), || rig.start(payload))?;
    let mut output = Vec::new();
    let status = session.run(&part.command(arguments), Io::Shown(&mut output), Limit::Silence(SILENCE))?;
    session.finish();
    Ok((String::from_utf8_lossy(&output).into_owned(), status))
}

/// Replaces the part's section of the page by what came out now. `error`: the program's own, if it has failed.
fn write(part: Part, output: &str, commit: &str, error: &str) -> Result<()> {
    let run = format!("Commit {commit}, {}", day(SystemTime::now()));
    let docs = source_dir().join("docs");
    let mut text = if part == Part::Soak {
        let soak = Soak::read(output)?;
        let pictures = docs.join(PICTURES);
        fs::create_dir_all(&pictures).with_context(|| format!("cannot make {}", pictures.display()))?;
        for (name, picture) in soak.pictures() {
            let file = pictures.join(name);
            fs::write(&file, picture).with_context(|| format!("cannot write {}", file.display()))?;
        }
        soak.section(&run)?
    } else {
        let section = Section::read(output);
        ensure!(!section.is_empty(), "no fault was injected");
        section.text(&run)?
    };
    if !error.is_empty() {
        text.push_str(&format!("\nThe run failed: {error}\n"));
    }
    let path = source_dir().join(PAGE);
    let before = fs::read_to_string(&path).unwrap_or_default();
    let titles: Vec<_> = Part::value_variants().iter().map(|part| part.title()).collect();
    let page = page::with_section(&before, &titles, part.title(), &text);
    fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))
}
