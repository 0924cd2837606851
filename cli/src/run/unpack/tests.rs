use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use flate2::{Compression, write::GzEncoder};
use tar::{Builder, Header};
use tempfile::TempDir;

use super::*;

/// An entry of an archive: its name, its type, and the target or the content. Names are written as they are.
type Given<'a> = (&'a str, EntryType, &'a str);

const DIRECTORY: EntryType = EntryType::Directory;
const REGULAR: EntryType = EntryType::Regular;
const SYMLINK: EntryType = EntryType::Symlink;
const LINK: EntryType = EntryType::Link;

fn archive(entries: &[Given<'_>]) -> Vec<u8> {
    let mut tar = Builder::new(Vec::new());
    for (name, kind, text) in entries {
        let mut header = Header::new_gnu();
        // `set_path` refuses what is tested here.
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_entry_type(*kind);
        header.set_mode(if *kind == DIRECTORY { 0o750 } else { 0o640 });
        let owner = fs::metadata("/proc/self").unwrap();
        header.set_uid(owner.uid().into());
        header.set_gid(owner.gid().into());
        header.set_mtime(1_000_000);
        let content = if *kind == REGULAR { text.as_bytes() } else { b"" };
        if [SYMLINK, LINK].contains(kind) {
            header.set_link_name_literal(text).unwrap();
        }
        header.set_size(content.len() as u64);
        header.set_cksum();
        tar.append(&header, content).unwrap();
    }
    tar.into_inner().unwrap()
}

struct Roots {
    dir: TempDir,
}

impl Roots {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("root")).unwrap();
        fs::write(dir.path().join("outside"), "outside").unwrap();
        Self { dir }
    }

    fn unpack(&self, kind: Kind, entries: &[Given<'_>]) -> Result<(), String> {
        let root = File::open(self.dir.path().join("root")).unwrap();
        unpack(archive(entries).as_slice(), &root, kind).map_err(|error| error.to_string())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("root").join(name)
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }
}

#[test]
fn everything_is_made_with_its_attributes() {
    let roots = Roots::new();
    let entries = [
        ("./", DIRECTORY, ""),
        ("./dir/", DIRECTORY, ""),
        ("dir/file", REGULAR, "content"),
        ("/deep/er/file", REGULAR, "deep"),
        ("link", LINK, "/dir/file"),
        ("sym", SYMLINK, "/etc/passwd"),
        ("fifo", EntryType::Fifo, ""),
        ("dev/null", EntryType::Char, ""),
    ];
    roots.unpack(Kind::Root, &entries).unwrap();
    assert_eq!((roots.text("dir/file"), roots.text("deep/er/file")), ("content".into(), "deep".into()));
    let file = fs::metadata(roots.path("dir/file")).unwrap();
    assert_eq!((file.permissions().mode() & 0o7777, file.nlink(), file.mtime()), (0o640, 2, 1_000_000));
    assert_eq!(fs::metadata(roots.path("dir")).unwrap().permissions().mode() & 0o7777, 0o750);
    assert_eq!(fs::metadata(roots.path("")).unwrap().permissions().mode() & 0o7777, 0o750);
    assert_eq!(fs::read_link(roots.path("sym")).unwrap(), Path::new("/etc/passwd"));
    assert!(!roots.path("dev/null").exists());
}

#[test]
fn no_entry_leads_out_of_the_root() {
    let roots = Roots::new();
    let outside = roots.dir.path().join("outside").display().to_string();
    let parent = roots.dir.path().display().to_string();
    for (entries, expected) in [
        (&[("../outside", REGULAR, "evil")][..], Some("`..`")),
        (&[("a/../../outside", REGULAR, "evil")], Some("`..`")),
        (&[("hard", LINK, "../outside")], Some("`..`")),
        // An absolute target is one in the root, where it is missing.
        (&[("hard", LINK, &outside)], Some("No such file")),
        // So is one behind a symlink.
        (&[("up", SYMLINK, "../.."), ("hard", LINK, "up/outside")], Some("No such file")),
        // Symlinks on the way stay in the root.
        (&[("out", SYMLINK, &parent), ("out/outside", REGULAR, "evil")], Some("entry \"out/outside\"")),
        (&[("up1", SYMLINK, ".."), ("up1/outside", REGULAR, "in the root")], None),
        // What has the name is replaced, not followed.
        (&[("last", SYMLINK, &outside), ("last", REGULAR, "in the root")], None),
        (&[("dir", SYMLINK, &parent), ("dir", DIRECTORY, "")], None),
    ] {
        match (roots.unpack(Kind::Root, entries), expected) {
            (Err(error), Some(words)) => assert!(error.contains(words), "{error}"),
            (Ok(()), None) => {}
            (result, _) => panic!("{entries:?}: {result:?}"),
        }
        assert_eq!(fs::read_to_string(&outside).unwrap(), "outside");
        assert_eq!(fs::read_dir(&parent).unwrap().count(), 2);
    }
    assert_eq!(roots.text("outside"), "in the root");
    assert!(fs::symlink_metadata(roots.path("dir")).unwrap().is_dir());
}

