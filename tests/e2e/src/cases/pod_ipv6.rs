//! Pods of a network that has IPv6 alone.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::Case;
use crate::command::wait_until;
use crate::containerd::PREFIX;
use crate::ctr::Host;
use crate::fixtures::Replaced;
use crate::pods::Pod;

pub(super) const CASES: &[Case] = &[Case::both("a_pod_of_ipv6_alone_is_reached_and_reaches_the_host", alone)];

/// The network of the tests (tests/e2e/files) without its range of IPv4.
const NETWORK: &str = r#"{
  "cniVersion": "1.0.0",
  "name": "bulkhead-e2e",
  "plugins": [
    {
      "type": "bridge",
      "bridge": "e2e0",
      "isGateway": true,
      "ipMasq": false,
      "ipam": {
        "type": "host-local",
        "ranges": [[{ "subnet": "fd88::/64" }]],
        "routes": [{ "dst": "::/0" }]
      }
    }
  ]
}
"#;
const QUESTION: &[u8] = b"GET /index.html HTTP/1.0\r\n\r\n";
/// How long a server may take to begin.
const SEEN: Duration = Duration::from_secs(5);
/// The host's address in it.
const GATEWAY: Ipv6Addr = Ipv6Addr::new(0xfd88, 0, 0, 0, 0, 0, 0, 1);

/// Where the containerd that runs now reads the network.
fn file_of_network() -> Result<PathBuf> {
    for entry in fs::read_dir("/run").context("cannot read /run")? {
        let directory = entry.context("cannot read /run")?;
        let serves = || UnixStream::connect(directory.path().join("containerd.sock")).is_ok();
        let file = directory.path().join("networks/10-bulkhead-e2e.conflist");
        if directory.file_name().to_string_lossy().starts_with(PREFIX) && file.exists() && serves() {
            return Ok(file);
        }
    }
    anyhow::bail!("expected  a containerd of the tests\ncame      none in /run")
}

fn alone(host: &Host) -> Result<()> {
    let pods = host.pods()?;
    let (file, mut replaced) = (file_of_network()?, None);
    pods.while_containerd_is_down(|| {
        replaced = Some(Replaced::file(&file, NETWORK)?);
        Ok(())
    })?;
    let result = talk(host);
    // Other cases need both families.
    pods.while_containerd_is_down(|| {
        drop(replaced);
        Ok(())
    })?;
    result
}

fn talk(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let network = pod.status()?.network.context("a pod without a network")?;
    let address: IpAddr = network.ip.parse().with_context(|| format!("{:?} is no address", network.ip))?;
    let is_alone = address.is_ipv6() && network.additional_ips.is_empty();
    ensure!(is_alone, "expected  one address of IPv6\ncame      {network:?}");
    let script = "mkdir /www && echo hello > /www/index.html && httpd -p [::1]:8081 -h /www && \
                  exec httpd -f -p [::]:80 -h /www";
    let server = pod.container().start(&["sh", "-c", script])?;
    let mut page = String::new();
    wait_until("a page of the pod", host.patience(SEEN), || {
        let Ok(mut stream) = TcpStream::connect_timeout(&(address, 80).into(), SEEN) else {
            return Ok(false);
        };
        stream.write_all(QUESTION)?;
        stream.read_to_string(&mut page)?;
        Ok(true)
    })?;
    ensure!(page.ends_with("\r\n\r\nhello\n"), "came  {page:?}");
    let seen = server.sh("ip -o addr show dev eth0 scope global | awk '{ print $3, $4 }'")?;
    seen.succeeds()?.prints(&format!("inet6 {address}/64\n"))?;

    let listener = TcpListener::bind((GATEWAY, 0)).context("cannot listen on the bridge's address")?;
    let port = listener.local_addr()?.port();
    let heard = thread::spawn(move || -> std::io::Result<(String, IpAddr)> {
        let (mut stream, from) = listener.accept()?;
        let mut said = String::new();
        stream.read_to_string(&mut said)?;
        Ok((said, from.ip()))
    });
    server.sh(&format!("echo from the pod | nc -w 20 {GATEWAY} {port}"))?.succeeds()?;
    let (said, from) = heard.join().ok().context("the server panicked")??;
    ensure!((said.as_str(), from) == ("from the pod\n", address), "{from} said {said:?}");

    let mut page = Vec::new();
    wait_until("a page from port 8081", host.patience(SEEN), || {
        page = pod.exchange_with_port(8081, QUESTION)?.data;
        Ok(!page.is_empty())
    })?;
    ensure!(page.ends_with(b"\r\n\r\nhello\n"), "came  {:?}", String::from_utf8_lossy(&page));
    pod.remove()
}
