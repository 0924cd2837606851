use super::*;

fn base() -> serde_json::Value {
    serde_json::json!({
        "ociVersion": "1.1.0",
        "root": {"path": "/run/bulkhead/share/c/rootfs"},
        "hostname": "box",
        "process": {"user": {"uid": 0, "gid": 0}, "args": ["sh"], "cwd": "/"},
        "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "uts"}, {"type": "cgroup"}]}
    })
}

fn with(pointer: &str, value: serde_json::Value) -> Result<Resolved, SpecError> {
    let mut spec = base();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    spec.pointer_mut(parent).unwrap()[key] = value;
    resolve(spec.to_string().as_bytes(), Path::new("/sys/fs/cgroup/c"), PodSharing::default())
}

#[test]
fn the_least_a_container_needs_is_accepted() {
    let resolved =
        resolve(base().to_string().as_bytes(), Path::new("/sys/fs/cgroup/c"), PodSharing::default()).unwrap();
    assert!(resolved.own_pid_namespace && resolved.init.cgroup_namespace);
    let bits = libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWUTS;
    assert_eq!(resolved.init.namespaces, bits as u64);
    assert_eq!(resolved.init.hostname.as_deref(), Some("box"));
    assert_eq!(resolved.init.process.umask, 0o022);
    assert_eq!(resolved.init.process.oom_score_adj, 0);
    let rootfs = resolved.init.rootfs.unwrap();
    assert_eq!(rootfs.devices.len(), 6);
    assert!(rootfs.masked_paths.is_empty());
}

#[test]
fn a_member_of_a_pod_is_at_home_in_the_namespaces_it_joins() {
    let mut spec = base();
    spec["linux"]["namespaces"] = serde_json::json!([{"type": "mount"}]);
    let joined = (libc::CLONE_NEWPID | libc::CLONE_NEWUTS) as u64;
    let resolve = |spec: &serde_json::Value, joined| {
        let place = PodSharing { joined, ..PodSharing::default() };
        resolve(spec.to_string().as_bytes(), Path::new("/sys/fs/cgroup/c"), place)
    };
    let resolved = resolve(&spec, joined).unwrap();
    assert!(!resolved.own_pid_namespace);
    assert_eq!(resolved.init.namespaces, libc::CLONE_NEWNS as u64);
    // Without a uts namespace its hostname would be the guest's.
    assert!(resolve(&spec, 0).unwrap_err().to_string().starts_with("hostname: "));
    spec["linux"]["namespaces"] = serde_json::json!([{"type": "mount"}, {"type": "pid"}]);
    assert!(resolve(&spec, joined).unwrap_err().to_string().starts_with("linux.namespaces: "));
}

#[test]
fn pause_has_no_files_and_no_program_of_the_image() {
    let mut spec = base();
    spec.as_object_mut().unwrap().remove("root");
    spec["process"]["args"] = serde_json::json!([]);
    let place = PodSharing { is_pause: true, ..PodSharing::default() };
    let init = resolve(spec.to_string().as_bytes(), Path::new("/sys/fs/cgroup/c"), place).unwrap().init;
    assert!(init.rootfs.is_none());
    assert_eq!(init.process.args, ["/pause"]);
}

