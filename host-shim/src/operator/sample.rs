//! What all pods of this host use at one moment. A pod that cannot be looked at in time does not delay the others:
//! each has a thread of its own, which may hang in the host's kernel, or wait for a VMM that hangs. What a thread
//! hangs at is not tried again before it has ended.

use std::{
    collections::{HashMap, HashSet},
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender, channel},
    },
    thread::Builder,
    time::{Duration, Instant},
};

use rustix::io::Errno;
use serde::Serialize;

use crate::{
    operator::{
        events,
        failures::failures,
        pods::{self, Pod, PodState, VmmConfig},
        start,
        templates::{Template, templates_of},
        usage::{self, Usage},
    },
    types::{failure::Cause, lock::lock, text::one_line, timeline::StartRecord},
    vm::template::DIR,
};

/// How long the pods may take, all together. Prometheus waits for 10 s unless it is told otherwise.
const WITHIN: Duration = Duration::from_secs(4);

/// The most pods that are looked at. kubelet runs 110 at most unless it is told otherwise.
const MOST_PODS: usize = 2_000;

/// The stack of a thread that looks at a pod.
const STACK: usize = 512 << 10;

/// What is known of a pod at one moment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sample {
    /// What `bulkhead ps` shows. If the pod could not be looked at in time, only its names are known.
    #[serde(flatten)]
    pub pod: Pod,
    /// Whether its shim lives and its VMM answers. None: that is not known, as while it starts.
    pub is_up: Option<bool>,
    /// What it uses.
    pub usage: Usage,
    /// How many processes of its containers the guest's kernel has killed, because memory was short. None: its shim
    /// does not say.
    pub container_oom_kills: Option<u64>,
    /// How it started. None: it has not started yet.
    pub start: Option<StartRecord>,
}

/// What is known of the host at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Node {
    /// The pods, sorted by containerd, namespace and id.
    pub pods: Vec<Sample>,
    /// How many more pods there are.
    pub left_out: usize,
    /// The templates. None: they could not be looked at in time.
    pub templates: Option<Vec<Template>>,
    /// How often pods and containers could not be created or started. None: it could not be read.
    pub failures: Option<Vec<(Cause, u64)>>,
}

/// Looks at the pods of a host, as often as wanted.
#[derive(Debug, Clone, Default)]
pub struct Sampler {
    /// What threads look at now.
    busy: Arc<Mutex<HashSet<PathBuf>>>,
}

/// What a look at a pod's files has found.
struct Looked {
    sample: Sample,
    /// The configuration of its VMM, if that lives.
    vmm: Option<VmmConfig>,
}

/// What a VMM has counted.
type Answer = io::Result<usage::Answer>;

enum Found {
    /// None: there is no such pod any more.
    Pod(PathBuf, Option<Box<Looked>>),
    Answer(PathBuf, Answer),
    Templates(io::Result<Vec<Template>>),
}

/// What threads have found in time.
#[derive(Default)]
struct Received {
    pods: HashMap<PathBuf, Option<Box<Looked>>>,
    answers: HashMap<PathBuf, Answer>,
    templates: Option<Vec<Template>>,
}

impl Received {
    fn until(deadline: Instant, receiver: &Receiver<Found>) -> io::Result<Self> {
        let mut received = Self::default();
        while let Ok(one) = receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            match one {
                Found::Pod(path, looked) => drop(received.pods.insert(path, looked)),
                Found::Answer(path, answer) => drop(received.answers.insert(path, answer)),
                Found::Templates(listed) => received.templates = Some(listed?),
            }
        }
        Ok(received)
    }

    /// The pods with these state directories, but for those that are gone.
    fn samples(&mut self, paths: Vec<PathBuf>) -> Vec<Sample> {
        let sample = |path: PathBuf| match self.pods.remove(&path) {
            Some(looked) => Some(with_answer(*looked?, self.answers.remove(&path))),
            None => Some(without_answer(&path, "it cannot be looked at in time")),
        };
        paths.into_iter().filter_map(sample).collect()
    }
}

/// The pods below `root`, sorted by containerd, namespace and id. Their VMMs are not asked. Returns within
/// some seconds: of a pod that cannot be looked at by then only the names are known.
pub fn pods(root: &Path) -> io::Result<Vec<Pod>> {
    let deadline = Instant::now() + WITHIN;
    let mut paths = pods::paths(root)?;
    let left_out = paths.split_off(paths.len().min(MOST_PODS));
    let (sender, receiver) = channel();
    let sampler = Sampler::default();
    for path in &paths {
        sampler.begin(path, &sender, |busy, sender| look_and_ask(busy, sender, look_at_files));
    }
    drop(sender);
    let looked = Received::until(deadline, &receiver)?.samples(paths);
    let too_many = format!("it is not looked at, because there are more than {MOST_PODS} pods");
    let left_out = left_out.iter().map(|path| without_answer(path, &too_many));
    Ok(looked.into_iter().chain(left_out).map(|sample| sample.pod).collect())
}

