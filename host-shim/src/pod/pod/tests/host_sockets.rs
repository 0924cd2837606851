//! A container that mounts the socket of a service of the host.

use std::ops::RangeFrom;

use tokio::net::UnixStream;

use super::*;

/// Asks the service something and ends with the number in the answer, or with 99 if the connection ends without one,
/// perhaps before it has asked.
const ASK: &str = r#"
    use IO::Socket::UNIX;
    $SIG{PIPE} = "IGNORE";
    my $service = IO::Socket::UNIX->new(Peer => $ARGV[0]) or exit 98;
    $service->print("question");
    $service->shutdown(1);
    my $answer = join "", <$service>;
    exit($answer eq "" ? 99 : $answer);
"#;

/// Where the guest of these tests has the socket `service` of a directory that is mounted at /srv.
const IN_DIRECTORY: &str = "/srv/guest/service";

impl Story {
    /// A container that runs and has the socket at /srv/service.
    async fn with_socket(path: &Path) -> Self {
        let story = Self::begin(&["sleep", "1000"]).await;
        story.mount_socket(path);
        story.create_and_start().await;
        story
    }

    fn mount_socket(&self, path: &Path) {
        self.mount(path, "/srv/service");
    }

    fn mount(&self, path: &Path, destination: &str) {
        self.change_spec(|spec| {
            let mount =
                json!({"destination": destination, "type": "bind", "source": path, "options": ["rbind"]});
            spec["mounts"].as_array_mut().unwrap().push(mount);
        });
    }

    /// Asks the service in a mounted directory until it hears that, and returns by which process.
    async fn ask_until_heard(&self, listener: &UnixListener, ids: RangeFrom<u32>) -> (String, UnixStream) {
        let asked = async {
            for id in ids {
                let id = id.to_string();
                self.ask_at(&id, IN_DIRECTORY).await;
                tokio::select! {
                    client = heard(listener) => return (id, client),
                    _ = self.answer(&id) => {}
                }
            }
            panic!("there are no more numbers");
        };
        timeout(WAIT, asked).await.unwrap()
    }

    /// Begins to ask.
    async fn ask(&self, id: &str) {
        self.ask_at(id, "/srv/service").await;
    }

    async fn ask_at(&self, id: &str, socket: &str) {
        self.own().execs.add(exec(id, &["perl", "-e", ASK, socket])).unwrap();
        self.own().execs.start(id).await.unwrap();
    }

    /// What came of it.
    async fn answer(&self, id: &str) -> u32 {
        let exec = self.own().execs.get(id).unwrap();
        timeout(WAIT, exec.wait()).await.unwrap().unwrap().status
    }

    async fn delete_running(self) {
        self.pod.stop().await;
        self.events.flush(WAIT).await;
        assert!(!self.dir.path().join("run").exists());
    }
}

/// Reads the question to its end.
async fn heard(listener: &UnixListener) -> UnixStream {
    let (mut client, _) = timeout(WAIT, listener.accept()).await.unwrap().unwrap();
    let mut question = String::new();
    timeout(WAIT, client.read_to_string(&mut question)).await.unwrap().unwrap();
    assert_eq!(question, "question");
    client
}

#[tokio::test]
async fn several_clients_at_once_reach_the_service_until_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("service");
    let listener = UnixListener::bind(&path).unwrap();
    let story = Story::with_socket(&path).await;
    let mut clients = Vec::new();
    for id in ["1", "2", "3"] {
        story.ask(id).await;
        clients.push(heard(&listener).await);
    }
    // In another order than they have asked.
    for (id, mut client) in ["1", "2", "3"].into_iter().zip(clients).rev() {
        client.write_all(id.as_bytes()).await.unwrap();
        drop(client);
        assert_eq!(story.answer(id).await.to_string(), id);
    }
    // Another service of the same name has another socket.
    drop(listener);
    fs::remove_file(&path).unwrap();
    let _other = UnixListener::bind(&path).unwrap();
    story.ask("4").await;
    assert_eq!(story.answer("4").await, 99);
    story.delete_running().await;
}

