//! OCI images of Debian's busybox, in tars that `ctr image import` takes (OCI image-spec, image-layout.md).

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

/// The name under which containerd knows the image.
pub(crate) const IMAGE: &str = "docker.io/library/busybox:latest";

/// The pause image of the containerd that the tests configure (`tests/e2e/src/containerd.rs`).
const PAUSE_IMAGE: &str = "registry.k8s.io/pause:3.10";

/// What the tests' pause container runs: it reaps what is left to it, and ends when it is told to.
const PAUSE: &str = "trap 'exit 0' INT TERM; sleep infinity & while :; do wait; done";

const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Returns the tar of an image with the static `busybox` and a symlink for each of its applets.
pub(crate) fn busybox_image(busybox: &Path) -> Result<Vec<u8>> {
    image(IMAGE, &json!({"Cmd": ["sh"], "Env": [PATH]}), &layer(busybox)?)
}

/// Returns the tar of the pause image, which stands in for that of Kubernetes where there is no registry.
pub(crate) fn pause_image(busybox: &Path) -> Result<Vec<u8>> {
    image(PAUSE_IMAGE, &json!({"Entrypoint": ["sh", "-c", PAUSE], "Env": [PATH]}), &layer(busybox)?)
}

fn image(name: &str, settings: &Value, layer: &[u8]) -> Result<Vec<u8>> {
    // The layer is not compressed, so its digest is its DiffID too.
    let layer_descriptor = describe("application/vnd.oci.image.layer.v1.tar", layer);
    let config = json!({
        "architecture": "amd64",
        "os": "linux",
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [layer_descriptor["digest"]]},
    })
    .to_string();
    let config_descriptor = describe("application/vnd.oci.image.config.v1+json", config.as_bytes());
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config_descriptor,
        "layers": [layer_descriptor],
    })
    .to_string();
    let mut manifest_descriptor = describe("application/vnd.oci.image.manifest.v1+json", manifest.as_bytes());
    manifest_descriptor["annotations"] = json!({"io.containerd.image.name": name});
    let index = json!({"schemaVersion": 2, "manifests": [manifest_descriptor]}).to_string();

    let mut tar = Builder::new(Vec::new());
    add(&mut tar, "oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    add(&mut tar, "index.json", 0o644, index.as_bytes())?;
    for blob in [manifest.as_bytes(), config.as_bytes(), layer] {
        add(&mut tar, &format!("blobs/sha256/{}", digest(blob)), 0o644, blob)?;
    }
    tar.into_inner().context("cannot write the image")
}

/// The root directory of the image.
fn layer(busybox: &Path) -> Result<Vec<u8>> {
    let binary = fs::read(busybox).with_context(|| format!("cannot read {}", busybox.display()))?;
    let mut tar = Builder::new(Vec::new());
    for (name, mode) in [
        ("bin", 0o755),
        ("dev", 0o755),
        ("etc", 0o755),
        ("proc", 0o755),
        ("root", 0o700),
        ("sys", 0o755),
        ("tmp", 0o1777),
    ] {
        let mut header = header(EntryType::Directory, mode);
        tar.append_data(&mut header, name, &[][..]).with_context(|| format!("cannot add {name}"))?;
    }
    add(
        &mut tar,
        "etc/passwd",
        0o644,
        b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/tmp:/bin/sh\n",
    )?;
    add(&mut tar, "etc/group", 0o644, b"root:x:0:\nuser:x:1000:\nextra:x:2000:user\n")?;
    add(&mut tar, "bin/busybox", 0o755, &binary)?;
    for applet in applets(busybox)? {
        let mut header = header(EntryType::Symlink, 0o777);
        let path = format!("bin/{applet}");
        tar.append_link(&mut header, &path, "busybox").with_context(|| format!("cannot add {path}"))?;
    }
    tar.into_inner().context("cannot write the layer")
}

/// The names that busybox answers to, its own not among them. It is static, so it runs on this machine.
fn applets(busybox: &Path) -> Result<Vec<String>> {
    let output = Command::new(busybox).arg("--list").output();
    let output = output.with_context(|| format!("cannot run {}", busybox.display()))?;
    let list = String::from_utf8(output.stdout).context("busybox lists names that are not text")?;
    let applets: Vec<String> = list.lines().filter(|name| *name != "busybox").map(str::to_owned).collect();
    if !output.status.success() || applets.is_empty() {
        bail!("{} --list: {}, {} names", busybox.display(), output.status, applets.len());
    }
    Ok(applets)
}

fn add(tar: &mut Builder<Vec<u8>>, path: &str, mode: u32, data: &[u8]) -> Result<()> {
    let mut header = header(EntryType::Regular, mode);
    header.set_size(data.len() as u64);
    tar.append_data(&mut header, path, data).with_context(|| format!("cannot add {path}"))
}

fn header(kind: EntryType, mode: u32) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(0);
    header
}

fn describe(media_type: &str, blob: &[u8]) -> Value {
    json!({"mediaType": media_type, "digest": format!("sha256:{}", digest(blob)), "size": blob.len()})
}

fn digest(blob: &[u8]) -> String {
    Sha256::digest(blob).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;

    /// The paths of a tar, with their contents or, of symlinks, their targets.
    fn read(tar: &[u8]) -> BTreeMap<String, Vec<u8>> {
        let mut archive = tar::Archive::new(tar);
        let read = |mut entry: tar::Entry<'_, &[u8]>| {
            let mut data = Vec::new();
            entry.read_to_end(&mut data).unwrap();
            if let Some(target) = entry.link_name_bytes() {
                data = target.into_owned();
            }
            (entry.path().unwrap().display().to_string(), data)
        };
        archive.entries().unwrap().map(|entry| read(entry.unwrap())).collect()
    }

    #[test]
    fn the_image_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let busybox = dir.path().join("busybox");
        let script = b"#!/bin/sh\necho busybox; echo sh; echo '['\n";
        fs::write(&busybox, script).unwrap();
        fs::set_permissions(&busybox, fs::Permissions::from_mode(0o755)).unwrap();

        let image = read(&busybox_image(&busybox).unwrap());
        let blob = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap().to_owned();
            let blob = &image[&format!("blobs/sha256/{digest}")];
            assert_eq!(super::digest(blob), digest);
            assert_eq!(descriptor["size"], blob.len());
            blob
        };
        let index: Value = serde_json::from_slice(&image["index.json"]).unwrap();
        assert_eq!(index["manifests"][0]["annotations"]["io.containerd.image.name"], IMAGE);
        let manifest: Value = serde_json::from_slice(blob(&index["manifests"][0])).unwrap();
        let config: Value = serde_json::from_slice(blob(&manifest["config"])).unwrap();
        assert_eq!(config["rootfs"]["diff_ids"][0], manifest["layers"][0]["digest"]);
        let layer = read(blob(&manifest["layers"][0]));
        assert_eq!(layer["bin/busybox"], script);
        assert_eq!((&layer["bin/sh"][..], &layer["bin/["][..]), (&b"busybox"[..], &b"busybox"[..]));
        assert!(layer.contains_key("tmp") && layer.contains_key("etc/passwd"), "{:?}", layer.keys());
    }
}
