//! AppArmor: profiles of the host that confine containers. They need apparmor_parser.

use std::fs;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::Case;
use super::programs::HostCopy;
use crate::command::{Cmd, Finished};
use crate::containerd::Version;
use crate::cri::messages::{ProfileType, SecurityProfile};
use crate::ctr::{Host, Runtime};
use crate::docker::Client;
use crate::fixtures::scratch;
use crate::pods::Pod;

pub(super) const CASES: &[Case] = &[
    Case::both("without_a_profile_nothing_is_confined", unconfined),
    Case::both("a_profile_of_the_users_own_is_applied", own_profile),
    Case::both("an_added_process_is_confined_too", added_process),
    Case::both("a_user_who_gains_no_privileges_is_confined_too", user),
    Case::both("paths_are_those_that_the_container_sees", paths),
    Case::both("mounts_and_capabilities_are_what_the_profile_allows", mounts),
    Case::both("signals_are_what_the_profile_allows", signals),
    Case::both("a_profile_that_only_complains_is_shown_as_such", complaining),
    Case::both("a_profile_that_was_replaced_holds_for_the_next_process", replaced),
    Case::both("a_profile_that_was_removed_is_refused_to_the_next_process", removed),
    Case::both("only_who_may_administer_policy_leaves_a_profile", administration),
    Case::both("a_profile_holds_in_a_user_namespace", user_namespace),
    Case::both("a_privileged_container_confines_programs_of_its_own", nested),
    Case::both("a_child_of_a_profile_can_be_named", child),
    Case::both("a_profile_that_the_host_does_not_have_is_refused", unknown),
    Case::bulkhead("a_name_that_is_not_one_profile_is_refused_by_name", no_profile_name),
    Case::both("containerds_default_profile_forbids_mounts", default_of_containerd),
    Case::both("containers_do_not_see_securityfs", securityfs),
    Case::both("nothing_is_left_of_a_confined_container", nothing_left),
    Case::both("dockers_default_profile_is_applied", default_of_docker),
    Case::both("docker_applies_the_profile_of_an_option", option_of_docker),
    Case::both("a_container_of_a_pod_has_the_profile_that_it_names", pod),
    Case::both("containers_of_a_pod_have_a_profile_each", several_in_a_pod),
];

/// What all of them need to work, and no rule on files.
const ALL_BUT_FILES: &str = "capability, network, mount, umount, pivot_root, signal, ptrace, unix,";

/// The label of the process that reads it.
const LABEL: &str = "cat /proc/self/attr/current";

/// A profile that the host's kernel has. Dropping it removes it there.
struct Profile {
    name: String,
    directory: TempDir,
}

impl Profile {
    /// Loads one with these rules.
    fn load(host: &Host, rules: &str) -> Result<Self> {
        Self::load_with(host, "", rules)
    }

    /// Loads one with these flags and rules.
    fn load_with(host: &Host, flags: &str, rules: &str) -> Result<Self> {
        let profile = Self { name: host.new_id(), directory: scratch()? };
        profile.replace(flags, rules)?;
        Ok(profile)
    }

    /// Loads it again, with these rules.
    fn replace(&self, flags: &str, rules: &str) -> Result<()> {
        let flags = format!("attach_disconnected,mediate_deleted{flags}");
        let text = format!("profile {} flags=({flags}) {{\n{rules}\n}}\n", self.name);
        fs::write(self.file(), text).context("cannot write the profile")?;
        self.parser("--replace")?.succeeds().context("apparmor_parser does not load it")?;
        Ok(())
    }

    fn parser(&self, what: &str) -> Result<Finished> {
        let run = Cmd::new("apparmor_parser").args([what, "--skip-cache"]).args([self.file()]).run();
        run.context("the cases of AppArmor need apparmor_parser (Debian's apparmor)")
    }

    fn file(&self) -> String {
        self.directory.path().join("profile").display().to_string()
    }

    /// What a process that it confines reads of itself.
    fn label(&self) -> String {
        format!("{} (enforce)\n", self.name)
    }

    /// The flag of ctr.
    fn flags(&self) -> [&str; 2] {
        ["--apparmor-profile", &self.name]
    }
}

impl Drop for Profile {
    fn drop(&mut self) {
        // The next one has another name.
        let _ = self.parser("--remove");
    }
}

/// A profile that forbids writing to one directory.
fn forbidding(host: &Host, directory: &str) -> Result<Profile> {
    Profile::load(host, &format!("{ALL_BUT_FILES} file,\ndeny {directory}/** w,"))
}

/// Writes to a file. Says `NAME=0` if that works.
fn writing(name: &str, file: &str) -> String {
    format!("(echo x > {file}) 2> /dev/null; echo {name}=$?; ")
}

