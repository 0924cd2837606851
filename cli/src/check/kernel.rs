//! What the host's processor and kernel must offer. `root` is `/`, but in tests.

use std::{fs, path::Path, thread};

use bulkhead_host_shim::operator::{chain, one_line};
use bulkhead_vmm::{jail, kvm};

use crate::{
    check::{distribution::Family, finding::Finding},
    containerd::major_and_minor,
};

/// The modules that the network of pods needs. The kernel loads them itself if it has them.
const NETWORK: [&str; 4] = ["tun", "sch_ingress", "cls_u32", "act_mirred"];
/// Those that port-forward of the CRI needs, and docker's name server for names that it asks of other servers.
const MORE: [&str; 5] = ["nf_tables", "nft_chain_nat", "nft_redir", "cls_flower", "act_ct"];

/// The controllers of cgroups by which the host limits a pod.
const CONTROLLERS: [&str; 4] = ["cpu", "cpuset", "memory", "pids"];

/// The oldest kernel of a host. The VMM does not run without mount_setattr(2), by which it takes devices and programs
/// away from all mounts of its jail at once. What else Bulkhead cannot do without is older: openat2(2) of Linux 5.6,
/// pidfd_open(2) of 5.3, open_tree(2) and move_mount(2) of 5.2, and what the VMM needs of KVM. What is newer is used
/// only if it is there: Landlock, core scheduling, and pages that are mapped before they are touched.
const OLDEST: (u32, u32) = (5, 12);

/// Whether the kernel is new enough.
pub(super) fn release(root: &Path) -> Finding {
    let check = "kernel";
    let text = fs::read_to_string(root.join("proc/sys/kernel/osrelease")).unwrap_or_default();
    let found = format!("Linux {}", one_line(text.trim()));
    match major_and_minor(&text) {
        Some(numbers) if numbers >= OLDEST => Finding::ok(check, found),
        Some(_) => Finding::fail(
            check,
            format!("{found}: the VMM needs Linux 5.12 or later, for mount_setattr(2)"),
            "boot a newer kernel, or update the distribution; Linux 6.12 was tested",
        ),
        None => Finding::warn(
            check,
            "its version is not known: /proc/sys/kernel/osrelease cannot be read",
            "mount /proc; the VMM needs Linux 5.12 or later",
        ),
    }
}

/// Whether KVM can run a VM, by the code of the VMM. It makes one, which another hypervisor may prevent.
pub(super) fn kvm(root: &Path) -> Finding {
    match kvm::open().map(|kvm| kvm.create_vm()) {
        Ok(Err(error)) => Finding::fail(
            "KVM",
            format!("cannot make a VM: {error}"),
            "end other hypervisors, such as VirtualBox or VMware; look at `dmesg | grep -i kvm`",
        ),
        Ok(Ok(_)) => {
            let modules = ["kvm_intel", "kvm_amd"];
            let module = modules.into_iter().find(|name| root.join("sys/module").join(name).exists());
            Finding::ok(
                "KVM",
                module.map_or("can run a VM".into(), |name| format!("can run a VM, by {name}")),
            )
        }
        Err(error) => Finding::error("KVM", &error, error.remedy(), "look at `dmesg | grep -i kvm`"),
    }
}

/// Whether the processor has extensions for virtual machines.
pub(super) fn processor(root: &Path) -> Finding {
    let text = fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
    let flags = text.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let has = |flag: &str| flags.split_whitespace().any(|word| word == flag);
    let nested = if has("hypervisor") { "; this host is itself a VM" } else { "" };
    match (has("vmx"), has("svm")) {
        (true, _) => Finding::ok("processor", format!("has VMX (Intel VT-x){nested}")),
        (_, true) => Finding::ok("processor", format!("has SVM (AMD-V){nested}")),
        _ => Finding::fail(
            "processor",
            format!("has neither VMX nor SVM{nested}"),
            "enable virtualization in the firmware, or nested virtualization in the host of this VM",
        ),
    }
}

