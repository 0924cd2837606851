//! Volumes that kubelet keeps up to date, of which the guest has copies.

use std::{os::unix::fs::symlink, path::PathBuf};

use tokio::time::sleep;

use super::{members::be_member, *};

/// A volume as kubelet has it, with one file.
struct Volume(PathBuf);

impl Volume {
    fn new(story: &Story) -> Self {
        let volume = Self(story.dir.path().join("pods/uid/volumes/kubernetes.io~projected/config"));
        fs::create_dir_all(&volume.0).unwrap();
        volume.write("..1", "first");
        symlink("..data/key", volume.0.join("key")).unwrap();
        volume
    }

    /// Writes a version, and removes the others.
    fn write(&self, version: &str, content: &str) {
        fs::create_dir(self.0.join(version)).unwrap();
        fs::write(self.0.join(version).join("key"), content).unwrap();
        let old = fs::read_link(self.0.join("..data"));
        self.lead_to(version);
        if let Ok(old) = old {
            // It may have led elsewhere.
            _ = fs::remove_dir_all(self.0.join(old));
        }
    }

    fn lead_to(&self, target: &str) {
        symlink(target, self.0.join("..data_tmp")).unwrap();
        fs::rename(self.0.join("..data_tmp"), self.0.join("..data")).unwrap();
    }
}

impl Story {
    /// A container of the pod that runs this script and has the volume at /config.
    async fn with_volume(&self, id: &str, volume: &Volume, script: &str) -> Result<(), TaskError> {
        make_bundle(self.dir.path(), id, &["sh", "-c", script], |spec| {
            be_member(spec);
            let bound = json!({
                "destination": "/config", "type": "bind", "source": volume.0, "options": ["rbind", "ro"],
            });
            spec["mounts"].as_array_mut().unwrap().push(bound);
        });
        let created = self.pod.create(CreateRequest::Task(self.request_of(id)));
        timeout(WAIT, created).await.unwrap()?.start().await
    }

    async fn followed(&self) -> usize {
        self.pod.vm().volume_copies.followed().await
    }
}

/// Waits until the file has this content.
fn until(content: &str) -> String {
    format!("until [ \"$(cat /config/key)\" = {content} ]; do sleep 0.02; done")
}

#[tokio::test]
async fn the_containers_of_a_pod_share_a_copy_until_they_are_gone() {
    let story = Story::pod().await;
    let volume = Volume::new(&story);
    let second = until("second");
    story.with_volume("1", &volume, &second).await.unwrap();
    story.with_volume("2", &volume, &format!("{second}; touch /config/file || exit 7")).await.unwrap();
    assert_eq!(story.followed().await, 1);
    let shown = fs::read_dir(story.guest.state.join("share")).unwrap().map(|entry| entry.unwrap().path());
    assert_eq!(
        shown.filter(|place| place.join("volume/key").exists()).count(),
        0,
        "the guest sees no original"
    );
    volume.write("..2", "second");
    assert_eq!((story.wait("1").await, story.wait("2").await), (0, 7));
    story.delete("1").await;
    assert_eq!(story.followed().await, 1);
    story.delete("2").await;
    assert_eq!(story.followed().await, 0);

    // Nobody has followed it meanwhile.
    volume.write("..3", "third");
    story.with_volume("3", &volume, "read key < /config/key; [ $key = third ] || exit 8").await.unwrap();
    assert_eq!(story.wait("3").await, 0);
    assert_eq!(story.followed().await, 1);
    story.pod.stop().await;
    assert_eq!(story.followed().await, 0);
}

#[tokio::test]
async fn a_container_keeps_its_files_while_those_of_the_host_are_of_no_use() {
    let story = Story::pod().await;
    let volume = Volume::new(&story);
    let script = format!("[ $(cat /config/key) = first ] || exit 8; {}", until("third"));
    story.with_volume("1", &volume, &script).await.unwrap();
    let victim = story.dir.path().join("victim");
    fs::create_dir(&victim).unwrap();
    fs::write(victim.join("key"), "victim").unwrap();
    volume.lead_to(victim.to_str().unwrap());
    // Another one has the host's volume, in which it finds no such directory, as on runc.
    story.with_volume("2", &volume, "exec cat /config/key").await.unwrap();
    assert_ne!(story.wait("2").await, 0);
    volume.write("..2", &"x".repeat(4 << 20));
    story.with_volume("large", &volume, "[ $(wc -c < /config/key) -gt 4000000 ]").await.unwrap();
    assert_eq!(story.wait("large").await, 0);
    volume.write("..3", "third");
    assert_eq!(story.wait("1").await, 0);
    fs::remove_dir_all(&volume.0).unwrap();
    story.with_volume("3", &volume, "exit 0").await.unwrap_err();
    for id in ["1", "2", "large"] {
        story.delete(id).await;
    }
    assert_eq!(story.followed().await, 0);
    story.pod.stop().await;
}

