//! What users install: an archive and a Debian package. Both are the same to the last byte for the same
//! programs and the same build of the kernel.

mod archive;
mod commands;
mod daemonset;
mod deb;
mod dependencies;
mod kubernetes_page;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod manifests;
mod prometheus;
mod quickstart;
mod test_runners;
mod trial;
mod upgrade;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::cache::{self, Cache};
use crate::dist::{BIN, Dist, LIB, TESTS, source_dir, target_dir};
use crate::progress::step;
use crate::tools::Tools;

pub(crate) use archive::File;

/// The version of all packages of the workspace.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Where documents go, with the archive's `usr/local`.
const SHARE: &str = "usr/local/share";

/// The pictures of the documents, which are installed with them.
const PICTURES: &str = "docs/pictures";

/// The list of the archive's files.
const LIST: &str = "usr/lib/bulkhead/files";

/// Documents of the source tree, and their names below `share/doc/bulkhead`.
const DOCUMENTS: [(&str, &str); 38] = [
    ("CHANGELOG.md", "CHANGELOG.md"),
    ("CONTRIBUTING.md", "CONTRIBUTING.md"),
    ("LICENSE", "LICENSE"),
    ("README.md", "README.md"),
    ("SECURITY.md", "SECURITY.md"),
    ("docs/architecture.md", "docs/architecture.md"),
    ("docs/benchmarks.md", "docs/benchmarks.md"),
    ("docs/comparison.md", "docs/comparison.md"),
    ("docs/conformance.md", "docs/conformance.md"),
    ("docs/counts.md", "docs/counts.md"),
    ("docs/fields.md", "docs/fields.md"),
    ("docs/fuzzing.md", "docs/fuzzing.md"),
    ("docs/glossary.md", "docs/glossary.md"),
    ("docs/host-hardening.md", "docs/host-hardening.md"),
    ("docs/io.md", "docs/io.md"),
    ("docs/memory-pressure.md", "docs/memory-pressure.md"),
    ("docs/observability.md", "docs/observability.md"),
    ("docs/operations.md", "docs/operations.md"),
    ("docs/processors.md", "docs/processors.md"),
    ("docs/quickstart-containerd.md", "docs/quickstart-containerd.md"),
    ("docs/quickstart-docker.md", "docs/quickstart-docker.md"),
    ("docs/quickstart-kubernetes.md", "docs/quickstart-kubernetes.md"),
    ("docs/reliability.md", "docs/reliability.md"),
    ("docs/resources.md", "docs/resources.md"),
    ("docs/rig.md", "docs/rig.md"),
    ("docs/security.md", "docs/security.md"),
    ("docs/test-runners.md", "docs/test-runners.md"),
    ("docs/troubleshooting.md", "docs/troubleshooting.md"),
    ("contrib/bulkhead/config.toml", "contrib/bulkhead/config.toml"),
    ("contrib/containerd/config-2.toml", "contrib/containerd/config-2.toml"),
    ("contrib/containerd/config-3.toml", "contrib/containerd/config-3.toml"),
    ("contrib/docker/daemon.json", "contrib/docker/daemon.json"),
    ("contrib/grafana/bulkhead.json", "contrib/grafana/bulkhead.json"),
    ("contrib/kubernetes/Dockerfile", "contrib/kubernetes/Dockerfile"),
    ("contrib/kubernetes/daemonset-remove.yaml", "contrib/kubernetes/daemonset-remove.yaml"),
    ("contrib/kubernetes/daemonset.yaml", "contrib/kubernetes/daemonset.yaml"),
    ("contrib/kubernetes/runtimeclass.yaml", "contrib/kubernetes/runtimeclass.yaml"),
    ("kernel-config/README.md", "kernel-config/README.md"),
];

/// Where each shell looks for completions, below `share`.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "bash-completion/completions/bulkhead"),
    ("zsh", "zsh/site-functions/_bulkhead"),
    ("fish", "fish/vendor_completions.d/bulkhead.fish"),
];

/// Packs the parts, and tries them on a bare host.
pub(crate) fn try_out(cache: &Cache, tools: &Tools, dist: &Dist) -> Result<()> {
    let text = |path: &Path| Ok::<_, anyhow::Error>(String::from_utf8_lossy(&read(path)?).into_owned());
    let first = text(&build(dist)?[2])?;
    let [archive, package, sums] = build(dist)?;
    let second = text(&sums)?;
    if first != second {
        bail!("packing the same programs twice gave other bytes:\n{first}and then\n{second}");
    }
    kubernetes_page::check()?;
    trial::run(cache, tools, dist, &archive, &package)?;
    daemonset::run(cache, tools, dist, &archive)?;
    println!("\nAll that was tried is as it should be, and nothing is left.");
    Ok(())
}

/// Packs the parts. Returns the archive, the package, and the list of their digests.
pub(crate) fn build(dist: &Dist) -> Result<[PathBuf; 3]> {
    step("packing the archive and the Debian package", || {
        let directory = target_dir().join("package");
        cache::remove(&directory)?;
        fs::create_dir_all(&directory).context("cannot make the directory of packages")?;
        let [archive, package] = packed(VERSION, files(dist)?)?;
        let line = |(name, bytes): &(String, Vec<u8>)| format!("{:x}  {name}\n", Sha256::digest(bytes));
        let sums = ("SHA256SUMS".to_owned(), [&archive, &package].map(line).concat().into_bytes());
        let write = |(name, bytes): (String, Vec<u8>)| -> Result<PathBuf> {
            let path = directory.join(name);
            fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
            Ok(path)
        };
        Ok([write(archive)?, write(package)?, write(sums)?])
    })
}