/// The templates below `root`, sorted by name. Clones are counted among the [`pods`] that can be looked at.
pub fn templates(root: &Path) -> io::Result<Vec<Template>> {
    match fs::exists(root.join(DIR)) {
        Ok(false) => Ok(Vec::new()),
        Ok(true) | Err(_) => templates_of(root, &pods(root)?),
    }
}

impl Sampler {
    /// The pods and templates below `root`. Returns within some seconds.
    pub fn sample(&self, root: &Path) -> io::Result<Node> {
        self.sample_within(root, WITHIN, look)
    }

    fn sample_within(
        &self,
        root: &Path,
        within: Duration,
        look: impl Fn(&Path) -> Option<Looked> + Copy + Send + 'static,
    ) -> io::Result<Node> {
        let deadline = Instant::now() + within;
        let mut paths = pods::paths(root)?;
        let left_out = paths.len().saturating_sub(MOST_PODS);
        paths.truncate(MOST_PODS);
        let (sender, receiver) = channel();
        for path in &paths {
            self.begin(path, &sender, move |busy, sender| look_and_ask(busy, sender, look));
        }
        // The parts of a template may be on storage that hangs.
        let templates_root = root.to_owned();
        self.begin(&root.join(DIR), &sender, move |busy, sender| {
            let templates = templates_of(&templates_root, &[]);
            drop(busy);
            send(sender, Found::Templates(templates));
        });
        drop(sender);
        let mut received = Received::until(deadline, &receiver)?;
        let pods = received.samples(paths);
        let mut templates = received.templates;
        for template in templates.iter_mut().flatten() {
            let is_clone = |sample: &&Sample| sample.pod.template.as_ref() == Some(&template.path);
            template.clones = pods.iter().filter(is_clone).count();
        }
        let failures = failures(root).ok();
        Ok(Node { pods, left_out, templates, failures })
    }

    /// Looks at `path` in a thread, unless one does so already.
    fn begin(
        &self,
        path: &Path,
        sender: &Sender<Found>,
        work: impl FnOnce(Busy, &Sender<Found>) + Send + 'static,
    ) {
        let Some(busy) = self.claim(path) else { return };
        let sender = sender.clone();
        // If there can be no thread, the pod is one that cannot be looked at.
        drop(Builder::new().stack_size(STACK).spawn(move || work(busy, &sender)));
    }

    /// None: a thread has it already.
    fn claim(&self, path: &Path) -> Option<Busy> {
        let is_new = lock(&self.busy).insert(path.into());
        is_new.then(|| Busy { sampler: self.clone(), path: path.into() })
    }
}

/// A place in the table of what threads look at.
struct Busy {
    sampler: Sampler,
    path: PathBuf,
}

impl Drop for Busy {
    fn drop(&mut self) {
        lock(&self.sampler.busy).remove(&self.path);
    }
}

/// Looks at the files of a pod, and then asks its VMM. A VMM that hangs holds this thread until it ends. Meanwhile
/// other threads look at the files.
fn look_and_ask(busy: Busy, sender: &Sender<Found>, look: impl Fn(&Path) -> Option<Looked>) {
    let (sampler, path) = (busy.sampler.clone(), busy.path.clone());
    let looked = look(&path);
    drop(busy);
    let vmm = looked.as_ref().and_then(|looked| looked.vmm.clone());
    send(sender, Found::Pod(path.clone(), looked.map(Box::new)));
    if let Some(config) = vmm
        && let Some(busy) = sampler.claim(&path.join(&config.control))
    {
        let answer = usage::ask(&path, &config);
        drop(busy);
        send(sender, Found::Answer(path, answer));
    }
}

fn send(sender: &Sender<Found>, found: Found) {
    // Nobody receives it after the deadline.
    _ = sender.send(found);
}

/// A pod that is not looked at, and why.
fn without_answer(path: &Path, reason: &str) -> Sample {
    let mut pod = pods::named(path);
    pod.problems.push(one_line(&format!("{}: {reason}", path.display())));
    with_nothing_more(pod)
}

/// A pod of which nothing more is known.
fn with_nothing_more(pod: Pod) -> Sample {
    Sample { pod, is_up: None, usage: Usage::default(), container_oom_kills: None, start: None }
}

