use std::{ffi::OsStr, fs, os::unix::ffi::OsStrExt};

use serde_json::{Value, json};
use tar::{Builder, Header};
use tempfile::TempDir;

use super::*;

/// Files of an image, by their names.
type Files = Vec<(String, Vec<u8>)>;

fn tar_of(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut tar = Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = Header::new_ustar();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.set_uid(rustix::process::getuid().as_raw().into());
        header.set_gid(rustix::process::getgid().as_raw().into());
        header.set_mtime(0);
        header.set_cksum();
        tar.append_data(&mut header, name, content.as_slice()).unwrap();
    }
    tar.into_inner().unwrap()
}

fn layer(name: &str, content: &str) -> Vec<u8> {
    tar_of(&[(name.into(), content.into())])
}

fn digest_of(bytes: &[u8]) -> String {
    format!("sha256:{:x}", Sha256::digest(bytes))
}

fn add(files: &mut Files, bytes: Vec<u8>) -> Value {
    let digest = digest_of(&bytes);
    files.push((blob_name(&digest).unwrap(), bytes));
    json!({ "digest": digest })
}

/// The files of an image with two layers, and the descriptor of its manifest.
fn image(files: &mut Files, platform: &str) -> Value {
    let layers = [layer("file", "lower"), layer("file", "upper")];
    let config = json!({
        "config": { "Cmd": ["sh"], "Env": ["A=1"], "WorkingDir": "/srv", "User": "7" },
        "rootfs": { "diff_ids": layers.each_ref().map(|layer| digest_of(layer)) },
    });
    let config = add(files, config.to_string().into());
    let layers = layers.map(|layer| add(files, layer));
    let manifest = json!({ "config": config, "layers": layers }).to_string();
    let mut descriptor = add(files, manifest.into());
    descriptor["platform"] = json!({ "os": "linux", "architecture": platform });
    descriptor
}

fn with_index(mut files: Files, manifests: &[Value]) -> Files {
    files.push(("index.json".into(), json!({ "manifests": manifests }).to_string().into()));
    files
}

fn layout() -> Files {
    let mut files = Files::new();
    let manifest = image(&mut files, "amd64");
    with_index(files, &[manifest])
}