#[test]
fn what_is_not_built_is_refused_by_name() {
    let cases = [
        ("/process/selinuxLabel", serde_json::json!("l"), "process.selinuxLabel"),
        ("/process/commandLine", serde_json::json!("c"), "process.commandLine"),
        ("/process/user", serde_json::json!({"uid": 0, "gid": 0, "username": "u"}), "process.user.username"),
        ("/process/execCPUAffinity", serde_json::json!({"initial": "0"}), "process.execCPUAffinity"),
        ("/solaris", serde_json::json!({}), "solaris"),
        ("/windows", serde_json::json!({"layerFolders": ["x"]}), "windows"),
        ("/vm", serde_json::json!({"kernel": {"path": "/x"}}), "vm"),
        ("/zos", serde_json::json!({}), "zos"),
        ("/linux/netDevices", serde_json::json!({"eth1": {}}), "linux.netDevices"),
        ("/linux/intelRdt", serde_json::json!({"closID": "c"}), "linux.intelRdt"),
        ("/linux/memoryPolicy", serde_json::json!({"mode": "MPOL_LOCAL"}), "linux.memoryPolicy"),
        ("/hooks", serde_json::json!({"prestart": [{"path": "/x"}]}), "hooks"),
        (
            "/linux/namespaces",
            serde_json::json!([{"type": "mount", "path": "/x"}]),
            "linux.namespaces[mount].path",
        ),
        (
            "/linux/namespaces",
            serde_json::json!([{"type": "user", "path": "/x"}]),
            "linux.namespaces[user].path",
        ),
        ("/linux/namespaces", serde_json::json!([]), "without a mount namespace"),
        ("/linux/mountLabel", serde_json::json!("l"), "linux.mountLabel"),
        (
            "/linux/personality",
            serde_json::json!({"domain": "LINUX", "flags": ["x"]}),
            "linux.personality.flags",
        ),
    ];
    for (pointer, value, name) in cases {
        let error = with(pointer, value).unwrap_err();
        assert!(matches!(&error, SpecError::Unimplemented { field, .. } if field.contains(name)), "{error}");
    }
}

