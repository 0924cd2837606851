//! The pod's network, which CNI makes on the host.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use sha2::{Digest, Sha256};

use super::super::Case;
use crate::command::{Cmd, wait_until};
use crate::ctr::Host;
use crate::pods::{Container, Pod};

pub(in crate::cases) const CASES: &[Case] = &[
    Case::both("the_pods_address_is_the_containers", address),
    Case::both("a_pod_is_reached_from_the_host", from_host),
    Case::both("a_pod_is_reached_from_the_host_by_ipv6", from_host_by_ipv6),
    Case::both("the_host_is_reached_from_a_pod", to_host),
    Case::both("a_pod_is_reached_from_another_pod", pod_to_pod),
    Case::both("services_and_policies_of_the_hosts_iptables_apply", services_and_policies),
    Case::both("a_port_of_the_host_is_the_pods", host_port),
    Case::both("a_pod_that_is_replaced_gets_a_network_again", replaced),
    Case::both("port_forward_reaches_what_listens_on_the_pods_loopback_interface", port_forward),
    Case::both("port_forward_to_a_port_without_a_listener_fails_and_the_next_works", port_without_listener),
];

/// The host's address in the network of the pods: the first of the range in tests/e2e/files.
pub(super) const GATEWAY: &str = "10.88.0.1";

/// Starts a container that serves "hello" on port 80 of the pod.
pub(super) fn serve<'p>(pod: &'p Pod<'p>) -> Result<Container<'p>> {
    let script = "mkdir /www && echo hello > /www/index.html && exec httpd -f -p 80 -h /www";
    pod.container().start(&["sh", "-c", script])
}

/// Asks for the page at an address until the server is up, and expects "hello".
pub(super) fn expect_hello(host: &Host, address: IpAddr, port: u16) -> Result<()> {
    let address = SocketAddr::new(address, port);
    let mut page = String::new();
    wait_until(&format!("a page from {address}"), host.patience(super::SEEN), || {
        let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_secs(1)) else {
            return Ok(false);
        };
        stream.write_all(b"GET /index.html HTTP/1.0\r\n\r\n")?;
        stream.read_to_string(&mut page).with_context(|| format!("cannot read the page of {address}"))?;
        Ok(true)
    })?;
    ensure!(page.ends_with("\r\n\r\nhello\n"), "expected  hello\ncame      {page:?}");
    Ok(())
}

/// Asks for the page by port-forward until the server is up, and expects "hello".
fn expect_forwarded(host: &Host, pod: &Pod<'_>, port: u16) -> Result<()> {
    let mut page = Vec::new();
    wait_until(&format!("a page from port {port}"), host.patience(super::SEEN), || {
        page = pod.exchange_with_port(port, b"GET /index.html HTTP/1.0\r\n\r\n")?.data;
        Ok(!page.is_empty())
    })?;
    let page = String::from_utf8_lossy(&page);
    ensure!(page.ends_with("\r\n\r\nhello\n"), "expected  hello\ncame      {page:?}");
    Ok(())
}

fn port_forward(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let script = "mkdir /www && echo hello > /www/index.html && httpd -p 127.0.0.1:8080 -h /www && \
                  httpd -p [::1]:8081 -h /www && dd if=/dev/urandom of=/www/large bs=1k count=700 && sleep 1000";
    let server = pod.container().start(&["sh", "-c", script])?;
    expect_forwarded(host, &pod, 8080)?;
    expect_forwarded(host, &pod, 8081)?;
    // Several at one time, and more than one packet.
    let sum = server.sh("sha256sum < /www/large | cut -c 1-64")?.text().trim().to_owned();
    thread::scope(|scope| {
        let ask = || -> Result<()> {
            let answer = pod.exchange_with_port(8080, b"GET /large HTTP/1.0\r\n\r\n")?;
            let end = b"\r\n\r\n";
            let head = answer.data.windows(end.len()).position(|bytes| bytes == end).context("no page")?;
            let page = &answer.data[head + end.len()..];
            let came = format!("{:x}", Sha256::digest(page));
            ensure!(came == sum, "expected  {sum}\ncame      {came} of {} bytes", page.len());
            Ok(())
        };
        let asked: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
        asked.into_iter().try_for_each(|asked| asked.join().map_err(|_| anyhow!("a client has panicked"))?)
    })?;
    server.remove()?;
    pod.remove()
}

fn port_without_listener(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let answer = pod.exchange_with_port(8080, b"GET / HTTP/1.0\r\n\r\n")?;
    ensure!(answer.data.is_empty() && !answer.error.is_empty(), "expected  an error\ncame      {answer:?}");
    let _server = serve(&pod)?;
    expect_forwarded(host, &pod, 80)?;
    pod.remove()
}