const WRITES: &str = "mkdir -p /forbidden /allowed; ";

/// What a shell says that wrote to both directories.
fn expect_forbidden(finished: &Finished) -> Result<()> {
    finished.says("forbidden", "1")?.says("allowed", "0")?;
    Ok(())
}

fn script() -> String {
    let (forbidden, allowed) = (writing("forbidden", "/forbidden/file"), writing("allowed", "/allowed/file"));
    format!("{WRITES}{forbidden}{allowed}")
}

fn unconfined(host: &Host) -> Result<()> {
    host.sh(LABEL)?.succeeds()?.prints("unconfined\n")?;
    let named = host.container().flags(["--apparmor-profile", "unconfined"]);
    named.run(&["sh", "-c", &format!("{LABEL}; {}", script())])?.says("forbidden", "0")?;
    Ok(())
}

fn own_profile(host: &Host) -> Result<()> {
    let profile = forbidding(host, "/forbidden")?;
    let confined = |command: &str| host.container().flags(profile.flags()).run(&["sh", "-c", command]);
    confined(LABEL)?.succeeds()?.prints(&profile.label())?;
    let finished = confined(&format!("{WRITES}echo x > /forbidden/file"))?;
    finished.exits(1)?.fails_with("Permission denied")?;
    expect_forbidden(&confined(&script())?)
}

fn added_process(host: &Host) -> Result<()> {
    let profile = forbidding(host, "/forbidden")?;
    let task = host.container().flags(profile.flags()).detach(&["sleep", "1000"])?;
    task.exec(&["cat", "/proc/self/attr/current"])?.succeeds()?.prints(&profile.label())?;
    task.exec(&["cat", "/proc/1/attr/current"])?.succeeds()?.prints(&profile.label())?;
    expect_forbidden(&task.exec(&["sh", "-c", &script()])?)
}

fn user(host: &Host) -> Result<()> {
    let profile = forbidding(host, "/dev/shm")?;
    for flags in [vec![], vec!["--allow-new-privs"]] {
        let container = host.container().flags(profile.flags()).flags(["--user", "1234"]).flags(flags);
        let script = format!("{LABEL}; {}", writing("forbidden", "/dev/shm/file"));
        container.run(&["sh", "-c", &script])?.prints(&format!("{}forbidden=1\n", profile.label()))?;
    }
    Ok(())
}

fn paths(host: &Host) -> Result<()> {
    let profile = forbidding(host, "/data/forbidden")?;
    let directory = scratch()?;
    for name in ["forbidden", "allowed"] {
        fs::create_dir(directory.path().join(name)).context("cannot make a directory")?;
    }
    let container = host.container().flags(profile.flags()).bind(directory.path(), "/data", "rbind:rw");
    let script = [
        writing("forbidden", "/data/forbidden/file"),
        writing("allowed", "/data/allowed/file"),
        // Another way to the same directory.
        "ln -s /data/forbidden /link; ".to_owned(),
        writing("by_link", "/link/file"),
        "mkdir /forbidden; ".to_owned(),
        writing("elsewhere", "/forbidden/file"),
        writing("in_memory", "/dev/shm/file"),
    ]
    .concat();
    let finished = container.run(&["sh", "-c", &script])?;
    expect_forbidden(&finished)?;
    finished.says("by_link", "1")?.says("elsewhere", "0")?.says("in_memory", "0")?;
    Ok(())
}

fn mounts(host: &Host) -> Result<()> {
    let rules = "network, signal, ptrace, unix, file, umount, capability, deny capability chown,\n\
                 mount fstype=tmpfs -> /allowed/,";
    let profile = Profile::load(host, rules)?;
    let script = "mkdir /allowed /forbidden; mount -t tmpfs none /allowed; echo allowed=$?
        mount -t tmpfs none /forbidden 2> /dev/null; echo forbidden=$?
        mount -t proc none /allowed 2> /dev/null; echo kind=$?
        chown 12 /allowed 2> /dev/null; echo chown=$?; chmod 700 /allowed; echo chmod=$?";
    let container = host.container().flags(["--cap-add", "CAP_SYS_ADMIN"]);
    let finished = container.flags(profile.flags()).run(&["sh", "-c", script])?;
    finished.says("allowed", "0")?.says("forbidden", "255")?.says("kind", "255")?;
    finished.says("chown", "1")?.says("chmod", "0")?;
    Ok(())
}

