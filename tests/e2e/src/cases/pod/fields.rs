//! Fields of the CRI's messages of which no other case makes use. fields/cri.rs lists them all.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use flate2::read::GzDecoder;
use prost::Message;
use prost_types::{DescriptorProto, FileDescriptorProto, field_descriptor_proto::Type};
use serde_json::json;
use tempfile::NamedTempFile;

use super::super::Case;
use super::memory::cpu_overhead;
use super::network::{GATEWAY, expect_hello, serve};
use crate::containerd::Version;
use crate::cri::messages::*;
use crate::ctr::Host;
use crate::fields::cri::{FIELDS, MESSAGES};
use crate::pods::Pod;

pub(in crate::cases) const CASES: &[Case] = &[
    Case::both("every_field_that_containerd_knows_is_listed", listed),
    Case::both("a_pods_names_and_notes_are_kept", names),
    Case::both("a_port_of_one_address_of_the_host_is_the_pods", address_of_port),
    Case::both("pause_is_what_the_pods_context_says", pause),
    Case::both("a_system_call_filter_of_the_users_own_is_applied", own_filter),
    Case::both("groups_of_the_image_are_left_out_if_asked_for", strict_groups).since(2, 0),
    Case::both("sets_and_files_of_the_cgroup_are_the_limits", limits),
];

/// The package of the CRI.
const PACKAGE: &str = "runtime.v1";

/// Of SupplementalGroupsPolicy: no groups but those of the request.
const STRICT: i32 = 1;

/// What a description of messages takes at most.
const LONGEST: u64 = 1 << 20;

/// The description of the CRI's messages in containerd's program. It is there as the compiler of protocol buffers makes
/// it, compressed by gzip.
fn description() -> Result<FileDescriptorProto> {
    let path = std::env::var_os("PATH").context("no PATH")?;
    let programs = std::env::split_paths(&path).map(|directory| directory.join("containerd"));
    let program: PathBuf = programs.into_iter().find(|file| file.exists()).context("no containerd")?;
    let bytes = fs::read(&program).with_context(|| format!("cannot read {}", program.display()))?;
    let starts = bytes.windows(3).enumerate().filter(|(_, head)| *head == [0x1f, 0x8b, 8]);
    let found = starts.into_iter().find_map(|(at, _)| {
        let mut text = Vec::new();
        GzDecoder::new(&bytes[at..]).take(LONGEST).read_to_end(&mut text).ok()?;
        FileDescriptorProto::decode(text.as_slice()).ok().filter(|file| file.package() == PACKAGE)
    });
    found.with_context(|| format!("{} does not describe {PACKAGE}", program.display()))
}

/// Adds the paths of a message's fields. A field that is one of the listed messages ends there.
fn add_fields(
    file: &FileDescriptorProto,
    message: &DescriptorProto,
    before: &str,
    found: &mut BTreeSet<String>,
) {
    for field in &message.field {
        let name = format!("{before}.{}", field.name());
        let type_name = field.type_name().strip_prefix(&format!(".{PACKAGE}.")).unwrap_or_default();
        let is_inner = field.r#type() == Type::Message && !MESSAGES.contains(&type_name);
        // What is in them is not listed: a value that may be left out, one row of a list of ids, and what is for
        // Windows.
        let ends =
            type_name.ends_with("Value") || type_name == "IDMapping" || type_name.starts_with("Windows");
        // The entries of a map are messages within this one, and are not found among those of the file.
        match file.message_type.iter().find(|it| is_inner && !ends && it.name() == type_name) {
            Some(inner) => add_fields(file, inner, &name, found),
            None => drop(found.insert(name)),
        }
    }
}

fn listed(_host: &Host) -> Result<()> {
    let file = description()?;
    let mut found = BTreeSet::new();
    for name in MESSAGES {
        let message = file.message_type.iter().find(|message| message.name() == name);
        add_fields(&file, message.with_context(|| format!("no {name} in the CRI"))?, name, &mut found);
    }
    ensure!(found.len() > 50, "expected  the fields of the CRI\ncame      {found:#?}");
    let listed: BTreeSet<String> = FIELDS.iter().map(|row| row.name.to_owned()).collect();
    let missing: Vec<_> = found.difference(&listed).collect();
    ensure!(missing.is_empty(), "expected  every field in fields/cri.rs\ncame      others: {missing:#?}");
    Ok(())
}

fn names(host: &Host) -> Result<()> {
    let pod = Pod::plan(host).label("label", "kept").config(|config| {
        config.annotations.insert("note".to_owned(), "kept too".to_owned());
        config.metadata.get_or_insert_default().attempt = 3;
    });
    let pod = pod.start()?;
    let status = pod.status()?;
    let metadata = status.metadata.context("a pod without a name")?;
    let is_same = metadata.uid == format!("uid-of-{}", metadata.name) && metadata.attempt == 3;
    ensure!(is_same && metadata.namespace == "e2e", "expected  the pod's names\ncame      {metadata:?}");
    let (labels, annotations) = (status.labels, status.annotations);
    let is_kept = labels.get("label").is_some_and(|it| it == "kept")
        && annotations.get("note").is_some_and(|it| it == "kept too");
    ensure!(is_kept, "expected  the label and the note\ncame      {labels:?} {annotations:?}");
    Ok(())
}

fn address_of_port(host: &Host) -> Result<()> {
    const PORT: u16 = 28082;
    let pod = Pod::plan(host).host_port(PORT.into(), 80).config(|config| {
        config.port_mappings.iter_mut().for_each(|mapping| mapping.host_ip = GATEWAY.to_owned());
    });
    let pod = pod.start()?;
    let _server = serve(&pod)?;
    expect_hello(host, GATEWAY.parse()?, PORT)?;
    let loopback = TcpStream::connect((Ipv4Addr::LOCALHOST, PORT));
    ensure!(loopback.is_err(), "expected  no answer at another address of the host\ncame      one");
    Ok(())
}

