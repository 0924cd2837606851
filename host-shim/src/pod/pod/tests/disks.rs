//! Disks that are roots of containers. The test answers for the VMM.

use std::path::PathBuf;

use containerd_shim_protos::types::mount::Mount;
use serde_json::Value;
use tokio::task::JoinHandle;

use super::{members::be_member, *};
use crate::{
    host::block_device::{BlockDevice, open_disk},
    pod::devices::{Disk, Numbers},
};

/// Answers for the VMM, and has the operations that it was asked for.
struct Vmm {
    asked: Arc<Mutex<Vec<String>>>,
}

impl Vmm {
    /// Answers each request on the control socket.
    fn answering(story: &Story, answer: impl Fn(&str, usize) -> Value + Send + 'static) -> Self {
        let listener = UnixListener::bind(story.guest.state.join("control.sock")).unwrap();
        let asked = Arc::<Mutex<Vec<String>>>::default();
        let requests = Arc::clone(&asked);
        tokio::spawn(async move {
            loop {
                let mut stream = BufReader::new(listener.accept().await.unwrap().0);
                let mut line = String::new();
                stream.read_line(&mut line).await.unwrap();
                let request: Value = serde_json::from_str(&line).unwrap();
                let operation = request["op"].as_str().unwrap().to_owned();
                let earlier = {
                    let mut requests = lock(&requests);
                    requests.push(operation.clone());
                    requests.iter().filter(|one| **one == operation).count() - 1
                };
                let answer = format!("{}\n", answer(&operation, earlier));
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        Self { asked }
    }

    fn count(&self, operation: &str) -> usize {
        lock(&self.asked).iter().filter(|asked| *asked == operation).count()
    }
}

impl Story {
    /// Creates a container of the pod whose root is this image.
    async fn add_on_disk(&self, id: &str, image: &Path) -> String {
        make_bundle(self.dir.path(), id, &["true"], be_member);
        let mut request = self.request_of(id);
        let mut root = Mount::new();
        (root.type_, root.source) = ("ext4".into(), image.display().to_string());
        request.rootfs = vec![root];
        let created = timeout(WAIT, self.pod.create(CreateRequest::Task(request))).await.unwrap();
        chain(&created.unwrap_err())
    }

    fn image(&self) -> PathBuf {
        let image = self.dir.path().join("image");
        fs::write(&image, [0; 4096]).unwrap();
        image
    }
}

fn refuses(message: &str) -> Value {
    json!({"result": "error", "message": message})
}

#[tokio::test]
async fn a_disk_that_the_vmm_refuses_is_closed_before_the_answer() {
    let story = Story::pod().await;
    let vmm = Vmm::answering(&story, |operation, _| match operation {
        "attach_block" => refuses("there is no room"),
        _ => json!({"result": "ok"}),
    });
    let image = story.image();
    let error = story.add_on_disk("one", &image).await;
    assert_eq!(error, "rootfs[0]: the VMM refuses: there is no room");
    // Nobody has its lock.
    open_disk(&image, true).await.unwrap();
    assert_eq!((vmm.count("attach_block"), vmm.count("detach_block")), (1, 1));
    timeout(WAIT, story.pod.stop()).await.unwrap();
}

#[tokio::test]
async fn the_place_of_a_disk_that_hangs_comes_back_later() {
    let story = Story::pod().await;
    let vmm = Vmm::answering(&story, |operation, earlier| match operation {
        "detach_block" if earlier == 0 => refuses("a request is under way"),
        _ => json!({"result": "ok"}),
    });
    // The guest of the tests has no disks, so it cannot mount one.
    let error = story.add_on_disk("one", &story.image()).await;
    assert!(error.starts_with("rootfs[0]: no disk has the serial number"), "{error}");
    assert_eq!(vmm.count("detach_block"), 1);
    let asked_again = async {
        while vmm.count("detach_block") < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(WAIT, asked_again).await.unwrap();
    assert_eq!(story.status(), Status::Running);
    timeout(WAIT, story.pod.stop()).await.unwrap();
}

#[tokio::test]
async fn a_device_that_hangs_delays_no_other_one() {
    let story = Story::pod().await;
    let hung = story.mount_hung();
    let attach = |node: PathBuf, minor| {
        let (pod, guest) = (story.pod.clone(), story.own().guest.clone());
        let disk = Disk::of_test(BlockDevice::at(node, 8, minor));
        tokio::spawn(async move { pod.vm().attach_disks(&guest, &[disk]).await })
    };
    let error = async |attached: JoinHandle<Result<Vec<(Disk, Numbers)>, TaskError>>| {
        chain(&timeout(WAIT, attached).await.unwrap().unwrap().unwrap_err())
    };
    let hangs = attach(hung.file(), 16);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let other = error(attach("/nonexistent/sdc".into(), 32)).await;
    assert!(other.starts_with("linux.devices[/dev/test]: cannot open /nonexistent/sdc"), "{other}");
    let same = error(attach(hung.file(), 16)).await;
    assert!(same.contains("another container of the pod has waited for the block device 8:16"), "{same}");
    assert!(!hangs.is_finished());
    hung.release();
    assert!(error(hangs).await.contains("cannot open"));
    timeout(WAIT, story.pod.stop()).await.unwrap();
}