/// So many seconds after its shim has begun, a pod does not start any more.
const STARTING: u64 = 300;

/// Whether a pod is up whose VMM, if it lives, has answered this. What keeps this process from asking says nothing of
/// the pod, and neither does a pod that starts: its VMM does not answer yet.
fn is_up(sample: &Sample, answer: Option<&Answer>) -> Option<bool> {
    match (sample.pod.state, answer) {
        (PodState::Unknown, _) => None,
        (PodState::Crashed | PodState::Leftover, _) => Some(false),
        (PodState::Running, Some(Ok(_))) => Some(true),
        (PodState::Running, Some(Err(error))) if cannot_ask(error) => None,
        (PodState::Running, _) => {
            // The record of its start may have been lost.
            let is_old = sample.pod.age_seconds.is_some_and(|age| age >= STARTING);
            (sample.start.is_some() || is_old).then_some(false)
        }
    }
}

/// Whether this process lacks what it takes to ask.
fn cannot_ask(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::ACCESS | Errno::PERM))
}

/// What was found, with the answer of the VMM. None: it has not answered in time.
fn with_answer(looked: Looked, answer: Option<Answer>) -> Sample {
    let Looked { mut sample, vmm } = looked;
    sample.is_up = is_up(&sample, answer.as_ref());
    let problem = match answer {
        Some(Ok(answer)) => {
            sample.usage.file_requests = answer.file_requests;
            sample.usage.devices = answer.devices;
            return sample;
        }
        // Its VMM is gone, which the rest of the sample says.
        None if vmm.is_none() => return sample,
        Some(Err(error)) => format!("the VMM does not answer: {error}"),
        None => "the VMM does not answer in time".to_owned(),
    };
    sample.pod.problems.push(one_line(&problem));
    sample
}

/// As [`look`], without what the pod uses, and nothing to ask its VMM for.
fn look_at_files(path: &Path) -> Option<Looked> {
    let (pod, ..) = pods::look(path);
    path.exists().then(|| Looked { sample: with_nothing_more(pod), vmm: None })
}

