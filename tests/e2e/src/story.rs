//! What `cargo xtask demo pod` shows: a pod of three containers, told on one screen. And how a pod starts.

use std::time::Instant;

use anyhow::Result;

use crate::command::{Cmd, Finished};
use crate::ctr::Host;
use crate::fixtures::scratch;
use crate::pods::Pod;

/// Where the containers have the volume that they share.
const VOLUME: &str = "/www";

/// What is typed at the shell, one line after the other, and what shows that it was answered.
const TYPED: [(&str, &str); 3] =
    [("tty", "/dev/pts/"), ("stty size", "30 100"), ("echo $((6 * 7)) $(hostname)", "42 web-0")];

/// By which a shell asks its terminal for the cursor's place.
const CURSOR: &str = "\u{1b}[6n";

/// Runs a pod, and then another one. Returns what `bulkhead trace` says of that, whose template is there already.
pub(crate) fn trace(host: &Host) -> Result<String> {
    Pod::start(host)?.remove()?;
    let pod = Pod::start(host)?;
    let trace = Cmd::new("bulkhead").args(["trace", pod.id(), "--json"]).run()?.succeeds()?.text();
    pod.remove()?;
    Ok(trace)
}

/// Runs the pod and prints what it does.
pub(crate) fn tell(host: &Host) -> Result<()> {
    let clock = Clock(Instant::now());
    let volume = scratch()?;
    let volume = volume.path();
    let pod = Pod::plan(host).hostname("web-0").share_processes().start()?;
    clock.says(&format!("pod web-0 runs at {}", pod.ip()?));

    let init = pod.container().named("init", 0).mount(volume, VOLUME);
    let script = "echo \"a page that init made on $(uname -r)\" > /www/index.html";
    clock.ran("init", script, &init.sh(script)?)?;

    let server = pod.container().named("server", 0).mount_read_only(volume, VOLUME);
    let server = server.start(&["httpd", "-f", "-p", "127.0.0.1:80", "-h", VOLUME])?;
    clock.says("server   $ httpd -f -p 127.0.0.1:80 -h /www");

    let script = "until wget -q -O - http://localhost/ 2>/dev/null; do sleep 0.1; done";
    let client = pod.container().named("client", 0);
    clock.ran("client", "wget -q -O - http://localhost/", &client.sh(script)?)?;

    let _sidecar = pod.container().named("sidecar", 0).start(&["sleep", "1000"])?;
    clock.says("sidecar  $ sleep 1000");
    let script = "ps -o pid,args";
    clock.ran("server", script, &server.sh(script)?)?;

    clock.says("server   $ sh, executed with a terminal of 100 x 30");
    let mut shell = server.exec_stream(&["sh"], true)?;
    shell.wait_for("# ")?;
    shell.resize(100, 30)?;
    for (typed, answer) in TYPED {
        shell.write(format!("{typed}\n").as_bytes())?;
        shell.wait_for(answer)?;
    }
    shell.write(b"exit 3\n")?;
    let shell = shell.finish()?;
    print!("{}", indented(&shell.text().replace(CURSOR, "")));
    shell.exits(3)?;

    pod.remove()?;
    clock.says("the pod is removed");
    Ok(())
}

/// Says how far the story is, and when.
struct Clock(Instant);

impl Clock {
    fn says(&self, text: &str) {
        println!("{:5.1} s  {text}", self.0.elapsed().as_secs_f64());
    }

    fn ran(&self, container: &str, command: &str, finished: &Finished) -> Result<()> {
        self.says(&format!("{container:8} $ {command}"));
        print!("{}", indented(&finished.text()));
        finished.succeeds()?;
        Ok(())
    }
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("             {}\n", line.trim_end())).collect()
}