/// A version that takes almost all that a volume may take.
fn large(version: &str) -> String {
    format!("{version}\n{}", "x".repeat(2_900_000))
}

/// Waits until the first line of the file is this one.
fn until_large(line: &str) -> String {
    format!("until read line < /config/key && [ \"$line\" = {line} ]; do sleep 0.02; done")
}

#[tokio::test]
async fn a_version_that_a_process_keeps_open_leaves_room_for_others() {
    let story = Story::pod().await;
    let volume = Volume::new(&story);
    volume.write("..2", &large("second"));
    let (third, fourth) = (until_large("third"), until_large("fourth"));
    let script =
        format!("exec 3< /config/key; {third}; {fourth}; read line <&3; [ $line = second ] || exit 8");
    story.with_volume("1", &volume, &script).await.unwrap();
    story.with_volume("2", &volume, &third).await.unwrap();
    volume.write("..3", &large("third"));
    assert_eq!(story.wait("2").await, 0);
    volume.write("..4", &large("fourth"));
    story.with_volume("3", &volume, "read line < /config/key; [ $line = fourth ] || exit 8").await.unwrap();
    assert_eq!((story.wait("1").await, story.wait("3").await), (0, 0));
    story.pod.stop().await;
}

#[tokio::test]
async fn a_container_is_created_with_the_files_of_the_others_if_there_is_no_room_for_new_ones() {
    let story = Story::pod().await;
    let volume = Volume::new(&story);
    // It opens as many versions as there is room for, and keeps them open.
    let mut script = String::new();
    for descriptor in 3..7 {
        let version = format!("version{descriptor}");
        script += &format!("{}; exec {descriptor}< /config/key; touch /{version}; ", until_large(&version));
    }
    script += "until [ -e /end ]; do sleep 0.02; done";
    let root = story.dir.path().join("1/rootfs");
    for number in 3..7 {
        let version = format!("version{number}");
        volume.write(&format!("..{number}"), &large(&version));
        if number == 3 {
            story.with_volume("1", &volume, &script).await.unwrap();
        }
        let is_open = async {
            while !root.join(&version).exists() {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(WAIT, is_open).await.unwrap();
    }
    volume.write("..7", &large("version7"));
    let script =
        format!("read line < /config/key; [ $line = version6 ] || exit 8; {}", until_large("version8"));
    story.with_volume("2", &volume, &script).await.unwrap();
    fs::write(root.join("end"), "").unwrap();
    assert_eq!(story.wait("1").await, 0);
    volume.write("..8", &large("version8"));
    assert_eq!(story.wait("2").await, 0);
    story.pod.stop().await;
}

#[tokio::test]
async fn a_creation_that_fails_leaves_nobody_who_follows() {
    let story = Story::pod().await;
    let volume = Volume::new(&story);
    make_bundle(story.dir.path(), "1", &["not/there"], |spec| {
        be_member(spec);
        let bound = |source: &Path| {
            json!({
                "destination": "/config", "type": "bind", "source": source, "options": ["rbind", "ro"],
            })
        };
        let mounts = spec["mounts"].as_array_mut().unwrap();
        mounts.push(bound(&volume.0));
        mounts.push(json!({"destination": "/x", "type": "no-such-type", "source": "x"}));
    });
    let created = story.pod.create(CreateRequest::Task(story.request_of("1")));
    let error = timeout(WAIT, created).await.unwrap().unwrap_err();
    assert!(chain(&error).contains("no-such-type"), "{}", chain(&error));
    assert_eq!(story.followed().await, 0);
    story.pod.stop().await;
}
