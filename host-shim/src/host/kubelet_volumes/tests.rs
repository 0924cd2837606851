use std::{
    fs,
    os::unix::fs::{MetadataExt, symlink},
    time::Duration,
};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::stat::Mode,
    unistd::mkfifo,
};
use rustix::fs::{
    XattrFlags,
    inotify::{self, CreateFlags},
    setxattr,
};
use tokio::time::timeout;

use super::*;
use crate::{testing::private_mounts, types::error::chain};

const WAIT: Duration = Duration::from_secs(15);

/// A directory as kubelet has it, with a file `key` in its first version.
struct Kubelet(tempfile::TempDir);

impl Kubelet {
    fn new() -> Self {
        private_mounts();
        let kubelet = Self(tempfile::tempdir().unwrap());
        fs::create_dir_all(kubelet.at("..1")).unwrap();
        fs::write(kubelet.at("..1/key"), "first").unwrap();
        symlink("..1", kubelet.at("..data")).unwrap();
        symlink("..data/key", kubelet.at("key")).unwrap();
        kubelet
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join("pods/uid/volumes/kubernetes.io~configmap/config").join(name)
    }

    fn found(&self) -> Result<(KubeletVolume, u64), VolumeError> {
        find(&self.at(""), Some("uid")).map(Option::unwrap)
    }

    fn error(&self) -> String {
        chain(&self.found().unwrap_err())
    }
}

/// The entries by their paths, each with what it is.
fn shown(contents: &Contents) -> String {
    let show = |entry: &Entry| match &entry.kind {
        Kind::Directory => format!("{:?} {:o}", entry.path, entry.mode),
        Kind::File(content) => {
            format!("{:?} {:o} {}", entry.path, entry.mode, String::from_utf8_lossy(content))
        }
        Kind::Link(target) => format!("{:?} -> {target}", entry.path),
    };
    contents.entries.iter().map(show).collect::<Vec<_>>().join("\n")
}

#[test]
fn kubelets_volumes_of_the_pod_are_found_by_their_paths() {
    let kubelet = Kubelet::new();
    let (volume, size) = kubelet.found().unwrap();
    let metadata = fs::metadata(kubelet.at("")).unwrap();
    assert!(volume.name.starts_with("kubelet-") && volume.name.ends_with(&format!("-{}", metadata.ino())));
    assert!((4096..2 * 4096 + 6 * 1024).contains(&size), "{size}");
    let expected = "\"\" 755\n\"..data\" -> ..1\n\"key\" -> ..data/key\n\"..1\" 755\n\"..1/key\" 644 first";
    assert_eq!(shown(&volume.read().unwrap()), expected);

    let is_found = |path: &Path, uid| find(path, uid).unwrap().is_some();
    assert!(is_found(&kubelet.at(""), None));
    assert!(!is_found(&kubelet.at(""), Some("other")));
    // A part of it, as of a subPath, another kind of volume, and a way that only seems to lead to one.
    assert!(!is_found(&kubelet.at("..1"), Some("uid")));
    let other = kubelet.0.path().join("pods/uid/volumes/kubernetes.io~empty-dir/config");
    assert!(!is_found(&other, Some("uid")));
    assert!(!is_found(&kubelet.at("../config"), Some("uid")));
    assert!(!is_found(&kubelet.at("../../kubernetes.io~configmap/config"), Some("uid")));
}