/// Whether the kernel has the modules that the network of pods needs.
pub(super) fn modules(root: &Path) -> Finding {
    let release = fs::read_to_string(root.join("proc/sys/kernel/osrelease")).unwrap_or_default();
    let directory = root.join("lib/modules").join(release.trim());
    let list = |name: &str| fs::read_to_string(directory.join(name)).unwrap_or_default();
    let (builtin, available) = (list("modules.builtin"), list("modules.dep"));
    let is_loaded = |name: &str| root.join("sys/module").join(name).exists();
    let disabled = fs::read_to_string(root.join("proc/sys/kernel/modules_disabled"));
    if disabled.is_ok_and(|text| text.trim() == "1") {
        let lacks = |name: &&&str| !is_loaded(name) && !is_listed(&builtin, name);
        return not_loadable(
            !builtin.is_empty(),
            &NETWORK.iter().filter(lacks).copied().collect::<Vec<_>>(),
            &MORE.iter().filter(lacks).copied().collect::<Vec<_>>(),
        );
    }
    let lacks = |name: &&str| !is_loaded(name) && !is_listed(&builtin, name) && !is_listed(&available, name);
    let missing = |names: &[&'static str]| names.iter().copied().filter(lacks).collect::<Vec<_>>();
    let (of_network, more) = (missing(&NETWORK), missing(&MORE));
    let unlisted = builtin.is_empty() && available.is_empty();
    let install = Family::of(root).install_modules();
    match (of_network.is_empty(), more.is_empty()) {
        (true, true) => {
            let all = [&NETWORK[..], &MORE].concat().join(", ");
            Finding::ok("modules", format!("{all} are loaded, built in, or can be loaded"))
        }
        (false, _) if unlisted => Finding::warn(
            "modules",
            format!(
                "there is no list of modules in {}; not loaded: {}",
                directory.display(),
                of_network.join(", ")
            ),
            format!(
                "try `modprobe -a {}`; if that fails: {install}; pods with a network need these modules",
                of_network.join(" ")
            ),
        ),
        (false, _) => Finding::fail(
            "modules",
            format!("the kernel has no {}", of_network.join(", ")),
            format!("{install}; pods with a network need these modules"),
        ),
        (true, false) => Finding::warn(
            "modules",
            format!("the kernel has no {}", more.join(", ")),
            format!(
                "{install}; nf_tables, nft_chain_nat and nft_redir are for port-forward, cls_flower and act_ct for \
                 names of other servers that docker's name server is asked"
            ),
        ),
    }
}

/// What is wrong on a host that loads no more modules, and lacks these. `is_listed`: a list says what is built in.
fn not_loadable(is_listed: bool, of_network: &[&str], more: &[&str]) -> Finding {
    let all = [of_network, more].concat();
    if all.is_empty() {
        return Finding::ok("modules", "all are loaded or built in, and no others can be loaded");
    }
    if !is_listed {
        return Finding::warn(
            "modules",
            format!(
                "not loaded: {}; kernel.modules_disabled=1 lets nobody load them, and no list says which are built in",
                all.join(", ")
            ),
            "start a pod with a network; if that fails, use a kernel with these modules, or load them at boot before \
             kernel.modules_disabled is set (modules-load.d(5))",
        );
    }
    Finding::bad(
        of_network.is_empty(),
        "modules",
        format!("not loaded, and kernel.modules_disabled=1 lets nobody load them: {}", all.join(", ")),
        "load them at boot before kernel.modules_disabled is set (modules-load.d(5)), and boot again; pods with a \
         network, port-forward or docker's name server need them",
    )
}

/// Whether a list of paths has the module: `kernel/drivers/net/tun.ko.xz:` is tun.
fn is_listed(list: &str, module: &str) -> bool {
    list.lines().any(|line| {
        let path = line.split(':').next().unwrap_or_default();
        let file = path.rsplit('/').next().unwrap_or_default();
        file.split(".ko").next().unwrap_or_default().replace('-', "_") == module
    })
}

/// Whether the host can limit a pod.
pub(super) fn cgroups(root: &Path) -> Finding {
    let cgroup = root.join("sys/fs/cgroup");
    let (version, found): (_, Vec<String>) = match fs::read_to_string(cgroup.join("cgroup.controllers")) {
        Ok(controllers) => ("v2", controllers.split_whitespace().map(str::to_owned).collect()),
        Err(_) => {
            let is_mounted = |name: &&str| cgroup.join(name).join("cgroup.procs").exists();
            ("v1", CONTROLLERS.into_iter().filter(is_mounted).map(str::to_owned).collect())
        }
    };
    let missing: Vec<_> =
        CONTROLLERS.into_iter().filter(|name| !found.iter().any(|found| found == name)).collect();
    match missing.len() {
        0 => Finding::ok("cgroups", format!("{version}, with {}", CONTROLLERS.join(", "))),
        4 => Finding::fail(
            "cgroups",
            format!("there are no cgroups in {}", cgroup.display()),
            "mount the cgroup2 file system there; systemd does so",
        ),
        _ => Finding::warn(
            "cgroups",
            format!("{version}, without {}", missing.join(", ")),
            "remove `cgroup_disable=` from the kernel command line, or use a kernel with these controllers; pods \
             with such a limit do not start",
        ),
    }
}

/// Whether the kernel restricts the VMM by Landlock as much as it can be.
pub(super) fn landlock() -> Finding {
    // It restricts the thread that asks.
    let asked = thread::scope(|scope| scope.spawn(jail::landlock_warning).join());
    match asked {
        Ok(Ok(None)) => Finding::ok("Landlock", "restricts the VMM completely"),
        Ok(Ok(Some(warning))) => Finding::warn(
            "Landlock",
            warning,
            "use Linux 6.12 or newer, with `landlock` in `lsm=` of its command line; the other walls around the VMM \
             stay",
        ),
        Ok(Err(error)) => Finding::fail("Landlock", chain(&error), "report this; no VM starts here"),
        Err(_) => Finding::fail("Landlock", "the check has panicked", "report this"),
    }
}

/// Whether a guest can be given the AppArmor profiles of this host. containerd and docker name one for each container
/// where AppArmor is enabled.
pub(super) fn apparmor(root: &Path) -> Finding {
    let parameter = |name| fs::read_to_string(root.join("sys/module/apparmor/parameters").join(name));
    let is_enabled = parameter("enabled").is_ok_and(|text| text.starts_with('Y'));
    // Linux before 6.0 has no such file and always gives the policy back. A later one without the file is built without
    // CONFIG_SECURITY_APPARMOR_EXPORT_BINARY, and never does. Only root can read it.
    let release = fs::read_to_string(root.join("proc/sys/kernel/osrelease")).unwrap_or_default();
    let is_withheld = match parameter("export_binary") {
        Ok(text) => !text.starts_with('Y'),
        Err(_) => major_and_minor(&release).is_some_and(|numbers| numbers >= (6, 0)),
    };
    let profiles = root.join("sys/kernel/security/apparmor/policy/profiles");
    match (is_enabled, is_withheld) {
        (false, _) => Finding::ok("AppArmor", "not enabled, so no container has a profile"),
        (true, _) if !profiles.is_dir() => Finding::fail(
            "AppArmor",
            format!("enabled, but there is no {}", profiles.display()),
            "mount securityfs on /sys/kernel/security; containers with a profile do not start",
        ),
        (true, true) => Finding::fail(
            "AppArmor",
            "enabled, but the kernel does not give back the policy of profiles",
            format!(
                "{}; containers with a profile do not start",
                Family::of(root).add_kernel_parameter("apparmor.export_binary=1")
            ),
        ),
        (true, false) => Finding::ok("AppArmor", "enabled, and the guests get the profiles of containers"),
    }
}

/// What SELinux does to pods. None: nothing. `labels`: containerd's CRI plugin is told to label containers.
pub(super) fn selinux(root: &Path, labels: bool) -> Option<Finding> {
    // selinuxfs is mounted if SELinux is enabled.
    let enforce = fs::read_to_string(root.join("sys/fs/selinux/enforce"));
    let mode = enforce.ok().map(|text| if text.starts_with('1') { "enforcing" } else { "permissive" });
    const TURN_OFF: &str = "set enable_selinux = false for containerd's CRI plugin, and restart containerd";
    let (found, remedy) = match (mode, labels) {
        (Some(mode), true) => {
            let found =
                format!("{mode}, and containerd labels the containers of Kubernetes, so no pod of it starts");
            return Some(Finding::fail("SELinux", found, TURN_OFF));
        }
        (Some(mode), false) => (
            format!("{mode}: not tested with Bulkhead, which refuses containers with a label"),
            "give docker --security-opt label=disable; look for denials with `ausearch -m avc`",
        ),
        (None, true) => (
            "not enabled, but containerd is told to label containers: if SELinux is enabled later, no pod of \
             Kubernetes will start"
                .to_owned(),
            TURN_OFF,
        ),
        (None, false) => return None,
    };
    Some(Finding::warn("SELinux", found, remedy))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::check::finding::Status;

    /// A root with these files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path: PathBuf = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    #[test]
    fn a_processor_is_judged_by_its_flags() {
        let processor = |flags: &str| {
            let text = format!("processor\t: 0\nflags\t\t: fpu {flags} sse\n");
            let finding = processor(root(&[("proc/cpuinfo", &text)]).path());
            (finding.status, finding.found)
        };
        assert_eq!(processor("vmx"), (Status::Ok, "has VMX (Intel VT-x)".into()));
        assert_eq!(processor("hypervisor svm").1, "has SVM (AMD-V); this host is itself a VM");
        assert_eq!(processor("hypervisor").0, Status::Fail);
        assert_eq!(super::processor(root(&[]).path()).status, Status::Fail);
    }

    #[test]
    fn a_kernel_on_which_no_vm_starts_is_a_failure() {
        let release = |text: &str| release(root(&[("proc/sys/kernel/osrelease", text)]).path());
        for new in ["5.12.0\n", "5.14.0-570.el9.x86_64\n", "6.12.118+deb13-amd64\n", "10.0\n"] {
            assert_eq!(release(new), Finding::ok("kernel", format!("Linux {}", new.trim())));
        }
        for old in ["5.11.22", "5.10.0-35-amd64", "4.18.0-553.el8", "3.10.0"] {
            let finding = release(old);
            let found = format!("Linux {old}: the VMM needs Linux 5.12 or later, for mount_setattr(2)");
            assert_eq!((finding.status, finding.found), (Status::Fail, found));
            assert!(finding.remedy.unwrap().starts_with("boot a newer kernel"));
        }
        assert_eq!(release("unknown").status, Status::Warn);
        assert_eq!(super::release(root(&[]).path()).status, Status::Warn);
    }

    #[test]
    fn a_remedy_is_one_of_the_distribution() {
        let release = ("proc/sys/kernel/osrelease", "6.12.1\n");
        let dep = ("lib/modules/6.12.1/modules.dep", "kernel/x.ko:\n");
        let enabled = ("sys/module/apparmor/parameters/enabled", "Y\n");
        let withheld = ("sys/module/apparmor/parameters/export_binary", "N\n");
        let profiles = ("sys/kernel/security/apparmor/policy/profiles/a/name", "a\n");
        for (system, install, update) in [
            ("ID=ubuntu\nID_LIKE=debian\n", "linux-modules-extra-$(uname -r)", "update-grub"),
            ("ID=fedora\n", "dnf install kernel-modules", "grubby"),
            ("ID=sles\n", "zypper install kernel-default", "grub2-mkconfig"),
            ("ID=arch\n", "pacman -S linux", "grub-mkconfig"),
            ("ID=alpine\n", "install the package with all modules", "kernel command line"),
        ] {
            let dir = root(&[("etc/os-release", system), release, dep, enabled, withheld, profiles]);
            let (modules, apparmor) =
                (modules(dir.path()).remedy.unwrap(), apparmor(dir.path()).remedy.unwrap());
            assert!(modules.contains(install) && apparmor.contains(update), "{modules}, {apparmor}");
        }
    }

    #[test]
    fn modules_may_be_loaded_built_in_or_installed() {
        let release = ("proc/sys/kernel/osrelease", "6.12.1\n");
        let loaded = ("sys/module/tun/refcnt", "0");
        let builtin = ("lib/modules/6.12.1/modules.builtin", "kernel/net/sched/cls_u32.ko\n");
        let dep = "kernel/net/sched/sch_ingress.ko.xz: kernel/x.ko.xz\nkernel/net/sched/act-mirred.ko:\n";
        let dep = ("lib/modules/6.12.1/modules.dep", dep);
        let without_more = modules(root(&[release, loaded, builtin, dep]).path());
        let found = "the kernel has no nf_tables, nft_chain_nat, nft_redir, cls_flower, act_ct";
        assert_eq!((without_more.status, without_more.found.as_str()), (Status::Warn, found));
        let more = MORE.map(|name| format!("sys/module/{name}/refcnt"));
        let all: Vec<_> = [release, loaded, builtin, dep]
            .into_iter()
            .chain(more.iter().map(|file| (file.as_str(), "")))
            .collect();
        assert_eq!(modules(root(&all).path()).status, Status::Ok);
        let missing = modules(root(&[release, builtin, dep]).path());
        assert_eq!((missing.status, missing.found.as_str()), (Status::Fail, "the kernel has no tun"));
        assert_eq!(modules(root(&[release, loaded]).path()).status, Status::Warn);
    }

    #[test]
    fn a_module_that_may_not_be_loaded_any_more_is_missing() {
        let dep: String =
            [&NETWORK[..], &MORE].concat().iter().map(|name| format!("kernel/{name}.ko:\n")).collect();
        let release = ("proc/sys/kernel/osrelease", "6.12.1\n");
        let builtin = ("lib/modules/6.12.1/modules.builtin", "kernel/net/sched/cls_u32.ko\n");
        let dep = ("lib/modules/6.12.1/modules.dep", dep.as_str());
        let disabled = ("proc/sys/kernel/modules_disabled", "1\n");
        assert_eq!(modules(root(&[release, builtin, dep, (disabled.0, "0\n")]).path()).status, Status::Ok);
        let missing = modules(root(&[release, builtin, dep, disabled]).path());
        assert!(
            missing.status == Status::Fail && missing.found.contains("tun, sch_ingress, act_mirred"),
            "{missing:?}"
        );
        // What is built in and has no parameters is not in /sys/module.
        let unlisted = modules(root(&[release, disabled]).path());
        assert!(
            unlisted.status == Status::Warn && unlisted.found.ends_with("no list says which are built in"),
            "{unlisted:?}"
        );
        let loaded = NETWORK.map(|name| format!("sys/module/{name}/refcnt"));
        let mut files: Vec<_> = loaded.iter().map(|file| (file.as_str(), "")).collect();
        files.extend([release, builtin, dep, disabled]);
        let part = modules(root(&files).path());
        assert!(
            part.status == Status::Warn
                && part.found.ends_with(": nf_tables, nft_chain_nat, nft_redir, cls_flower, act_ct")
        );
        let more = MORE.map(|name| format!("sys/module/{name}/refcnt"));
        files.extend(more.iter().map(|file| (file.as_str(), "")));
        assert_eq!(modules(root(&files).path()).status, Status::Ok);
    }

    #[test]
    fn cgroups_of_both_versions_are_known() {
        let v2 = ("sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory pids\n");
        assert_eq!(cgroups(root(&[v2]).path()).found, "v2, with cpu, cpuset, memory, pids");
        let without = cgroups(root(&[(v2.0, "cpuset cpu pids\n")]).path());
        assert_eq!((without.status, without.found.as_str()), (Status::Warn, "v2, without memory"));
        let v1 = CONTROLLERS.map(|name| (format!("sys/fs/cgroup/{name}/cgroup.procs"), ""));
        let v1: Vec<_> = v1.iter().map(|(path, text)| (path.as_str(), *text)).collect();
        assert_eq!(cgroups(root(&v1).path()).found, "v1, with cpu, cpuset, memory, pids");
        assert_eq!(cgroups(root(&[]).path()).status, Status::Fail);
    }

    #[test]
    fn the_policy_of_profiles_must_be_given_back() {
        let enabled = ("sys/module/apparmor/parameters/enabled", "Y\n");
        let export = ("sys/module/apparmor/parameters/export_binary", "Y\n");
        let profiles = ("sys/kernel/security/apparmor/policy/profiles/a/name", "a\n");
        assert_eq!(apparmor(root(&[]).path()).status, Status::Ok);
        assert_eq!(apparmor(root(&[(enabled.0, "N\n")]).path()).status, Status::Ok);
        assert_eq!(apparmor(root(&[enabled, export, profiles]).path()).status, Status::Ok);
        let of_kernel = |release| {
            apparmor(root(&[enabled, profiles, ("proc/sys/kernel/osrelease", release)]).path()).status
        };
        assert_eq!((of_kernel("5.15.0-1\n"), of_kernel("6.1.0-1\n")), (Status::Ok, Status::Fail));
        for no in ["N\n", ""] {
            let withheld = apparmor(root(&[enabled, (export.0, no), profiles]).path());
            assert_eq!(withheld.status, Status::Fail);
            assert!(withheld.remedy.unwrap().contains("apparmor.export_binary=1"));
        }
        assert!(apparmor(root(&[enabled, export]).path()).remedy.unwrap().contains("securityfs"));
    }

    #[test]
    fn the_kernel_of_the_build_machine_has_an_answer() {
        // What it is depends on the kernel. A failure would mean that no VM starts here.
        assert_ne!(landlock().status, Status::Fail);
        let file = std::env::temp_dir().join(format!("bulkhead-landlock-{}", std::process::id()));
        fs::write(&file, "").expect("this thread is not restricted");
        fs::remove_file(file).unwrap();
        let kvm = kvm(Path::new("/"));
        assert!(kvm.status == Status::Ok || kvm.remedy.is_some(), "{kvm:?}");
    }

    #[test]
    fn selinux_is_named_where_labels_are_possible() {
        let on = |mode: &str| root(&[("sys/fs/selinux/enforce", mode)]);
        let off = root(&[]);
        assert_eq!(selinux(off.path(), false), None);
        let (fail, warn) = (Status::Fail, Status::Warn);
        for (host, labels, status, found, remedy) in [
            (on("1"), true, fail, "enforcing, and containerd labels", "enable_selinux = false"),
            (on("0"), true, fail, "permissive, and containerd labels", "enable_selinux = false"),
            (on("1"), false, warn, "enforcing: not tested with Bulkhead, which", "label=disable"),
            (off, true, warn, "not enabled, but containerd is told", "enable_selinux = false"),
        ] {
            let finding = selinux(host.path(), labels).unwrap();
            assert!(finding.status == status && finding.found.starts_with(found), "{finding:?}");
            assert!(finding.remedy.as_deref().unwrap().contains(remedy), "{finding:?}");
        }
    }
}