/// A profile that forbids mkdir by its own error.
fn profile() -> Result<NamedTempFile> {
    let file = NamedTempFile::new().context("cannot make a file")?;
    let rule = json!({"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95});
    let profile = json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]});
    fs::write(file.path(), profile.to_string()).context("cannot write the profile")?;
    Ok(file)
}

fn localhost(profile: &NamedTempFile) -> Option<SecurityProfile> {
    let localhost_ref = profile.path().display().to_string();
    Some(SecurityProfile { profile_type: ProfileType::Localhost.into(), localhost_ref })
}

fn pause(host: &Host) -> Result<()> {
    let profile = profile()?;
    let memory = |bytes: i64| LinuxContainerResources { memory_limit_in_bytes: bytes, ..Default::default() };
    let pod = Pod::plan(host).share_processes().config(|config| {
        config.windows = Some(Empty {});
        let linux = config.linux.get_or_insert_default();
        (linux.overhead, linux.resources) = (Some(memory(64 << 20)), Some(memory(128 << 20)));
        let context = linux.security_context.get_or_insert_default();
        context.namespace_options.get_or_insert_default().target_id = "nobody".to_owned();
        context.supplemental_groups_policy = STRICT;
        context.run_as_user = Some(Int64Value { value: 1234 });
        context.run_as_group = Some(Int64Value { value: 2345 });
        context.supplemental_groups = vec![3456];
        context.readonly_rootfs = true;
        context.seccomp = localhost(&profile);
        // It counts only without the other.
        context.seccomp_profile_path = "localhost/no/such/profile".to_owned();
    });
    let pod = pod.start()?;
    let seen = pod.container().sh("grep -E '^(Uid|Gid|Groups|Seccomp):' /proc/1/status")?;
    seen.succeeds()?.says("Uid", "1234\t1234\t1234\t1234")?.says("Gid", "2345\t2345\t2345\t2345")?;
    // containerd does not pass on the other group.
    seen.says("Groups", "2345")?.says("Seccomp", "2")?;
    Ok(())
}

fn own_filter(host: &Host) -> Result<()> {
    let (pod, profile) = (Pod::start(host)?, profile()?);
    let script = "mkdir /made 2>&1; grep ^Seccomp: /proc/self/status";
    let by_context = pod.container().security(|security| security.seccomp = localhost(&profile));
    let by_path = pod.container().security(|security| {
        security.seccomp_profile_path = format!("localhost/{}", profile.path().display());
    });
    // containerd 2 does not read the path any more.
    let by_path = (host.version() < Version::new(2, 0)).then_some(by_path);
    for container in [Some(by_context), by_path].into_iter().flatten() {
        let seen = container.sh(script)?;
        seen.says("Seccomp", "2")?.check("the profile's error", seen.text().contains("not supported"))?;
    }
    Ok(())
}

fn strict_groups(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().security(|security| {
        security.run_as_username = "user".to_owned();
        security.supplemental_groups_policy = STRICT;
    });
    // /etc/group of the image has the user in one more group.
    container.run(&["id", "-G"])?.succeeds()?.prints("1000\n")?;
    Ok(())
}

fn limits(host: &Host) -> Result<()> {
    // kubelet's limit of the pod is that of its container, and the overhead of its RuntimeClass.
    let pod = Pod::plan(host).cpu_max(500 + cpu_overhead()?).start()?;
    // What kubelet 1.30 to 1.34 sends for a request of 16 MiB, and a limit of 64 MiB and `cpu: 500m`, on a node with
    // cgroup v2 and swap: memory.swap.max for all containers, memory.oom.group without singleProcessOOMKill, and the
    // others with the feature gate MemoryQoS.
    let unified = |swap: &str| {
        let files = [
            ("memory.swap.max", swap),
            ("memory.oom.group", "1"),
            ("memory.min", "16777216"),
            ("memory.high", "50331648"),
        ];
        files.map(|(file, value)| (file.to_owned(), value.to_owned())).into()
    };
    let kubelets = LinuxContainerResources {
        cpu_period: 100_000,
        cpu_quota: 50_000,
        cpu_shares: 512,
        memory_limit_in_bytes: 64 << 20,
        oom_score_adj: 985,
        cpuset_cpus: "0".to_owned(),
        cpuset_mems: "0".to_owned(),
        // Of each size that the host has.
        hugepage_limits: ["1GB", "2MB"]
            .map(|size| HugepageLimit { page_size: size.to_owned(), ..Default::default() })
            .into(),
        // With cgroup v1 only.
        memory_swap_limit_in_bytes: 64 << 20,
        unified: unified("0"),
    };
    let container = pod.container().resources(kubelets.clone()).start(&["sleep", "1000"])?;
    let script = "cd /sys/fs/cgroup && cat cpuset.cpus.effective cpu.max memory.max memory.min memory.high \
                  memory.oom.group && grep Mems_allowed_list: /proc/self/status | cut -f2; cat memory.swap.max";
    let expect = |max: &str, swap: &str| {
        container
            .sh(script)?
            .succeeds()?
            .prints(&format!("0\n50000 100000\n{max}\n16777216\n50331648\n1\n0\n{swap}\n"))
            .map(drop)
    };
    expect("67108864", "0")?;
    // A resize in place. With LimitedSwap, a part of the node's swap is the container's.
    container.update(LinuxContainerResources {
        memory_limit_in_bytes: 96 << 20,
        memory_swap_limit_in_bytes: 0,
        unified: unified("8388608"),
        ..kubelets
    })?;
    expect("100663296", "8388608")?;
    pod.remove()
}
