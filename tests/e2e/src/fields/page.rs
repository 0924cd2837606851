//! docs/fields.md, which is written from the lists, and the tests of the lists.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use super::{Row, State, cri, docker, oci, source};
use crate::cases::GROUPS;

const PAGE: &str = "docs/fields.md";
/// Writes the page.
const COMMAND: &str = "WRITE_FIELDS=1 cargo test -p bulkhead-e2e fields";

/// The crates with unit tests, and their folders.
const CRATES: [(&str, &str); 2] = [("agent", "guest-agent"), ("shim", "host-shim")];

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// What becomes of the fields of one kind of request.
struct Table {
    title: String,
    /// What serves the fields that the runtime does not see.
    client: &'static str,
    rows: &'static [Row],
}

fn all() -> [Table; 3] {
    let (version, _) = source::of_oci_spec();
    let oci = format!("The OCI runtime spec (the structures of oci-spec {version})");
    [
        Table { title: oci, client: "containerd", rows: oci::FIELDS },
        Table { title: "The CRI".to_owned(), client: "containerd", rows: cri::FIELDS },
        Table { title: "docker run".to_owned(), client: "docker", rows: docker::FLAGS },
    ]
}

/// All fields that a row is about: those in the object that it refuses as a whole, or itself. `fields` are those of the
/// spec.
fn expanded(row: &Row, fields: &[String]) -> Vec<String> {
    let is_within =
        |field: &&String| field.strip_prefix(row.name).is_some_and(|rest| rest.starts_with(['.', '[']));
    let within: Vec<_> = fields.iter().filter(is_within).cloned().collect();
    if within.is_empty() { vec![row.name.to_owned()] } else { within }
}

fn page() -> String {
    let mut page = "\
# Fields

What becomes of each field of the OCI runtime spec, of the CRI's messages, and of each flag of `docker run`:

- **honoured**: it has the effect that it has on runc.
- **different**: it has an effect, but not quite that on runc. The last column says what differs.
- **refused**: the request fails, and the error names the field, or the object that it is in. The last column says why.
- **client**: containerd or docker does it without the runtime.

No field is ignored. The third column names a test that shows the second: an end-to-end case
(`cargo xtask test NAME`), or a unit test of the agent (`cargo test -p bulkhead-agent NAME`) or of the shim
(`cargo test -p bulkhead-host-shim NAME`).

This page is written from the lists in `tests/e2e/src/fields/`. Tests compare the lists with the sources of the crate
oci-spec, with the CRI that containerd serves, and with `docker run --help`.
"
    .to_owned();
    let fields = source::fields(|_| false);
    for Table { title, client, rows } in all() {
        let header = "| field | what becomes of it | test | difference, or reason |\n|---|---|---|---|";
        let _ = writeln!(page, "\n## {title}\n\n{header}");
        for row in rows {
            let (state, why) = match row.state {
                State::Honoured => ("honoured", "none".to_owned()),
                State::Different => ("different", row.why.to_owned()),
                State::Refused => ("refused", row.why.to_owned()),
                State::Client => ("client", format!("none: it is {client}'s")),
            };
            let test = row.test.replace(':', ": ");
            for name in expanded(row, &fields) {
                let _ = writeln!(page, "| `{name}` | {state} | {test} | {why} |");
            }
        }
    }
    page
}

/// The names of the unit tests of a crate.
fn unit_tests(folder: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut folders = vec![project().join(folder).join("src"), project().join(folder).join("tests")];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                names.extend(tests_in(&fs::read_to_string(&path).unwrap()));
            }
        }
    }
    names
}

/// The functions that have an attribute `test`.
fn tests_in(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut is_test = false;
    for line in text.lines().map(str::trim) {
        let declared = line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ");
        if line.starts_with("#[") {
            is_test |= line == "#[test]" || line.starts_with("#[tokio::test");
        } else if let Some(name) = declared.and_then(|rest| rest.split('(').next()) {
            names.extend(is_test.then(|| name.to_owned()));
            is_test = false;
        } else if !line.starts_with("//") {
            is_test = false;
        }
    }
    names
}