#[test]
fn what_is_not_supported_is_named() {
    let refused = |kind| Roots::new().unpack(Kind::Root, &[("etc/x", kind, "")]).unwrap_err();
    assert_eq!(refused(EntryType::Block), "entry \"etc/x\": device nodes are not supported");
    assert_eq!(refused(EntryType::Char), "entry \"etc/x\": device nodes are not supported");
    assert_eq!(refused(EntryType::new(b'Z')), "entry \"etc/x\": this type of an entry is not supported");
    let error = Roots::new().unpack(Kind::Root, &[("/", REGULAR, "x")]).unwrap_err();
    assert!(error.ends_with("it is the root, and no directory"), "{error}");
}

#[test]
fn a_layer_removes_what_it_says() {
    let roots = Roots::new();
    let lower = [
        ("usr/lib/a", REGULAR, "a"),
        ("usr/lib/b", REGULAR, "b"),
        ("opaque/old/x", REGULAR, "x"),
        ("lib", SYMLINK, "usr/lib"),
        ("gone/deep/file", REGULAR, ""),
    ];
    roots.unpack(Kind::Layer, &lower).unwrap();
    let upper = [
        ("lib/.wh.a", REGULAR, ""),
        ("opaque/new", REGULAR, "new"),
        ("opaque/.wh..wh..opq", REGULAR, ""),
        (".wh.gone", REGULAR, ""),
        (".wh.missing", REGULAR, ""),
        (".wh..wh.plnk", REGULAR, ""),
    ];
    roots.unpack(Kind::Layer, &upper).unwrap();
    assert!(!roots.path("usr/lib/a").exists() && roots.path("usr/lib/b").exists());
    assert!(!roots.path("opaque/old").exists() && !roots.path("gone").exists());
    assert_eq!(roots.text("opaque/new"), "new");
    for name in [".wh..", ".wh..."] {
        let error = roots.unpack(Kind::Layer, &[(name, REGULAR, "")]).unwrap_err();
        assert!(error.ends_with("it removes no file"), "{error}");
    }
    // A root is no layer.
    roots.unpack(Kind::Root, &[(".wh.opaque", REGULAR, "text")]).unwrap();
    assert!(roots.path("opaque").exists() && roots.path(".wh.opaque").exists());
}

#[test]
fn a_symlink_of_the_root_is_not_removed_through() {
    let roots = Roots::new();
    let kept = roots.dir.path().join("kept");
    fs::create_dir(&kept).unwrap();
    fs::write(kept.join("file"), "").unwrap();
    symlink(&kept, roots.path("sym")).unwrap();
    roots.unpack(Kind::Layer, &[("sym/.wh..wh..opq", REGULAR, "")]).unwrap_err();
    roots.unpack(Kind::Layer, &[(".wh.sym", REGULAR, "")]).unwrap();
    assert!(kept.join("file").exists() && fs::symlink_metadata(roots.path("sym")).is_err());
}

#[test]
fn compression_is_recognized_and_bounded() {
    let plain = archive(&[("file", REGULAR, "content")]);
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(&plain).unwrap();
    let packed = encoder.finish().unwrap();
    let read = |bytes: Vec<u8>, most| -> Result<Vec<u8>, String> {
        let mut text = Vec::new();
        let mut reader = decompressed(io::Cursor::new(bytes), Rc::new(Cell::new(most)))
            .map_err(|error| error.to_string())?;
        reader.read_to_end(&mut text).map_err(|error| read_error(error).to_string())?;
        Ok(text)
    };
    assert_eq!(read(plain.clone(), 1 << 20), Ok(plain.clone()));
    assert_eq!(read(packed.clone(), 1 << 20), Ok(plain));
    assert_eq!(read(packed, 1000), Err("it is larger than --scratch allows".into()));
    let zstd = vec![0x28, 0xb5, 0x2f, 0xfd, 0];
    assert!(read(zstd, 1000).unwrap_err().starts_with("it is compressed with zstd"));
}

#[test]
fn a_damaged_archive_is_an_error() {
    let mut bytes = archive(&[("file", REGULAR, "content")]);
    let second = bytes.len() - 1024;
    bytes.splice(second.., archive(&[("other", REGULAR, "content")]));
    let roots = Roots::new();
    let root = File::open(roots.path("")).unwrap();
    unpack(bytes.as_slice(), &root, Kind::Root).unwrap();
    bytes[second + 100] ^= 0xff;
    assert!(matches!(unpack(bytes.as_slice(), &root, Kind::Root), Err(UnpackError::Read(_))));
}