#[test]
fn a_user_namespace_has_ids_of_its_own() {
    let range = |inside: u32, outside: u32, length: u32| serde_json::json!({"containerID": inside, "hostID": outside, "size": length});
    let of = |kinds: &[&str], users: serde_json::Value, groups: serde_json::Value| {
        let mut spec = base();
        let list = spec["linux"]["namespaces"].as_array_mut().unwrap();
        list.extend(kinds.iter().map(|kind| serde_json::json!({ "type": kind })));
        spec["linux"]["uidMappings"] = users;
        spec["linux"]["gidMappings"] = groups;
        resolve(spec.to_string().as_bytes(), Path::new("/sys/fs/cgroup/c"), PodSharing::default())
    };
    let both = serde_json::json!([range(0, 100_000, 1000), range(5000, 7, 1)]);
    let init = of(&["user"], both.clone(), both.clone()).unwrap().init;
    assert_ne!(init.namespaces & libc::CLONE_NEWUSER as u64, 0);
    let ids = init.process.common.ids.unwrap();
    let outside = |id| crate::stage_config::outside(&ids.users, id);
    assert_eq!([0, 999, 1000, 5000].map(outside), [Some(100_000), Some(100_999), None, Some(7)]);
    for (kinds, users, groups, expected) in [
        (&[][..], both.clone(), serde_json::json!([]), "linux.uidMappings: needs a user namespace"),
        (&["user"], both.clone(), serde_json::json!([]), "linux.gidMappings: must be set"),
        (&["user"], serde_json::json!([range(1, 1, 1)]), both.clone(), "linux.uidMappings: has no id"),
        (&["user", "user"], both.clone(), both.clone(), "linux.namespaces[user]: is given twice"),
    ] {
        let error = of(kinds, users, groups).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn clocks_differ_in_a_time_namespace() {
    let of = |offsets: serde_json::Value| {
        let mut spec = base();
        spec["linux"]["namespaces"].as_array_mut().unwrap().push(serde_json::json!({"type": "time"}));
        spec["linux"]["timeOffsets"] = offsets;
        resolve(spec.to_string().as_bytes(), Path::new("/sys/fs/cgroup/c"), PodSharing::default())
    };
    let lines = |offsets| of(offsets).unwrap().init.time_offsets;
    let both = serde_json::json!({"monotonic": {"secs": -5, "nanosecs": 7}, "boottime": {"secs": 86400}});
    assert_eq!(lines(both).as_deref(), Some("boottime 86400 0\nmonotonic -5 7\n"));
    assert_eq!(lines(serde_json::json!({})).as_deref(), Some(""));
    assert_eq!(with("/hostname", serde_json::json!("box")).unwrap().init.time_offsets, None);
    let error = of(serde_json::json!({"realtime": {"secs": 1}})).unwrap_err().to_string();
    assert!(error.contains("\"realtime\" is neither"), "{error}");
}

#[test]
fn what_is_wrong_is_refused_with_the_reason() {
    let cases = [
        ("/ociVersion", serde_json::json!("2.0"), "ociVersion"),
        ("/process/args", serde_json::json!([]), "process.args"),
        ("/process/args", serde_json::json!(["a\0b"]), "NUL"),
        ("/process/cwd", serde_json::json!("here"), "process.cwd"),
        ("/process/oomScoreAdj", serde_json::json!(2000), "process.oomScoreAdj"),
        ("/root/path", serde_json::json!("rootfs"), "root.path"),
        ("/linux/namespaces", serde_json::json!([{"type": "mount"}]), "hostname: needs a uts namespace"),
        ("/linux/namespaces", serde_json::json!([{"type": "mount"}, {"type": "mount"}]), "is given twice"),
        ("/linux/timeOffsets", serde_json::json!({"boottime": {"secs": 1}}), "needs a time namespace"),
        (
            "/mounts",
            serde_json::json!([{"destination": "/a", "type": "bind", "source": "/s",
                "uidMappings": [{"hostID": 0, "containerID": 0, "size": 1}]}]),
            "mounts[0] (/a): uidMappings and gidMappings: needs ranges of both",
        ),
        ("/linux/maskedPaths", serde_json::json!(["proc"]), "linux.maskedPaths"),
        ("/linux/rootfsPropagation", serde_json::json!("loud"), "linux.rootfsPropagation"),
        (
            "/process/rlimits",
            serde_json::json!([{"type": "RLIMIT_NOFILE", "soft": 2, "hard": 1}]),
            "process.rlimits[RLIMIT_NOFILE]",
        ),
        (
            "/process/ioPriority",
            serde_json::json!({"class": "IOPRIO_CLASS_BE", "priority": 8}),
            "process.ioPriority",
        ),
    ];
    for (pointer, value, text) in cases {
        let error = with(pointer, value).unwrap_err();
        assert!(matches!(error, SpecError::Invalid { .. }), "{error}");
        assert!(error.to_string().contains(text), "{error}");
    }
}

fn exec_with(key: &str, value: serde_json::Value) -> Result<ProcessConfig, SpecError> {
    let mut process = base()["process"].clone();
    process[key] = value;
    resolve_exec(process.to_string().as_bytes(), CommonConfig::default())
}

#[test]
fn a_process_that_joins_is_checked_as_an_init_is() {
    let process = exec_with("oomScoreAdj", serde_json::json!(7)).unwrap();
    assert_eq!((process.args, process.umask, process.oom_score_adj), (vec!["sh".to_owned()], 0o022, 7));
    let error = exec_with("cwd", serde_json::json!("here")).unwrap_err();
    assert!(matches!(&error, SpecError::Invalid { field, .. } if field == "process.cwd"), "{error}");
    assert!(matches!(resolve_exec(b"{}", CommonConfig::default()), Err(SpecError::Json(_))));
}

#[test]
fn a_terminal_has_the_size_that_the_spec_gives() {
    let of = |change: serde_json::Value| {
        let mut process = base()["process"].clone();
        process.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        resolve_exec(process.to_string().as_bytes(), CommonConfig::default()).map(|process| process.terminal)
    };
    let size = serde_json::json!({"height": 24, "width": 80});
    let with_size = serde_json::json!({"terminal": true, "consoleSize": size});
    assert_eq!(of(with_size).unwrap(), Some(WindowSize { width: 80, height: 24 }));
    assert_eq!(of(serde_json::json!({"terminal": true})).unwrap(), Some(WindowSize::default()));
    assert_eq!(of(serde_json::json!({"consoleSize": size})).unwrap(), None);
    let huge = serde_json::json!({"terminal": true, "consoleSize": {"height": 24, "width": 65536}});
    let error = of(huge).unwrap_err();
    assert!(matches!(&error, SpecError::Invalid { field, .. } if field == "process.consoleSize"), "{error}");
}

#[test]
fn the_affinity_of_processes_that_join_is_refused_there_too() {
    let affinity = serde_json::json!({"initial": "0", "final": "0-1"});
    let error = exec_with("execCPUAffinity", affinity).unwrap_err();
    let name = "process.execCPUAffinity";
    assert!(matches!(&error, SpecError::Unimplemented { field, .. } if field == name), "{error}");
}

#[test]
fn empty_lists_ask_for_nothing() {
    for (pointer, value) in [
        ("/hooks", serde_json::json!({"poststop": []})),
        ("/linux/uidMappings", serde_json::json!([])),
        ("/process/apparmorProfile", serde_json::json!("")),
        ("/process/apparmorProfile", serde_json::json!("unconfined")),
        ("/linux/rootfsPropagation", serde_json::json!("")),
    ] {
        with(pointer, value).unwrap();
    }
}

#[test]
fn a_label_of_selinux_is_refused_with_what_to_do() {
    for pointer in ["/process/selinuxLabel", "/linux/mountLabel"] {
        let error = with(pointer, serde_json::json!("system_u:object_r:container_file_t:s0")).unwrap_err();
        let field = pointer.trim_start_matches('/').replace('/', ".");
        assert!(error.to_string().starts_with(&format!("{field}: not implemented; ")), "{error}");
        assert!(error.to_string().contains("enable_selinux = false"), "{error}");
    }
}

#[test]
fn a_process_that_joins_has_the_containers_profile_unless_it_names_another() {
    let of = |profile: Option<&str>| {
        let mut spec = base();
        spec["process"]["apparmorProfile"] = serde_json::json!(profile);
        let resolved =
            resolve(spec.to_string().as_bytes(), Path::new("/sys/fs/cgroup/c"), PodSharing::default());
        resolved.unwrap().init.process.common
    };
    assert_eq!(of(None).apparmor_profile, None);
    assert_eq!(of(Some("unconfined")).apparmor_profile, None);
    let exec = |container: Option<&str>, process: serde_json::Value| {
        let mut json = base()["process"].clone();
        json["apparmorProfile"] = process;
        resolve_exec(json.to_string().as_bytes(), of(container)).unwrap().common.apparmor_profile
    };
    let own = Some("own".to_owned());
    assert_eq!(exec(Some("own"), serde_json::json!(null)), own);
    assert_eq!(exec(Some("own"), serde_json::json!("")), own);
    assert_eq!(exec(Some("own"), serde_json::json!("unconfined")), None);
    assert_eq!(exec(Some("other"), serde_json::json!("own")), own);
    assert_eq!(exec(None, serde_json::json!("own")), own);
}

#[test]
fn a_profile_for_pause_is_refused_by_name() {
    let mut spec = base();
    spec["process"]["apparmorProfile"] = serde_json::json!("p");
    let place = PodSharing { is_pause: true, ..PodSharing::default() };
    let error = resolve(spec.to_string().as_bytes(), Path::new("/sys/fs/cgroup/c"), place).unwrap_err();
    assert!(error.to_string().starts_with("process.apparmorProfile of a pod's sandbox"), "{error}");
}

#[test]
fn a_bound_dev_is_left_alone() {
    let mounts = serde_json::json!([{"destination": "/dev/", "source": "/dev", "options": ["rbind"]}]);
    let rootfs = with("/mounts", mounts).unwrap().init.rootfs.unwrap();
    assert!(!rootfs.dev_links && rootfs.devices.is_empty());
}