fn signals(host: &Host) -> Result<()> {
    // Its processes may send SIGTERM to one another, and the host any signal to them.
    let name = host.new_id();
    let rules = format!(
        "capability, network, file, ptrace, unix, mount, umount,\nsignal receive peer=unconfined,\n\
         signal (send, receive) set=(term) peer={name},"
    );
    let profile = Profile { name, directory: scratch()? };
    profile.replace("", &rules)?;
    let task = host.container().flags(profile.flags()).detach(&["sleep", "1000"])?;
    let script = "sleep 1000 & kill -HUP $! 2> /dev/null; echo hup=$?; kill -TERM $!; echo term=$?; \
                  wait $!; echo ended=$?";
    let finished = task.exec(&["sh", "-c", script])?;
    finished.says("hup", "1")?.says("term", "0")?.says("ended", "143")?;
    task.dies()
}

fn complaining(host: &Host) -> Result<()> {
    let rules = format!("{ALL_BUT_FILES} file,");
    let profile = Profile::load_with(host, ",complain", &rules)?;
    let label = format!("{} (complain)\n", profile.name);
    host.container().flags(profile.flags()).run(&["sh", "-c", LABEL])?.succeeds()?.prints(&label)?;
    Ok(())
}

fn replaced(host: &Host) -> Result<()> {
    let profile = forbidding(host, "/elsewhere")?;
    let task = host.container().flags(profile.flags()).detach(&["sleep", "1000"])?;
    task.exec(&["sh", "-c", &script()])?.says("forbidden", "0")?;
    profile.replace("", &format!("{ALL_BUT_FILES} file,\ndeny /forbidden/** w,"))?;
    expect_forbidden(&task.exec(&["sh", "-c", &script()])?)?;
    // As it was.
    profile.replace("", &format!("{ALL_BUT_FILES} file,\ndeny /elsewhere/** w,"))?;
    task.exec(&["sh", "-c", &script()])?.says("forbidden", "0")?;
    Ok(())
}

fn removed(host: &Host) -> Result<()> {
    let profile = forbidding(host, "/forbidden")?;
    let task = host.container().flags(profile.flags()).detach(&["sleep", "1000"])?;
    task.exec(&["cat", "/proc/self/attr/current"])?.prints(&profile.label())?;
    profile.parser("--remove")?.succeeds()?;
    let finished = task.exec(&["true"])?;
    finished.exits(1)?;
    if host.runtime() == Runtime::Bulkhead {
        finished
            .fails_with(&format!("process.apparmorProfile: {:?}: the host's kernel has no", profile.name))?;
    }
    // It runs on, and its VM has the profile still. On runc, nothing confines it now.
    profile.replace("", &format!("{ALL_BUT_FILES} file,\ndeny /forbidden/** w,"))?;
    expect_forbidden(&task.exec(&["sh", "-c", &script()])?)?;
    task.dies()
}

fn administration(host: &Host) -> Result<()> {
    let profile = Profile::load(host, &format!("{ALL_BUT_FILES} file,"))?;
    let leaving = [
        "(echo changeprofile unconfined > /proc/self/attr/current) 2> /dev/null; echo change=$?; ",
        "(echo exec unconfined > /proc/self/attr/exec) 2> /dev/null; echo exec=$?; ",
        "mkdir /policy && mount -t securityfs none /policy; echo mounted=$?; ",
        &format!("(printf {} > /policy/apparmor/.remove) 2> /dev/null; echo removed=$?; ", profile.name),
        LABEL,
    ]
    .concat();
    let run = |capabilities: &[&str]| {
        let capabilities = capabilities.iter().flat_map(|name| ["--cap-add", *name]);
        host.container().flags(profile.flags()).flags(capabilities).run(&["sh", "-c", &leaving])
    };
    let kept = |mounted: &str| format!("change=1\nexec=1\nmounted={mounted}\nremoved=1\n{}", profile.label());
    run(&[])?.prints(&kept("1"))?;
    run(&["CAP_SYS_ADMIN"])?.prints(&kept("0"))?;
    let administers = ["CAP_SYS_ADMIN", "CAP_MAC_ADMIN"];
    run(&administers)?.prints("change=1\nexec=1\nmounted=0\nremoved=0\nunconfined\n")?;
    if host.runtime() == Runtime::Bulkhead {
        // That was in its own guest.
        run(&[])?.prints(&kept("1"))?;
    }
    Ok(())
}

fn user_namespace(host: &Host) -> Result<()> {
    let profile = forbidding(host, "/dev/shm")?;
    let flags = ["--uidmap", "0:100000:65536", "--gidmap", "0:100000:65536"];
    let container = host.container().flags(profile.flags()).flags(flags);
    let script = format!("{LABEL}; {}", writing("forbidden", "/dev/shm/file"));
    container.run(&["sh", "-c", &script])?.prints(&format!("{}forbidden=1\n", profile.label()))?;
    Ok(())
}

