//! What the page for test runners needs on a host without the Internet: a server, and a program in place of curl. They
//! are not part of the rig, because nothing else needs them.

use anyhow::Result;

use super::commands::hidden;
use crate::rig::Session;

pub(super) const PAGE: &str = "test-runners.md";

/// The server of the page, and the one of the trial. It is at an address of the host that is not its loopback
/// interface's.
const SERVER: &str = "https://example.com/";
const OWN_SERVER: &str = "http://192.0.2.1:8080/";

const START: &str = "ip link add trial0 type bridge && ip address add 192.0.2.1/24 dev trial0 && \
    ip link set trial0 up && mkdir /root/www && \
    systemd-run --quiet --unit trial-www python3 -m http.server --bind 192.0.2.1 --directory /root/www 8080 && \
    timeout 60 sh -c 'until curl --silent --head http://192.0.2.1:8080/ 2>/dev/null; do sleep 0.2; done'";

const STOP: &str = "systemctl stop trial-www; ip link delete trial0; rm -r /root/www /usr/local/bin/curl";

/// Stands in for curl, as the page calls it: `curl --silent --head URL`.
const CURL: &str = r#"#!/usr/bin/python3
import http.client, sys, urllib.parse
silent, head, url = sys.argv[1:]
assert (silent, head) == ("--silent", "--head")
connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=60)
connection.request("HEAD", "/")
answer = connection.getresponse()
print("HTTP/1.0", answer.status, answer.reason)
print(answer.headers, end="")
"#;

/// What the page shows is that the program is answered.
pub(super) const ANSWERED: &str = "HTTP/1.0 200 OK";

/// Starts the server.
pub(super) fn start(session: &mut Session) -> Result<()> {
    let curl = "/usr/local/bin/curl";
    hidden(session, &format!("cat > {curl} <<'END'\n{CURL}END\nchmod 755 {curl}"))?;
    hidden(session, START)?;
    Ok(())
}

/// Ends it, and leaves nothing.
pub(super) fn stop(session: &mut Session) -> Result<()> {
    hidden(session, STOP).map(drop)
}

/// The script of the page, with the server of the trial.
pub(super) fn adapted(script: &str) -> String {
    script.replace(SERVER, OWN_SERVER)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::dist::source_dir;
    use crate::package::quickstart;

    #[test]
    #[allow(clippy::unwrap_used)]
    fn the_page_installs_asks_the_server_and_removes() {
        let page = fs::read_to_string(source_dir().join("docs").join(PAGE)).unwrap();
        let scripts: Vec<_> =
            quickstart::steps(&page).into_iter().map(|step| adapted(&step.script)).collect();
        let has = |text: &str| scripts.iter().any(|script| script.contains(text));
        assert!(
            has("dpkg --install ") && has("bulkhead check\n") && has("dpkg --remove bulkhead\n"),
            "{scripts:?}"
        );
        assert!(has(&format!(" --network nat -- curl --silent --head {OWN_SERVER}\n")), "{scripts:?}");
    }
}