#[tokio::test]
async fn a_service_in_a_directory_is_found_again_after_it_was_started_again() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("guest")).unwrap();
    let path = dir.path().join("service");
    let listener = UnixListener::bind(&path).unwrap();
    let story = Story::begin(&["sleep", "1000"]).await;
    story.mount(dir.path(), "/srv");
    story.create_and_start().await;
    story.ask_at("1", IN_DIRECTORY).await;
    let mut first = heard(&listener).await;

    drop(listener);
    fs::remove_file(&path).unwrap();
    let listener = UnixListener::bind(&path).unwrap();
    let (second, mut client) = story.ask_until_heard(&listener, 10..).await;
    client.write_all(b"7").await.unwrap();
    drop(client);
    assert_eq!(story.answer(&second).await, 7);
    // Who was connected to the old one still is.
    first.write_all(b"8").await.unwrap();
    drop(first);
    assert_eq!(story.answer("1").await, 8);

    // It ends, and its socket stays. Who tries to connect brings that to light.
    drop(listener);
    let refused = async {
        for id in 1000.. {
            story.ask_at(&id.to_string(), IN_DIRECTORY).await;
            if story.answer(&id.to_string()).await == 98 {
                break;
            }
        }
    };
    timeout(WAIT, refused).await.unwrap();
    story.delete_running().await;
}

#[tokio::test]
async fn a_connection_ends_with_its_container() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("service");
    let listener = UnixListener::bind(&path).unwrap();
    let story = Story::with_socket(&path).await;
    story.ask("1").await;
    let mut client = heard(&listener).await;
    story.own().kill(9, true).await.unwrap();
    story.wait_demo().await;
    timeout(WAIT, story.pod.delete("demo")).await.unwrap().unwrap();
    // Nobody reads the answer any more.
    let broken = async { while client.write_all(b"1").await.is_ok() {} };
    timeout(WAIT, broken).await.unwrap();
    story.delete_running().await;
}

/// Sends a message to the log until nobody receives it any more, or at most as often as it says. Ends with 97 if nobody
/// has ever received it.
const LOG: &str = r#"
    use IO::Socket::UNIX;
    use Socket;
    my $log = IO::Socket::UNIX->new(Type => SOCK_DGRAM, Peer => $ARGV[0]) or exit 98;
    for my $number (1..$ARGV[1]) {
        $log->send("message $number") or exit($number == 1 ? 97 : 99);
        select undef, undef, undef, 0.01 if $ARGV[1] > 10;
    }
"#;

impl Story {
    /// How the sending of this many messages ended.
    async fn log(&self, id: &str, socket: &str, messages: &str) -> u32 {
        self.own().execs.add(exec(id, &["perl", "-e", LOG, socket, messages])).unwrap();
        self.own().execs.start(id).await.unwrap();
        self.answer(id).await
    }
}

async fn hear(log: &tokio::net::UnixDatagram) -> String {
    let mut bytes = vec![0; 100];
    let length = timeout(WAIT, log.recv(&mut bytes)).await.unwrap().unwrap();
    String::from_utf8(bytes[..length].into()).unwrap()
}

#[tokio::test]
async fn messages_reach_the_log_until_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let log = tokio::net::UnixDatagram::bind(&path).unwrap();
    let story = Story::with_socket(&path).await;
    for id in ["1", "2"] {
        assert_eq!(story.log(id, "/srv/service", "3").await, 0);
        for number in 1..=3 {
            assert_eq!(hear(&log).await, format!("message {number}"));
        }
    }
    drop(log);
    // The shim hears of it by the first message, and then the guest does.
    assert_eq!(story.log("3", "/srv/service", "2000").await, 99);
    assert_eq!(story.log("4", "/srv/service", "1").await, 98);
    story.delete_running().await;
}

#[tokio::test]
async fn the_log_in_a_directory_is_found_again_after_it_was_started_again() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("guest")).unwrap();
    let path = dir.path().join("service");
    let log = tokio::net::UnixDatagram::bind(&path).unwrap();
    let story = Story::begin(&["sleep", "1000"]).await;
    story.mount(dir.path(), "/srv");
    story.create_and_start().await;
    assert_eq!(story.log("1", IN_DIRECTORY, "1").await, 0);
    assert_eq!(hear(&log).await, "message 1");

    drop(log);
    fs::remove_file(&path).unwrap();
    let log = tokio::net::UnixDatagram::bind(&path).unwrap();
    let heard = async {
        for id in 10.. {
            story.log(&id.to_string(), IN_DIRECTORY, "1").await;
            if let Ok(heard) = timeout(Duration::from_millis(100), log.recv(&mut [0; 100])).await {
                return heard.unwrap();
            }
        }
        0
    };
    assert_eq!(timeout(WAIT, heard).await.unwrap(), "message 1".len());
    story.delete_running().await;
}
