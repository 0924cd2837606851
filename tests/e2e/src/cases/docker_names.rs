//! docker's name server, at 127.0.0.11 in the networks of the user's own: services find each other by their names.

use std::time::Duration;

use anyhow::Result;

use super::Case;
use crate::command::{Finished, wait_until};
use crate::ctr::{Host, SETTLES};
use crate::docker::{BRIDGE, Client, Made, Network};
use crate::name_server::{KNOWN, LONG_ANSWER, NameServer, known_address, long_question};

pub(super) const CASES: &[Case] = &[
    Case::both("services_find_each_other_by_name_and_alias", services),
    Case::both("a_name_that_nobody_has_is_an_error_at_once", unknown_name),
    Case::both("names_of_the_world_are_asked_of_the_given_server", known_name),
    Case::both("a_long_answer_comes_over_tcp", long_answer),
    Case::both("port_53_of_all_addresses_is_a_programs", own_server),
    Case::both("two_hundred_questions_at_once_are_answered", at_once),
    Case::both("names_are_found_after_a_restart", restarted),
    Case::both("interfaces_that_are_connected_later_find_names", connected_later),
    Case::both("nothing_is_left_of_a_container_that_asked", nothing_left),
];

/// How long a name may take that nobody has. A client asks again after 5 s.
const AT_ONCE: Duration = Duration::from_secs(3);

const SLEEP: &[&str] = &["sleep", "1000"];

/// Serves a page at a port of all addresses.
fn serve<'h>(client: &Client<'h>, flags: &[&str], port: u16) -> Result<Made<'h>> {
    let script = format!("echo a page > /tmp/index.html; exec httpd -f -p 0.0.0.0:{port} -h /tmp");
    client.container().flags(flags.iter().copied()).detach(&["sh", "-c", &script])
}

/// Expects that the container resolves the name to the address.
fn resolves(made: &Made<'_>, name: &str, address: &str) -> Result<()> {
    let found = made.exec(&["nslookup", name])?;
    found.check(&format!("{address} for {name}"), has_address(&found, address))?;
    Ok(())
}

/// Whether this is among the addresses that nslookup has printed.
fn has_address(found: &Finished, address: &str) -> bool {
    found.text().lines().any(|line| {
        let words = line.strip_prefix("Address").map(|rest| rest.split_whitespace());
        words.is_some_and(|mut words| words.any(|word| word == address))
    })
}

/// A network, and in it a container that asks. Names that docker does not know are asked of a server at the address of
/// docker's own bridge.
struct Asking<'h> {
    made: Made<'h>,
    network: Network<'h>,
    client: Client<'h>,
    _server: NameServer,
}

impl<'h> Asking<'h> {
    fn start(host: &'h Host) -> Result<Self> {
        let client = Client::of(host)?;
        let server = client.in_network(|| NameServer::start(BRIDGE))?;
        let network = client.network()?;
        let flags = ["--network", network.name(), "--dns", BRIDGE];
        let made = client.container().flags(flags).detach(SLEEP)?;
        Ok(Self { made, network, client, _server: server })
    }
}

fn services(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let network = client.network()?;
    let within = ["--network", network.name()];
    let server = serve(&client, &["--network", network.name(), "--network-alias", "shop"], 80)?;
    for name in [server.name(), "shop"] {
        let script = format!("until wget -q -O - http://{name}/ 2> /dev/null; do sleep 0.2; done");
        client.container().flags(within).sh(&script)?.succeeds()?.prints("a page\n")?;
    }
    let later = client.container().flags(within).detach(SLEEP)?;
    resolves(&server, later.name(), &later.address(network.name())?)?;
    resolves(&later, "shop", &server.address(network.name())?)?;
    // A name is known in its own network only.
    let elsewhere = client.network()?;
    let stranger = client.container().flags(["--network", elsewhere.name()]).detach(SLEEP)?;
    let found = stranger.exec(&["nslookup", "shop"])?;
    found.check("no address", !has_address(&found, &server.address(network.name())?))?;
    Ok(())
}

fn unknown_name(host: &Host) -> Result<()> {
    let asking = Asking::start(host)?;
    let found = asking.made.exec(&["nslookup", "unknown.e2e.test"])?;
    found.check("NXDOMAIN", found.text().contains("NXDOMAIN"))?.within(host.patience(AT_ONCE))?;
    Ok(())
}