/// The archive and the package of the files: their names, and what is in them. dpkg knows the files of a package. For
/// those of an archive `bulkhead install` needs a list.
fn packed(version: &str, files: Vec<File>) -> Result<[(String, Vec<u8>); 2]> {
    let of_archive = [files.clone(), vec![list(&files)]].concat();
    let archive = (format!("bulkhead-{version}-x86_64.tar.gz"), archive::gzipped(&of_archive)?);
    let package = (format!("bulkhead_{version}_amd64.deb"), deb::package(version, files)?);
    Ok([archive, package])
}

/// The list of the files, in the form of sha256sum(1).
fn list(files: &[File]) -> File {
    let mut lines: Vec<_> = files.iter().map(|file| (&file.path, Sha256::digest(&file.data))).collect();
    lines.sort_by_key(|(path, _)| *path);
    let text: String = lines.iter().map(|(path, digest)| format!("{digest:x}  {path}\n")).collect();
    File { path: LIST.into(), mode: 0o644, data: text.into_bytes() }
}

/// All files of the archive, relative to `/`.
fn files(dist: &Dist) -> Result<Vec<File>> {
    let mut files = Vec::new();
    collect(dist.root(), dist.root(), &mut files)?;
    files.retain(|file| !file.path.starts_with(TESTS));
    let document = |to: &str, data: Vec<u8>| File { path: format!("{SHARE}/{to}"), mode: 0o644, data };
    for (from, to) in DOCUMENTS {
        files.push(document(&format!("doc/bulkhead/{to}"), read(&source_dir().join(from))?));
    }
    let mut pictures = Vec::new();
    let directory = source_dir().join(PICTURES);
    collect(&directory, &directory, &mut pictures)?;
    let picture = |file: File| document(&format!("doc/bulkhead/{PICTURES}/{}", file.path), file.data);
    files.extend(pictures.into_iter().map(picture));
    let program = dist.root().join(BIN).join("bulkhead");
    let pages = TempDir::new().context("no directory for man pages")?;
    output(&program, &["roff".as_ref(), pages.path()])?;
    let mut man = Vec::new();
    collect(pages.path(), pages.path(), &mut man)?;
    files.extend(man.into_iter().map(|page| document(&format!("man/man1/{}", page.path), page.data)));
    for (shell, to) in COMPLETIONS {
        files.push(document(to, output(&program, &["completions".as_ref(), shell.as_ref()])?));
    }
    for (from, to) in [
        ("tmpfiles.d/bulkhead.conf", "usr/lib/tmpfiles.d/bulkhead.conf"),
        ("systemd/bulkhead-metrics.service", "usr/lib/systemd/system/bulkhead-metrics.service"),
    ] {
        let data = read(&source_dir().join("contrib").join(from))?;
        files.push(File { path: to.into(), mode: 0o644, data });
    }
    let dependencies = dependencies::shipped()?;
    files.push(document("doc/bulkhead/THIRD-PARTY-LICENSES", dependencies::licenses(&dependencies)?));
    let source = &dist.kernel().source;
    files.push(document("doc/bulkhead/sbom.cdx.json", dependencies::sbom(&dependencies, VERSION, source)?));
    files.push(document("doc/bulkhead/kernel-source.toml", source.described()?));
    let has = |path: String| files.iter().any(|file| file.path == path);
    for part in ["bulkhead-vmm", "vmlinux", "initramfs.cpio"].map(|name| format!("{LIB}/{name}")) {
        if !has(part.clone()) {
            bail!("there is no {part} to pack");
        }
    }
    Ok(files)
}

/// Reads all files below a directory.
fn collect(root: &Path, directory: &Path, files: &mut Vec<File>) -> Result<()> {
    let context = || format!("cannot list {}", directory.display());
    for entry in fs::read_dir(directory).with_context(context)? {
        let path = entry.with_context(context)?.path();
        let metadata = fs::symlink_metadata(&path).with_context(context)?;
        if metadata.is_dir() {
            collect(root, &path, files)?;
        } else {
            let name = path.strip_prefix(root).unwrap_or(&path).to_str().context("a name is not text")?;
            let mode = if metadata.permissions().mode() & 0o111 == 0 { 0o644 } else { 0o755 };
            files.push(File { path: name.to_owned(), mode, data: read(&path)? });
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// What the program prints.
fn output(program: &Path, arguments: &[&Path]) -> Result<Vec<u8>> {
    let output = Command::new(program).args(arguments).output();
    let output = output.with_context(|| format!("cannot run {}", program.display()))?;
    if !output.status.success() {
        bail!("{} failed: {}", program.display(), String::from_utf8_lossy(&output.stderr));
    }
    Ok(output.stdout)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_lists_its_files_where_the_command_looks() {
        let files = vec![File { path: "usr/local/bin/x".into(), mode: 0o755, data: b"text".to_vec() }];
        let list = list(&files);
        let expected = "982d9e3eb996f559e633f4d194def3761d909f5a3b647d1a851fead67c32c9d1  usr/local/bin/x\n";
        assert_eq!(String::from_utf8(list.data).unwrap(), expected);
        let command = fs::read_to_string(source_dir().join("cli/src/install/options.rs")).unwrap();
        assert!(command.contains(&format!("\"/{LIST}\"")));
        let license = File { path: "usr/local/share/doc/bulkhead/LICENSE".into(), mode: 0o644, data: vec![] };
        let [(_, archive), _] = packed("1", [files, vec![license]].concat()).unwrap();
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(archive.as_slice()));
        let names = archive.entries().unwrap().map(|it| it.unwrap().path().unwrap().display().to_string());
        assert!(names.collect::<Vec<_>>().contains(&LIST.to_owned()));
    }

    #[test]
    fn the_documents_exist() {
        for (from, _) in DOCUMENTS {
            assert!(source_dir().join(from).is_file(), "{from}");
        }
    }
}