/// What dockerd and runc do: they load a policy, and name a profile before a program is executed.
fn nested(host: &Host) -> Result<()> {
    let copy = HostCopy::mount()?;
    let name = host.new_id();
    let profile = format!("profile {name} {{\n{ALL_BUT_FILES} file,\ndeny /srv/forbidden w,\n}}\n");
    copy.write("srv/profile", profile)?;
    let script = format!(
        "mountpoint -q /sys/kernel/security || mount -t securityfs none /sys/kernel/security
         apparmor_parser --replace --skip-cache /srv/profile; {LABEL}
         aa-exec -p {name} -- sh -c '{LABEL}; {}{}'
         apparmor_parser --remove /srv/profile",
        writing("forbidden", "/srv/forbidden"),
        writing("allowed", "/srv/allowed"),
    );
    let container = copy.as_root_of(host.container()).flags(["--privileged"]);
    let finished = container.run(&["sh", "-ec", &script])?;
    finished.succeeds()?.prints(&format!("unconfined\n{name} (enforce)\nforbidden=2\nallowed=0\n"))?;
    Ok(())
}

fn child(host: &Host) -> Result<()> {
    let rules = format!(
        "{ALL_BUT_FILES} file,\nprofile inner flags=(attach_disconnected) {{\n{ALL_BUT_FILES} file,\n\
         deny /forbidden/** w,\n}}"
    );
    let profile = Profile::load(host, &rules)?;
    let name = format!("{}//inner", profile.name);
    let confined =
        |command: &str| host.container().flags(["--apparmor-profile", &name]).run(&["sh", "-c", command]);
    confined(LABEL)?.succeeds()?.prints(&format!("{name} (enforce)\n"))?;
    expect_forbidden(&confined(&script())?)
}

fn unknown(host: &Host) -> Result<()> {
    for name in ["e2e-no-such-profile", "../profiles/e2e-no-such-profile"] {
        let finished = host.container().flags(["--apparmor-profile", name]).run(&["true"])?;
        finished.exits(1)?;
        if host.runtime() == Runtime::Bulkhead {
            let expected =
                format!("process.apparmorProfile: {name:?}: the host's kernel has no such profile");
            finished.fails_with(&expected)?;
        }
    }
    // An added process names its own.
    let task = host.container().detach(&["sleep", "1000"])?;
    task.exec(&["cat", "/proc/self/attr/current"])?.prints("unconfined\n")?;
    Ok(())
}

fn no_profile_name(host: &Host) -> Result<()> {
    let profile = forbidding(host, "/forbidden")?;
    for name in [format!("{0}//&{0}", profile.name), format!(":root:{}", profile.name)] {
        let finished = host.container().flags(["--apparmor-profile", &name]).run(&["true"])?;
        finished.exits(1)?.fails_with(&format!("process.apparmorProfile {name:?} is not implemented"))?;
    }
    Ok(())
}

const CONTAINERD_DEFAULT: &str = "cri-containerd.apparmor.d";

fn default_of_containerd(host: &Host) -> Result<()> {
    let mounting = "mkdir /made && mount -t tmpfs none /made";
    let allowed = host.container().flags(["--cap-add", "CAP_SYS_ADMIN"]).run(&["sh", "-c", mounting])?;
    allowed.succeeds()?;
    let flags = ["--cap-add", "CAP_SYS_ADMIN", "--apparmor-default-profile", CONTAINERD_DEFAULT];
    let refused = host.container().flags(flags).run(&["sh", "-c", mounting])?;
    refused.check("no mount", refused.status != Some(0))?.fails_with("ermission denied")?;
    let script = format!("{LABEL}; (sleep 1000 & kill $!; wait $!); echo $?; {}", script());
    let working = host.container().flags(flags).run(&["sh", "-c", &script])?;
    working.prints(&format!("{CONTAINERD_DEFAULT} (enforce)\n143\nforbidden=0\nallowed=0\n"))?;
    Ok(())
}

fn securityfs(host: &Host) -> Result<()> {
    let profile = forbidding(host, "/forbidden")?;
    let script = "ls -A /sys/kernel/security; grep -c securityfs /proc/self/mountinfo";
    host.container().flags(profile.flags()).run(&["sh", "-c", script])?.exits(1)?.prints("0\n")?;
    host.sh(script)?.exits(1)?.prints("0\n")?;
    Ok(())
}