pub(super) fn address(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let network = pod.status()?.network.context("a pod without a network")?;
    let mut expected = vec![network.ip];
    expected.extend(network.additional_ips.into_iter().map(|it| it.ip));
    ensure!(expected.len() == 2, "expected  an address of either family\ncame      {expected:?}");
    let seen =
        pod.container().sh("ip -o addr show dev eth0 scope global | awk '{ print $4 }'; ip link show lo")?;
    for address in &expected {
        seen.check(&format!("{address} on eth0"), seen.text().contains(&format!("{address}/")))?;
    }
    seen.check("a loopback interface that is up", seen.text().contains("LOOPBACK,UP"))?;
    let routes = pod.container().run(&["ip", "route"])?;
    routes.check("a default route", routes.text().contains(&format!("default via {GATEWAY}")))?;
    Ok(())
}

fn from_host(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let _server = serve(&pod)?;
    expect_hello(host, pod.ip()?.parse()?, 80)
}

fn from_host_by_ipv6(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let script = "mkdir /www && echo hello > /www/index.html && exec httpd -f -p [::]:80 -h /www";
    let _server = pod.container().start(&["sh", "-c", script])?;
    let network = pod.status()?.network.context("a pod without a network")?;
    let second = network.additional_ips.first().context("a pod without a second address")?;
    expect_hello(host, second.ip.parse()?, 80)
}

fn to_host(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    // The bridge has its address only once there is a pod.
    let listener = TcpListener::bind((GATEWAY, 0)).context("cannot listen on the bridge's address")?;
    let port = listener.local_addr()?.port();
    let server = thread::spawn(move || -> std::io::Result<String> {
        let (mut stream, _) = listener.accept()?;
        stream.write_all(b"from the host\n")?;
        stream.shutdown(std::net::Shutdown::Write)?;
        let mut said = String::new();
        stream.read_to_string(&mut said)?;
        Ok(said)
    });
    let script = format!("echo from the pod | nc {GATEWAY} {port}");
    pod.container().sh(&script)?.succeeds()?.prints("from the host\n")?;
    let said = server.join().ok().context("the server panicked")??;
    ensure!(said == "from the pod\n", "expected  what the pod sent\ncame      {said:?}");
    Ok(())
}

fn pod_to_pod(host: &Host) -> Result<()> {
    let (server, client) = (Pod::start(host)?, Pod::start(host)?);
    let _server = serve(&server)?;
    let script = format!("until wget -q -O - http://{}/ 2>/dev/null; do sleep 0.1; done", server.ip()?);
    client.container().sh(&script)?.succeeds()?.prints("hello\n")?;
    Ok(())
}

/// Rules of the host as kube-proxy makes them for a Service, and a network plugin for a NetworkPolicy.
fn services_and_policies(host: &Host) -> Result<()> {
    const SERVICE: &str = "10.96.77.10";
    let (server, client) = (Pod::start(host)?, Pod::start(host)?);
    let (to, from) = (server.ip()?, client.ip()?);
    let _server = serve(&server)?;
    let asks = client.container().start(&["sleep", "1000"])?;
    let page = || asks.exec(&["wget", "-q", "-T", "3", "-O", "-", &format!("http://{SERVICE}/")]);
    let rules = [
        format!("-t nat -I PREROUTING -d {SERVICE} -p tcp --dport 80 -j DNAT --to-destination {to}:80"),
        // Without it the answer would go from pod to pod, from another address than was asked.
        format!("-t nat -I POSTROUTING -s {from} -d {to} -j MASQUERADE"),
        format!("-I FORWARD -s {from} -d {to} -j ACCEPT"),
        format!("-I FORWARD -s {to} -d {from} -j ACCEPT"),
    ];
    let _rules = rules.iter().map(|rule| Rule::add(rule)).collect::<Result<Vec<_>>>()?;
    wait_until("a page of the service", host.patience(super::SEEN), || Ok(page()?.text() == "hello\n"))?;
    let policy = Rule::add(&format!("-I FORWARD -s {from} -d {to} -j REJECT"))?;
    page()?.exits(1)?;
    drop(policy);
    page()?.succeeds()?.prints("hello\n")?;
    Ok(())
}

/// A rule of the host's iptables, until it is dropped.
struct Rule(String);

impl Rule {
    /// It inserts it at the beginning of its chain: `-t TABLE -I CHAIN ...`.
    fn add(words: &str) -> Result<Self> {
        iptables(words)?;
        Ok(Self(words.replacen("-I ", "-D ", 1)))
    }
}

impl Drop for Rule {
    fn drop(&mut self) {
        let _ = iptables(&self.0);
    }
}

fn iptables(words: &str) -> Result<()> {
    Cmd::new("iptables").args(["-w"]).args(words.split_whitespace()).run()?.succeeds()?;
    Ok(())
}

pub(super) fn host_port(host: &Host) -> Result<()> {
    let pod = Pod::plan(host).host_port(28080, 80).start()?;
    let _server = serve(&pod)?;
    expect_hello(host, GATEWAY.parse()?, 28080)
}

fn replaced(host: &Host) -> Result<()> {
    for _ in 0..2 {
        let pod = Pod::plan(host).host_port(28081, 80).start()?;
        let _server = serve(&pod)?;
        expect_hello(host, GATEWAY.parse()?, 28081)?;
        pod.remove()?;
    }
    Ok(())
}