#[test]
fn what_is_no_archive_is_refused_without_its_content() {
    let roots = Roots::new();
    let root = File::open(roots.path("")).unwrap();
    let mut damaged = archive(&[("file", REGULAR, "content")]);
    damaged[100] ^= 0xff;
    for bytes in [b"short".to_vec(), b"secret words\n".repeat(1000), damaged] {
        let error = unpack(bytes.as_slice(), &root, Kind::Root).unwrap_err().to_string();
        assert_eq!(error, "it is no tar archive; use .tar or .tar.gz");
    }
    unpack([0; 1024].as_slice(), &root, Kind::Root).unwrap();
}

/// The names and attributes of an entry are kept in memory as a whole, however small they are compressed.
#[test]
fn headers_that_do_not_end_are_refused() {
    let roots = Roots::new();
    let root = File::open(roots.path("")).unwrap();
    for kind in [EntryType::GNULongName, EntryType::GNULongLink, EntryType::XHeader] {
        let mut tar = Builder::new(Vec::new());
        let mut header = Header::new_gnu();
        header.set_path("long").unwrap();
        header.set_entry_type(kind);
        let size = 2 * MOST_OF_HEADERS;
        header.set_size(size);
        header.set_cksum();
        tar.append(&header, io::repeat(b'x').take(size)).unwrap();
        let error = unpack(tar.into_inner().unwrap().as_slice(), &root, Kind::Root).unwrap_err();
        assert!(error.to_string().ends_with("are too long"), "{kind:?}: {error}");
    }
    // The content of an entry is no header.
    let content = "x".repeat(2 * MOST_OF_HEADERS as usize);
    roots.unpack(Kind::Root, &[("file", REGULAR, &content), ("other", REGULAR, "y")]).unwrap();
}

#[test]
fn a_long_name_is_cut_in_the_error() {
    let error = refused(&[b'x'; 10_000], "why".into()).to_string();
    assert!(error.len() < 2 * SHOWN, "{error}");
}

#[test]
fn a_sparse_file_of_the_pax_format_is_refused() {
    let mut tar = Builder::new(Vec::new());
    tar.append_pax_extensions([("GNU.sparse.major", b"1".as_slice())]).unwrap();
    let mut header = Header::new_ustar();
    header.set_path("GNUSparseFile.1/name").unwrap();
    header.set_size(0);
    header.set_cksum();
    tar.append(&header, io::empty()).unwrap();
    let roots = Roots::new();
    let root = File::open(roots.path("")).unwrap();
    let error = unpack(tar.into_inner().unwrap().as_slice(), &root, Kind::Root).unwrap_err();
    assert!(error.to_string().contains("--sparse"), "{error}");
}

#[test]
fn what_only_the_parser_may_read_is_no_entry() {
    let roots = Roots::new();
    for kind in [EntryType::XHeader, EntryType::GNULongName, EntryType::GNULongLink] {
        let mut tar = Builder::new(Vec::new());
        // A header that is older than these types.
        let mut header = Header::new_old();
        header.set_path("a").unwrap();
        header.set_entry_type(kind);
        header.set_size(4);
        header.set_cksum();
        tar.append(&header, b"text".as_slice()).unwrap();
        let root = File::open(roots.dir.path().join("root")).unwrap();
        let error = unpack(tar.into_inner().unwrap().as_slice(), &root, Kind::Root).unwrap_err().to_string();
        assert!(error.contains(UNSUPPORTED), "{kind:?}: {error}");
    }
}

#[test]
fn a_whiteout_is_empty_and_counts_once() {
    let roots = Roots::new();
    let error = roots.unpack(Kind::Layer, &[(".wh.x", REGULAR, "text")]).unwrap_err();
    assert!(error.contains("is not empty"), "{error}");
    let opaque = ("opaque/.wh..wh..opq", REGULAR, "");
    let entries = [("opaque/", DIRECTORY, ""), opaque, ("opaque/new", REGULAR, "new"), opaque];
    roots.unpack(Kind::Layer, &entries).unwrap();
    assert_eq!(roots.text("opaque/new"), "new");
}

#[test]
fn what_is_renamed_elsewhere_does_not_disturb() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir_all(at("root/a")).unwrap();
    symlink("../a", at("root/a/link")).unwrap();
    fs::write(at("renamed"), "").unwrap();
    let root = File::open(at("root")).unwrap();
    let stop = AtomicBool::new(false);
    let failed = thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                fs::rename(at("renamed"), at("again")).unwrap();
                fs::rename(at("again"), at("renamed")).unwrap();
            }
        });
        let opened = (0..20_000).map(|_| open_in(&root, Path::new("a/link")));
        let failed: Vec<_> = opened.filter_map(Result::err).collect();
        stop.store(true, Ordering::Relaxed);
        failed
    });
    assert!(failed.is_empty(), "{}: {:?}", failed.len(), failed.first());
}