#[test]
fn a_secret_is_on_a_tmpfs_which_kubelet_can_unmount() {
    let kubelet = Kubelet::new();
    let secret = kubelet.0.path().join("pods/uid/volumes/kubernetes.io~secret/token");
    fs::create_dir_all(&secret).unwrap();
    mount(Some("tmpfs"), &secret, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    fs::create_dir(secret.join("..1")).unwrap();
    symlink("..1", secret.join("..data")).unwrap();
    let (volume, _) = find(&secret, None).unwrap().unwrap();
    umount2(&secret, MntFlags::empty()).unwrap();
    assert_eq!(shown(&volume.read().unwrap()), "\"\" 1777\n\"..data\" -> ..1\n\"..1\" 755");
}

#[test]
fn no_link_is_followed_out_of_a_volume() {
    let kubelet = Kubelet::new();
    fs::create_dir(kubelet.0.path().join("victim")).unwrap();
    fs::write(kubelet.0.path().join("victim/secret"), "secret").unwrap();
    let victim = kubelet.0.path().join("victim").display().to_string();
    let layout = "..data is not a link to a directory beside it, as kubelet makes it";
    for target in [&*victim, "../config/..1", "..1/", "..1/.", ".", "..", "../..", "a/b"] {
        fs::remove_file(kubelet.at("..data")).unwrap();
        symlink(target, kubelet.at("..data")).unwrap();
        assert_eq!(kubelet.error(), layout, "{target}");
    }
    fs::remove_file(kubelet.at("..data")).unwrap();
    assert_eq!(kubelet.error(), layout);
    // One name, which is a link itself.
    symlink("..2", kubelet.at("..data")).unwrap();
    assert!(kubelet.error().starts_with("cannot read \"..2\": no such file"), "{}", kubelet.error());
    symlink(&victim, kubelet.at("..2")).unwrap();
    assert_eq!(kubelet.error(), "kubelet puts nothing like \"..2\" there");

    fs::remove_file(kubelet.at("..data")).unwrap();
    symlink("..1", kubelet.at("..data")).unwrap();
    symlink(&victim, kubelet.at("..1/directory")).unwrap();
    assert_eq!(kubelet.error(), "kubelet puts nothing like \"..1/directory\" there");
    fs::remove_file(kubelet.at("..1/directory")).unwrap();
    // A container resolves the links beside ..data, as on runc.
    symlink(format!("{victim}/secret"), kubelet.at("other")).unwrap();
    let read = shown(&kubelet.found().unwrap().0.read().unwrap());
    assert!(read.contains(&format!("\"other\" -> {victim}/secret")), "{read}");
}

#[test]
fn what_a_copy_would_lose_is_not_copied() {
    let kubelet = Kubelet::new();
    fs::write(kubelet.at("file"), "").unwrap();
    assert_eq!(kubelet.error(), "kubelet puts nothing like \"file\" there");
    fs::remove_file(kubelet.at("file")).unwrap();
    // Nobody waits for its other end.
    mkfifo(&kubelet.at("..1/pipe"), Mode::S_IRWXU).unwrap();
    assert_eq!(kubelet.error(), "kubelet puts nothing like \"..1/pipe\" there");
    fs::remove_file(kubelet.at("..1/pipe")).unwrap();
    let deep = kubelet.at("..1").join("d/".repeat(20));
    fs::create_dir_all(&deep).unwrap();
    assert!(kubelet.error().starts_with("kubelet puts nothing like \"..1/d/d/"), "{}", kubelet.error());
    fs::remove_dir_all(kubelet.at("..1/d")).unwrap();
    // The file system of the tests may have no such attributes.
    if setxattr(kubelet.at("..1/key"), "user.note", b"x", XattrFlags::empty()).is_ok() {
        assert_eq!(kubelet.error(), "\"..1/key\" has the extended attribute user.note");
    }
}

#[test]
fn sizes_are_limited() {
    let kubelet = Kubelet::new();
    let too_large = "its files take more than 3 MiB, each rounded up to pages";
    fs::File::create(kubelet.at("..1/big")).unwrap().set_len(MOST_VOLUME_BYTES + 1).unwrap();
    assert_eq!(kubelet.error(), too_large);
    fs::File::create(kubelet.at("..1/big")).unwrap().set_len(MOST_VOLUME_BYTES - (64 << 10)).unwrap();
    kubelet.found().unwrap();
    fs::remove_file(kubelet.at("..1/big")).unwrap();
    for number in 0..700 {
        fs::write(kubelet.at(&format!("..1/{number}")), "x").unwrap();
    }
    assert_eq!(kubelet.error(), too_large);
    // Names that are not read are not for nothing either.
    fs::remove_dir_all(kubelet.at("..1")).unwrap();
    fs::create_dir(kubelet.at("..1")).unwrap();
    for number in 0..=MOST_VOLUME_BYTES / 1024 {
        fs::write(kubelet.at(&format!("..old{number}")), "").unwrap();
    }
    assert_eq!(kubelet.error(), too_large);
}

#[test]
fn a_pod_has_a_budget() {
    let budget = Budget::default();
    for number in 0..5 {
        budget.take(&format!("large-{number}"), 3 << 20).unwrap();
    }
    assert!(matches!(budget.take("one more", 2 << 20), Err(VolumeError::TooLargeTogether)));
    budget.take("large-0", 2 << 20).unwrap();
    budget.take("one more", 2 << 20).unwrap();
    for number in 6..MOST_VOLUMES {
        budget.take(&format!("small-{number}"), 0).unwrap();
    }
    assert!(matches!(budget.take("the last", 0), Err(VolumeError::TooMany)));
    budget.take("one more", 0).unwrap();
}

#[tokio::test]
async fn changes_are_told_and_count_for_nobody_else() {
    let kubelet = Kubelet::new();
    let (volume, _) = kubelet.found().unwrap();
    let before = volume.read().unwrap().digest();
    assert_eq!(volume.read().unwrap().digest(), before);
    let mut changes = volume.changes().unwrap();
    fs::create_dir(kubelet.at("..2")).unwrap();
    fs::write(kubelet.at("..2/key"), "second").unwrap();
    symlink("..2", kubelet.at("..data_tmp")).unwrap();
    fs::rename(kubelet.at("..data_tmp"), kubelet.at("..data")).unwrap();
    fs::remove_dir_all(kubelet.at("..1")).unwrap();
    timeout(WAIT, changes.next()).await.unwrap().unwrap();
    assert_ne!(volume.read().unwrap().digest(), before);
    let again = timeout(Duration::from_millis(300), changes.next()).await;
    assert!(again.is_err(), "there was one change");
    assert!(rustix::process::geteuid().is_root());
    // More than root may have by default.
    let volumes: Vec<_> = (0..100).map(|_| kubelet.found().unwrap()).collect();
    let as_root: Vec<_> = (0..100).map(|_| inotify::init(CreateFlags::CLOEXEC)).collect();
    drop(volumes);
    assert!(as_root.iter().all(Result::is_ok));
}

#[test]
fn mounts_of_the_host_propagate_as_before_while_a_volume_is_watched() {
    let kubelet = Kubelet::new();
    let top = kubelet.0.path();
    let change = |place: &Path, flags| mount(None::<&str>, place, None::<&str>, flags, None::<&str>).unwrap();
    let bind = |from: &Path, to: &Path| mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>);
    bind(top, top).unwrap();
    change(top, MsFlags::MS_SHARED);
    let (volume, _) = kubelet.found().unwrap();

    let (source, elsewhere) = (top.join("source"), tempfile::tempdir().unwrap());
    fs::create_dir_all(source.join("later")).unwrap();
    bind(&source, elsewhere.path()).unwrap();
    change(elsewhere.path(), MsFlags::MS_SLAVE);
    mount(Some("t"), &source.join("later"), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    fs::write(source.join("later/file"), "").unwrap();
    assert!(elsewhere.path().join("later/file").exists(), "what is mounted later is not seen");

    // Not all kernels lose such a mount. A mount that has no peer becomes private, and not a slave of one.
    umount2(elsewhere.path(), MntFlags::MNT_DETACH).unwrap();
    change(top, MsFlags::MS_SLAVE);
    let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let is_top = |line: &&str| line.split(' ').nth(4) == top.to_str();
    let line = table.lines().find(is_top).unwrap();
    assert!(!line.contains(" master:"), "it has a peer that is attached nowhere: {line}");
    drop(volume);
    umount2(top, MntFlags::MNT_DETACH).unwrap();
}