fn look(path: &Path) -> Option<Looked> {
    let (mut pod, vmm, config) = pods::look(path);
    let vmm = vmm.zip(config);
    let usage = vmm.as_ref().map(|(vmm, config)| usage::of(*vmm, config)).unwrap_or_default();
    let start = match start::start_record(path) {
        Ok(start) => start,
        Err(error) => {
            pod.problems.push(one_line(&error));
            None
        }
    };
    let container_oom_kills = events::oom_kills(path);
    let sample = Sample { pod, is_up: None, usage, container_oom_kills, start };
    path.exists().then(|| Looked { sample, vmm: vmm.map(|(_, config)| config) })
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader, Write},
        os::unix::net::UnixListener,
        sync::atomic::{AtomicUsize, Ordering},
        thread,
    };

    use nix::{sys::stat::Mode, unistd::mkfifo};

    use super::*;
    use crate::{
        host::{
            journal::Effect,
            process_id::ProcessId,
            state_dir::{self, StateDir},
        },
        operator,
        types::timeline::Timeline,
    };

    #[test]
    fn a_pod_that_hangs_delays_no_other_and_is_not_looked_at_twice() {
        static LOOKS: AtomicUsize = AtomicUsize::new(0);
        let dir = tempfile::tempdir().unwrap();
        for id in ["good", "hangs"] {
            fs::create_dir_all(dir.path().join("c/ns").join(id)).unwrap();
        }
        let sampler = Sampler::default();
        let look = |path: &Path| {
            if path.ends_with("hangs") {
                LOOKS.fetch_add(1, Ordering::Relaxed);
                thread::sleep(Duration::from_secs(3600));
            }
            let mut sample = without_answer(path, "a test");
            sample.pod.state = PodState::Crashed;
            Some(Looked { sample, vmm: None })
        };
        for _ in 0..2 {
            let begun = Instant::now();
            let node = sampler.sample_within(dir.path(), Duration::from_millis(500), look).unwrap();
            let up: Vec<_> = node.pods.iter().map(|it| (it.pod.id.as_str(), it.is_up)).collect();
            assert_eq!(up, [("good", Some(false)), ("hangs", None)]);
            assert!(begun.elapsed() < Duration::from_secs(60));
        }
        assert_eq!(LOOKS.load(Ordering::Relaxed), 1);
    }

    /// A pod of which this process is the shim and the VMM.
    fn pod(root: &Path) -> PathBuf {
        let path = root.join("c/ns/pod");
        let (_state, mut journal) = StateDir::create(&path, &[]).unwrap();
        journal.record(Effect::Vmm(ProcessId::of(std::process::id()).unwrap())).unwrap();
        let config = serde_json::json!({"api_version": 9, "kernel": "k", "initramfs": "i", "vcpus": 1,
            "memory_mib": 256, "control": "control.sock", "vsock": "v",
            "shares": [{"tag": "share", "dir": "share"}]});
        fs::write(path.join("vmm.json"), config.to_string()).unwrap();
        path
    }

    /// A VMM that answers the two requests of a client.
    fn vmm_that_answers(listener: UnixListener, answers: String) -> thread::JoinHandle<()> {
        thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            // Who closes before it has read breaks the pipe of the one who asks.
            let mut requests = BufReader::new(client.try_clone().unwrap());
            for _ in 0..2 {
                requests.read_line(&mut String::new()).unwrap();
            }
            client.write_all(answers.as_bytes()).unwrap();
        })
    }

    #[test]
    fn a_pod_whose_vmm_does_not_answer_is_not_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = pod(dir.path());
        let node = Sampler::default().sample(dir.path()).unwrap();
        let [sample] = node.pods.as_slice() else { panic!("{node:?}") };
        assert_eq!((sample.pod.state, sample.is_up, &sample.start), (PodState::Running, None, &None));
        assert!(sample.pod.problems[0].starts_with("the VMM does not answer: "), "{sample:?}");
        assert!(sample.usage.threads.is_some_and(|threads| threads > 0) && sample.usage.cpu.is_some());
        assert_eq!(node.templates, Some(Vec::new()));
        let record = Timeline::default().record();
        let file = state_dir::make_start_record(&path).unwrap();
        let start = || Sampler::default().sample(dir.path()).unwrap().pods.remove(0);
        assert_eq!(start().start, None);
        state_dir::add_to_start_record(&file, &StartRecord { began_unix_us: 1, ..record.clone() }).unwrap();
        state_dir::add_to_start_record(&file, &record).unwrap();
        (&file).write_all(b"{\"a part").unwrap();
        let started = start();
        // It was up before.
        assert_eq!((started.start, started.is_up), (Some(record), Some(false)));
        // A pod of an older version.
        let old = r#"{"version":1,"began_unix_us":1,"vm":"boot","phases":[{"step":"create","begin_us":0,"duration_us":2}]}"#;
        fs::write(path.join("start.json"), format!("{old}\n")).unwrap();
        assert_eq!(start().start.unwrap().phases[0].duration_us, 2);
        for (wrong, problem) in [("{\n", "start.json: EOF"), ("{\"version\":9}\n", "only versions 1 to 2")] {
            fs::write(path.join("start.json"), wrong).unwrap();
            let problems = start().pod.problems.join("\n");
            assert!(problems.contains(problem), "{problems}");
        }
    }

    #[test]
    fn whether_a_pod_is_up_is_said_only_if_it_is_known() {
        let of = |state, has_started: bool, answer: Option<Answer>| {
            let mut sample = without_answer(Path::new("/c/ns/pod"), "a test");
            sample.pod.state = state;
            sample.start = has_started.then(|| Timeline::default().record());
            is_up(&sample, answer.as_ref())
        };
        let ok = || Some(Ok(usage::Answer::default()));
        let failed = |errno: Errno| Some(Err(errno.into()));
        assert_eq!(of(PodState::Running, false, ok()), Some(true));
        assert_eq!(of(PodState::Running, false, None), None);
        assert_eq!(of(PodState::Running, true, None), Some(false));
        for errno in [Errno::AGAIN, Errno::CONNREFUSED, Errno::NOENT] {
            assert_eq!(of(PodState::Running, true, failed(errno)), Some(false), "{errno}");
        }
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::ACCESS, Errno::PERM] {
            assert_eq!(of(PodState::Running, true, failed(errno)), None, "{errno}");
        }
        assert_eq!(of(PodState::Crashed, false, None), Some(false));
        assert_eq!(of(PodState::Leftover, true, ok()), Some(false));
        assert_eq!(of(PodState::Unknown, true, None), None);
        let mut sample = without_answer(Path::new("/c/ns/pod"), "a test");
        sample.pod.state = PodState::Running;
        let at = |sample: &mut Sample, age| {
            sample.pod.age_seconds = Some(age);
            is_up(sample, None)
        };
        assert_eq!([at(&mut sample, STARTING - 1), at(&mut sample, STARTING)], [None, Some(false)]);
    }

    #[test]
    fn no_list_waits_for_a_pod_that_hangs() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["c/ns/good", "c/ns/hangs", ".templates/00ff"] {
            fs::create_dir_all(dir.path().join(name)).unwrap();
        }
        // Whoever opens it waits for somebody who writes.
        mkfifo(&dir.path().join("c/ns/hangs/vmm.json"), Mode::S_IRUSR).unwrap();
        let (sender, receiver) = channel();
        let begin = |list: fn(&Path) -> usize| {
            let (root, sender) = (dir.path().to_owned(), sender.clone());
            thread::spawn(move || sender.send(list(&root)));
        };
        let next = || receiver.recv_timeout(Duration::from_secs(60)).expect("it waits");
        begin(|root| {
            let pods = operator::pods(root).unwrap();
            let problem = |at: usize| pods[at].problems.join("\n");
            assert!(problem(0).contains("cannot read the journal"), "{pods:?}");
            assert!(pods[1].id == "hangs" && problem(1).ends_with("cannot be looked at in time"), "{pods:?}");
            pods.len()
        });
        begin(|root| operator::templates(root).unwrap().len() + 10);
        let listed = [next(), next()];
        assert!(listed == [2, 11] || listed == [11, 2], "{listed:?}");
        begin(|root| operator::garbage(root).unwrap().len());
        assert_eq!(next(), 0);
        begin(|root| operator::remove_all_templates(root).unwrap());
        assert_eq!(next(), 1);
    }

    #[test]
    fn a_pod_of_a_later_version_is_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = pod(dir.path());
        let config = serde_json::json!({"api_version": 1000, "vcpus": 2, "control": "control.sock", "later": {},
            "shares": [{"tag": "share", "later": 1}], "restore_from": "/t"});
        fs::write(path.join("vmm.json"), config.to_string()).unwrap();
        let listener = UnixListener::bind(path.join("control.sock")).unwrap();
        let share = r#"{"tag":"share","requests":{"LOOKUP":3},"later":1}"#;
        let shares = format!(r#"{{"result":"counts","later":1,"shares":[{share}]}}"#);
        let devices = r#"{"result":"devices","later":1,"balloon_bytes":5}"#;
        let vmm = vmm_that_answers(listener, format!("{shares}\n{devices}\n"));
        let sample = Sampler::default()
            .sample_within(dir.path(), Duration::from_secs(60), look)
            .unwrap()
            .pods
            .remove(0);
        assert_eq!((sample.is_up, &sample.pod.problems[..]), (Some(true), &[][..]));
        assert_eq!((sample.pod.vcpus, sample.pod.template), (Some(2), Some("/t".into())));
        assert!(sample.usage.threads.is_some());
        assert_eq!(sample.usage.file_requests, [("shared", 3)]);
        assert_eq!(sample.usage.devices.balloon_bytes, Some(5));
        vmm.join().unwrap();
    }

    #[test]
    fn a_vmm_that_hangs_is_asked_once_and_its_pod_is_looked_at_each_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = pod(dir.path());
        let listener = UnixListener::bind(path.join("control.sock")).unwrap();
        listener.set_nonblocking(true).unwrap();
        let sampler = Sampler::default();
        let sample = |within| sampler.sample_within(dir.path(), within, look).unwrap().pods.remove(0);
        let late = sample(Duration::from_millis(500));
        assert_eq!(
            (late.is_up, late.pod.problems.as_slice()),
            (None, &["the VMM does not answer in time".into()][..])
        );
        // It waits for nobody now.
        let begun = Instant::now();
        let again = sample(Duration::from_secs(3600));
        assert!(begun.elapsed() < Duration::from_secs(60) && again.is_up.is_none());
        assert!(again.usage.threads.is_some() && again.pod.memory_bytes.is_some());
        let (mut client, _) = listener.accept().unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        // The VMM goes on. When the thread has its answer, the VMM can be asked again.
        let older = b"{\"result\":\"counts\",\"shares\":[]}\n{\"result\":\"error\",\"message\":\"x\"}\n";
        client.write_all(older).unwrap();
        while !lock(&sampler.busy).is_empty() {
            thread::yield_now();
        }
        drop(listener);
        fs::remove_file(path.join("control.sock")).unwrap();
        let listener = UnixListener::bind(path.join("control.sock")).unwrap();
        let answer = r#"{"result":"counts","shares":[{"tag":"share","requests":{"LOOKUP":3}}]}"#;
        let vmm = vmm_that_answers(listener, format!("{answer}\n"));
        let up = sample(Duration::from_secs(60));
        let problems = up.pod.problems;
        assert_eq!((up.is_up, up.usage.file_requests), (Some(true), vec![("shared", 3)]), "{problems:?}");
        vmm.join().unwrap();
    }
}