/// The image as an archive and as a directory.
fn written(files: &Files) -> (TempDir, [PathBuf; 2]) {
    let dir = tempfile::tempdir().unwrap();
    let (archive, directory) = (dir.path().join("image.tar"), dir.path().join("image"));
    fs::write(&archive, tar_of(files)).unwrap();
    for (name, content) in files {
        let path = directory.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    (dir, [archive, directory])
}

fn unpacked(path: &Path) -> Result<(Settings, String), String> {
    let image = Image::open(path).map_err(|error| error.to_string())?;
    let root = tempfile::tempdir().unwrap();
    image
        .unpack(&File::open(root.path()).unwrap(), 1 << 20, &Count::default())
        .map_err(|error| error.to_string())?;
    Ok((image.settings, fs::read_to_string(root.path().join("file")).unwrap()))
}

fn error_of(files: &Files) -> String {
    let (_dir, [archive, directory]) = written(files);
    let error = unpacked(&archive).unwrap_err();
    assert_eq!(unpacked(&directory).unwrap_err(), error);
    error
}

fn settings() -> Settings {
    Settings {
        cmd: Some(vec!["sh".into()]),
        env: Some(vec!["A=1".into()]),
        working_dir: "/srv".into(),
        user: "7".into(),
        ..Settings::default()
    }
}

#[test]
fn layers_are_unpacked_one_over_the_other() {
    let (_dir, paths) = written(&layout());
    for path in paths {
        assert_eq!(unpacked(&path), Ok((settings(), "upper".into())));
    }
}

#[test]
fn what_docker_saves_is_an_image() {
    let mut files = Files::new();
    let layers = [layer("file", "lower"), layer("file", "upper")];
    let diff_ids = layers.each_ref().map(|layer| digest_of(layer));
    let config = json!({ "rootfs": { "diff_ids": diff_ids } });
    files.push(("config.json".into(), config.to_string().into()));
    for (number, layer) in layers.into_iter().enumerate() {
        files.push((format!("{number}/layer.tar"), layer));
    }
    let saved =
        json!({ "Config": "config.json", "Layers": ["0/layer.tar", "1/layer.tar"], "RepoTags": null });
    files.push(("manifest.json".into(), json!([saved]).to_string().into()));
    let (_dir, paths) = written(&files);
    for path in paths {
        assert_eq!(unpacked(&path), Ok((Settings::default(), "upper".into())));
    }
    files.last_mut().unwrap().1 = json!([saved, saved]).to_string().into();
    assert!(error_of(&files).starts_with("it has 2 images"));
}

/// What docker up to 24 saves of an image with the same layer twice.
fn saved_with_a_link(kind: EntryType, target: &str) -> Result<(Settings, String), String> {
    let content = layer("file", "twice");
    let diff_id = digest_of(&content);
    let config = json!({ "rootfs": { "diff_ids": [diff_id, diff_id] } }).to_string();
    let saved = json!([{ "Config": "config.json", "Layers": ["0/layer.tar", "1/layer.tar"] }]).to_string();
    let mut tar = Builder::new(Vec::new());
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(0);
    tar.append_link(&mut header, "1/layer.tar", target).unwrap();
    let link = tar.get_ref().clone();
    let files = [("config.json", config.into()), ("manifest.json", saved.into()), ("0/layer.tar", content)];
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("image.tar");
    fs::write(&archive, [link, tar_of(&files.map(|(name, content)| (name.into(), content)))].concat())
        .unwrap();
    unpacked(&archive)
}

#[test]
fn a_layer_that_is_a_link_to_another_is_that_one() {
    let expected = Ok((Settings::default(), "twice".to_owned()));
    assert_eq!(saved_with_a_link(EntryType::Symlink, "../0/layer.tar"), expected);
    assert_eq!(saved_with_a_link(EntryType::Link, "0/layer.tar"), expected);
    // Nowhere else, and not in a circle.
    for target in ["../../0/layer.tar", "/0/layer.tar", "/etc/passwd", "layer.tar", "../1/layer.tar", ".."] {
        let error = saved_with_a_link(EntryType::Symlink, target).unwrap_err();
        assert_eq!(error, "1/layer.tar is not in it", "{target}");
    }
}

#[test]
fn the_image_for_this_platform_is_taken() {
    let mut files = Files::new();
    let manifests = [image(&mut files, "arm64"), image(&mut files, "amd64")];
    let inner = add(&mut files, json!({ "manifests": manifests }).to_string().into());
    let (_dir, [archive, _]) = written(&with_index(files.clone(), &[inner]));
    assert!(unpacked(&archive).is_ok());
    assert!(
        error_of(&with_index(files.clone(), &manifests[..1]))
            .contains("an image for linux/amd64 is not in it")
    );
    let twice = [manifests[1].clone(), manifests[1].clone()];
    assert!(error_of(&with_index(files, &twice)).starts_with("it has 2 images for linux/amd64"));
}

#[test]
fn an_index_that_never_ends_is_refused() {
    let mut files = Files::new();
    let mut inner = image(&mut files, "amd64");
    for _ in 0..=DEEPEST {
        inner = add(&mut files, json!({ "manifests": [inner] }).to_string().into());
    }
    assert!(error_of(&with_index(files, &[inner])).contains("is not in it"));
}

#[test]
fn what_was_changed_is_refused_by_name() {
    let change = |name: fn(&str) -> bool, with: fn(&mut Vec<u8>)| {
        let mut files = layout();
        let layer = files.iter_mut().find(|(path, content)| name(path) && content.len() != 1).unwrap();
        with(&mut layer.1);
        error_of(&files)
    };
    let blob = |name: &str| name.starts_with("blobs/");
    // The configuration comes first.
    assert!(change(blob, |bytes| bytes[2] ^= 1).contains("its content has another digest"));
    assert!(change(|name| name == "index.json", |bytes| bytes.truncate(5)).starts_with("index.json: "));
    let mut files = layout();
    // The last byte of the first layer's content.
    let layer = files.iter_mut().find(|(_, content)| content.starts_with(b"file\0")).unwrap();
    layer.1[512] ^= 1;
    assert_eq!(error_of(&files), "layer 1: its content does not have the digest that the image says");
    files.retain(|(_, content)| !content.starts_with(b"file\0"));
    assert!(error_of(&files).ends_with("is not in it"));
}

#[test]
fn what_is_no_image_is_refused() {
    let other: Files = vec![("etc/passwd".into(), b"root".to_vec())];
    assert!(error_of(&other).starts_with("it has neither index.json nor manifest.json"));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("image");
    let text = "a text\n".repeat(100);
    let text = text.as_bytes();
    for (content, expected) in [
        (&b""[..], "it has neither"),
        (b"\x1f\x8b\x08", "it is compressed; decompress it"),
        (text, "it has neither"),
    ] {
        fs::write(&file, content).unwrap();
        assert!(unpacked(&file).unwrap_err().starts_with(expected));
    }
    let missing = unpacked(Path::new("busybox")).unwrap_err();
    assert!(missing.starts_with("there is no such file; --image takes a file or a directory"), "{missing}");
    assert!(missing.ends_with("bulkhead run pulls nothing"), "{missing}");
    let outside = |path: &str| with_index(vec![], &[json!({ "digest": path })]);
    for digest in ["sha256:../../../etc/passwd", "sha512:00", "x"] {
        assert!(error_of(&outside(digest)).ends_with("only digests by sha256 are supported"));
    }
}

#[test]
fn names_that_take_too_much_memory_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("image.tar");
    // Each byte of such a name is three bytes of text.
    let names = |count: usize, of_link: bool| {
        let mut tar = Builder::new(Vec::new());
        for number in 0..count {
            let long = [format!("{number}/").into_bytes(), vec![0xff; 3000]].concat();
            let long = Path::new(OsStr::from_bytes(&long));
            let mut header = Header::new_gnu();
            header.set_size(0);
            if of_link {
                header.set_entry_type(EntryType::Link);
                tar.append_link(&mut header, long, long).unwrap();
            } else {
                tar.append_data(&mut header, long, io::empty()).unwrap();
            }
        }
        fs::write(&archive, tar.into_inner().unwrap()).unwrap();
        unpacked(&archive).unwrap_err()
    };
    let expected = "the names of its files take more than 1 MiB";
    // 100 names of 9,000 bytes are less, and names and targets together are more.
    assert!(names(100, false).starts_with("it has neither"));
    assert_eq!((names(120, false).as_str(), names(60, true).as_str()), (expected, expected));
}