fn known_name(host: &Host) -> Result<()> {
    let asking = Asking::start(host)?;
    let address = known_address();
    resolves(&asking.made, KNOWN, &address)?;
    // Whoever asks that server itself gets its answers too.
    let itself = asking.made.exec(&["nslookup", KNOWN, BRIDGE])?;
    itself.check("its answer", has_address(&itself, &address))?;
    resolves(&asking.made, KNOWN, &address)
}

fn long_answer(host: &Host) -> Result<()> {
    let asking = Asking::start(host)?;
    let octal: String = long_question().iter().map(|byte| format!("\\{byte:03o}")).collect();
    let script = format!("printf '{octal}' | nc -w 10 127.0.0.11 53 | wc -c");
    let answer = asking.made.exec(&["sh", "-c", &script])?;
    let length: u64 = answer.succeeds()?.text().trim().parse()?;
    answer.check(&format!("more than {LONG_ANSWER} bytes"), length > LONG_ANSWER)?;
    Ok(())
}

fn own_server(host: &Host) -> Result<()> {
    let asking = Asking::start(host)?;
    let (client, network) = (asking.client, asking.network.name());
    let server = serve(&client, &["--network", network, "--dns", BRIDGE], 53)?;
    let ask = format!("until wget -q -O - http://{}:53/ 2> /dev/null; do sleep 0.2; done", server.name());
    asking.made.exec(&["sh", "-c", &ask])?.succeeds()?.prints("a page\n")?;
    server.exec(&["wget", "-q", "-O", "-", "http://127.0.0.1:53/"])?.succeeds()?.prints("a page\n")?;
    resolves(&server, asking.made.name(), &asking.made.address(network)?)
}

fn at_once(host: &Host) -> Result<()> {
    let asking = Asking::start(host)?;
    let name = asking.made.name();
    let address = asking.made.address(asking.network.name())?;
    let script = format!(
        "cd /tmp; for i in $(seq 200); do nslookup {name} > answer$i 2>&1 & done; wait; \
         grep -l '{address}' answer* | wc -l"
    );
    asking.made.exec(&["sh", "-c", &script])?.succeeds()?.prints("200\n")?;
    Ok(())
}

fn restarted(host: &Host) -> Result<()> {
    let asking = Asking::start(host)?;
    let (client, network) = (asking.client, asking.network.name());
    let other = client.container().flags(["--network", network]).detach(SLEEP)?;
    for made in [&asking.made, &other] {
        made.docker(&["restart", "--time", "0"])?.succeeds()?;
    }
    resolves(&asking.made, other.name(), &other.address(network)?)?;
    resolves(&other, asking.made.name(), &asking.made.address(network)?)?;
    resolves(&asking.made, KNOWN, &known_address())
}

fn connected_later(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let network = client.network()?;
    let server = serve(&client, &["--network", network.name()], 80)?;
    // Of docker's own bridge, which has no name server.
    let made = client.container().detach(SLEEP)?;
    client.run(["network", "connect", network.name(), made.name()])?.succeeds()?;
    let limit = host.patience(SETTLES);
    let ask = format!("wget -T 3 -q -O - http://{}/", server.name());
    wait_until("the page by the server's name", limit, || {
        Ok(made.exec(&["sh", "-c", &ask])?.text() == "a page\n")
    })?;
    // The server sees it in the same network.
    server.exec(&["ping", "-c", "1", "-W", "10", &made.address(network.name())?])?.succeeds()?;
    client.run(["network", "disconnect", network.name(), made.name()])?.succeeds()?;
    wait_until("only the interface of docker's bridge", limit, || {
        Ok(made.exec(&["sh", "-c", "cd /sys/class/net; echo *"])?.text() == "eth0 lo\n")
    })?;
    made.exec(&["ping", "-c", "1", "-W", "10", BRIDGE])?.succeeds()?;
    Ok(())
}

fn nothing_left(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let network = client.network()?;
    let run = || -> Result<()> {
        let made = client.container().flags(["--network", network.name()]).detach(SLEEP)?;
        resolves(&made, made.name(), &made.address(network.name())?)?;
        // It ends while it asks.
        let script = format!("while nslookup {}; do :; done", made.name());
        client.run(["exec", "--detach", made.name(), "sh", "-c", &script])?.succeeds()?;
        made.docker(&["rm", "--force"])?.succeeds()?;
        Ok(())
    };
    // The first container of the namespace makes directories that stay.
    run()?;
    host.leaves_nothing(run)
}