fn nothing_left(host: &Host) -> Result<()> {
    let profile = forbidding(host, "/forbidden")?;
    host.leaves_nothing(|| {
        expect_forbidden(&host.container().flags(profile.flags()).run(&["sh", "-c", &script()])?)
    })
}

const DOCKER_DEFAULT: &str = "docker-default (enforce)\n";

fn default_of_docker(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    client.container().sh(LABEL)?.succeeds()?.prints(DOCKER_DEFAULT)?;
    let made = client.container().flags(["--cap-add", "SYS_ADMIN"]).detach(&["sleep", "1000"])?;
    made.exec(&["cat", "/proc/self/attr/current"])?.prints(DOCKER_DEFAULT)?;
    let mounted = made.exec(&["sh", "-c", "mkdir /made && mount -t tmpfs none /made"])?;
    mounted.check("no mount", mounted.status != Some(0))?.fails_with("ermission denied")?;
    made.docker(&["kill"])?.succeeds()?;
    let privileged = client.container().flags(["--privileged"]).sh(LABEL)?;
    privileged.succeeds()?.prints("unconfined\n")?;
    Ok(())
}

fn option_of_docker(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let profile = forbidding(host, "/forbidden")?;
    let option = |name: &str| format!("apparmor={name}");
    let (own, none) = (option(&profile.name), option("unconfined"));
    let made = client.container().flags(["--security-opt", &own]).detach(&["sleep", "1000"])?;
    made.exec(&["cat", "/proc/1/attr/current"])?.prints(&profile.label())?;
    expect_forbidden(&made.exec(&["sh", "-c", &script()])?)?;
    client.container().flags(["--security-opt", &none]).sh(LABEL)?.prints("unconfined\n")?;
    Ok(())
}

fn localhost(name: &str) -> Option<SecurityProfile> {
    Some(SecurityProfile { profile_type: ProfileType::Localhost.into(), localhost_ref: name.to_owned() })
}

fn pod(host: &Host) -> Result<()> {
    let profile = forbidding(host, "/forbidden")?;
    // containerd gives the profile of the sandbox to nobody.
    let pod = Pod::plan(host).config(|config| {
        let linux = config.linux.get_or_insert_default();
        linux.security_context.get_or_insert_default().apparmor = localhost(&profile.name);
    });
    let pod = pod.start()?;
    let own = pod.container().security(|security| security.apparmor = localhost(&profile.name));
    let container = own.start(&["sleep", "1000"])?;
    container.exec(&["cat", "/proc/1/attr/current"])?.prints(&profile.label())?;
    expect_forbidden(&container.exec(&["sh", "-c", &script()])?)?;
    container.remove()?;
    // containerd 2 does not read the name any more.
    if host.version() < Version::new(2, 0) {
        let name = format!("localhost/{}", profile.name);
        let by_name = pod.container().security(|security| security.apparmor_profile = name);
        by_name.sh(LABEL)?.prints(&profile.label())?;
    }
    let default = SecurityProfile { profile_type: ProfileType::RuntimeDefault.into(), ..Default::default() };
    // Root may write to this parameter. The profile forbids that.
    let script = format!("{LABEL}; (echo x > /proc/sys/kernel/domainname) 2>&1");
    let unprotected = |profile: Option<SecurityProfile>| {
        pod.container().security(|security| {
            security.apparmor = profile;
            security.masked_paths = vec!["/proc/kcore".to_owned()];
            security.readonly_paths = vec!["/proc/irq".to_owned()];
        })
    };
    let confined = unprotected(Some(default)).sh(&script)?;
    confined
        .exits(1)?
        .check("the default profile's answer", confined.text().contains("Permission denied"))?;
    let says = confined.text();
    ensure!(says.starts_with(CONTAINERD_DEFAULT), "expected  the default profile\ncame      {says}");
    let none = SecurityProfile { profile_type: ProfileType::Unconfined.into(), ..Default::default() };
    unprotected(Some(none)).sh(&script)?.succeeds()?.prints("unconfined\n")?;
    Ok(())
}

fn several_in_a_pod(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let profiles = [forbidding(host, "/forbidden")?, forbidding(host, "/allowed")?];
    let mut containers = Vec::new();
    for profile in &profiles {
        let container = pod.container().security(|security| security.apparmor = localhost(&profile.name));
        containers.push(container.start(&["sleep", "1000"])?);
    }
    let said = |at: usize, name: &str| containers[at].exec(&["sh", "-c", &script()])?.value(name);
    let came = [said(0, "forbidden")?, said(0, "allowed")?, said(1, "forbidden")?, said(1, "allowed")?];
    ensure!(came == ["1", "0", "0", "1"], "expected  each its own profile\ncame      {came:?}");
    Ok(())
}