#[test]
fn fields_are_those_of_oci_spec() {
    let all = source::fields(|_| false);
    assert!(all.len() > 200, "only {} fields were found", all.len());
    let found: BTreeSet<_> = all.iter().map(String::as_str).collect();
    let rows = oci::FIELDS.iter();
    let is_whole = |row: &&Row| row.state == State::Refused || found.contains(row.name);
    let parted: Vec<_> = rows.clone().filter(|row| !is_whole(row)).map(|row| row.name).collect();
    assert!(parted.is_empty(), "objects, of which only a refused one is one row: {parted:#?}");
    let shown: Vec<_> = rows.flat_map(|row| expanded(row, &all)).collect();
    let listed: BTreeSet<_> = shown.iter().map(String::as_str).collect();
    assert_eq!(listed.len(), shown.len(), "a field has two rows: {shown:#?}");
    let missing: Vec<_> = found.difference(&listed).collect();
    assert!(
        missing.is_empty(),
        "fields of oci-spec that tests/e2e/src/fields/oci.rs does not list: {missing:#?}"
    );
    let gone: Vec<_> = listed.difference(&found).collect();
    assert!(gone.is_empty(), "fields that oci-spec does not have: {gone:#?}");
}

#[test]
fn fields_have_no_empty_cell() {
    for Table { title, rows, .. } in all() {
        let mut names = BTreeSet::new();
        for Row { name, state, test, why } in rows {
            assert!(names.insert(name), "{title}: {name} is listed twice");
            assert!(!test.is_empty(), "{title}: {name} names no test");
            let needs_reason = matches!(state, State::Refused | State::Different);
            assert_eq!(
                needs_reason,
                !why.is_empty(),
                "{title}: {name} needs a reason if it is not as on runc"
            );
        }
    }
}

#[test]
fn fields_have_no_empty_cell_on_their_page() {
    let page = page();
    let tables: Vec<_> = page.lines().filter(|line| line.starts_with('|')).collect();
    assert!(tables.len() > 300, "only {} rows", tables.len());
    for row in tables {
        let cells = row.strip_prefix('|').and_then(|row| row.strip_suffix('|')).unwrap().split('|');
        let cells: Vec<_> = cells.map(str::trim).collect();
        assert!(cells.len() == 4 && cells.iter().all(|cell| !cell.is_empty()), "an empty cell: {row}");
    }
}

#[test]
fn fields_of_a_refused_object_have_rows() {
    let page = page();
    for field in
        ["linux.resources.network.classID", "hooks.createContainer[].path", "windows.network.endpointList"]
    {
        let row = page.lines().find(|line| line.starts_with(&format!("| `{field}` | refused | ")));
        assert!(row.is_some(), "no row of {field}: {page}");
    }
}

#[test]
fn fields_name_tests_that_exist() {
    let cases = GROUPS
        .iter()
        .flat_map(|group| group.cases.iter().map(|case| format!("{}/{}", group.name, case.name)));
    let cases: BTreeSet<String> = cases.collect();
    let units: BTreeMap<_, _> = CRATES.iter().map(|(short, folder)| (*short, unit_tests(folder))).collect();
    let exists = |test: &str| match test.split_once(':') {
        Some((short, name)) => units.get(short).is_some_and(|names| names.contains(name)),
        None => cases.contains(test),
    };
    let missing: BTreeSet<_> =
        all().iter().flat_map(|table| table.rows).map(|row| row.test).filter(|test| !exists(test)).collect();
    assert!(missing.is_empty(), "tests that do not exist: {missing:#?}");
}

#[test]
fn fields_are_on_their_page() {
    let path = project().join(PAGE);
    let page = page();
    if std::env::var_os("WRITE_FIELDS").is_some() {
        fs::write(&path, page).unwrap();
    } else {
        let shown = fs::read_to_string(&path).unwrap_or_default();
        assert!(shown == page, "{PAGE} differs from the lists; `{COMMAND}` writes it");
    }
}

#[test]
fn fields_find_unit_tests() {
    let text = "#[test]\nfn one() {}\n\nfn two() {}\n\n#[tokio::test(start_paused = true)]\n// why\nasync fn three() {}\n";
    assert_eq!(tests_in(text), ["one", "three"]);
}
