//! Unpacks a tar archive below a directory. Nobody vouches for the archive: no name in it leads out of the directory,
//! because each is resolved by openat2(2) as if the directory were `/`, and what has the name is never followed.

use std::{
    cell::Cell,
    collections::BTreeSet,
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    os::fd::{AsFd, OwnedFd},
    path::{Component, Path, PathBuf},
    rc::Rc,
};

use flate2::read::MultiGzDecoder;
use rustix::{
    fs::{
        AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags,
        chownat, fchmod, fsetxattr, linkat, mkdirat, mknodat, openat, statat, symlinkat, unlinkat, utimensat,
    },
    io::Errno,
};
use tar::{Archive, Entry, EntryType, Header};

use crate::process::regular_file::place_below;

/// What the names of a layer that remove something begin with (OCI image-spec, layer.md, whiteouts).
const WHITEOUT: &[u8] = b".wh.";

/// The file of a layer by which a directory loses what lower layers have put there.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// The longest name, as of the kernel (PATH_MAX).
pub(super) const LONGEST_NAME: usize = 4096;

/// The most bytes of the headers of one entry, which have its names and attributes. They are kept in memory as a whole.
const MOST_OF_HEADERS: u64 = 1 << 20;

/// The most bytes of a name in an error.
const SHOWN: usize = 256;

/// The deepest directory that is removed with all that is in it.
const DEEPEST: usize = 1024;

/// The most bytes of the names of a layer. They are in memory until it is unpacked.
const MOST_WRITTEN: u64 = 64 << 20;

/// How files begin that are compressed.
pub(super) const GZIP: &[u8] = &[0x1f, 0x8b];
const OTHERS: [(&[u8], &str); 3] =
    [(&[0x28, 0xb5, 0x2f, 0xfd], "zstd"), (b"\xfd7zXZ\0", "xz"), (b"BZh", "bzip2")];

/// The bytes of a header, and where its checksum is.
pub(super) const BLOCK: u64 = 512;
const CHECKSUM: std::ops::Range<usize> = 148..156;

/// Attributes with this prefix in a PAX header become extended attributes.
const XATTR: &str = "SCHILY.xattr.";

/// Why an archive cannot be unpacked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UnpackError {
    #[error("cannot read it: {0}")]
    Read(io::Error),
    #[error("it is no tar archive; use .tar or .tar.gz")]
    NoTar,
    #[error("it is compressed with {0}, which is not supported; use gzip or no compression")]
    Compression(&'static str),
    #[error("it is larger than --scratch allows")]
    TooLarge,
    #[error("entry {name:?}: {reason}")]
    Entry { name: String, reason: String },
}

/// What an archive is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A whole root.
    Root,
    /// A layer of an image. It may remove what lower layers have.
    Layer,
}

/// The archive itself, if it is compressed or not. It takes what it brings from the `budget`, and fails at its end.
pub(super) fn decompressed(
    mut archive: impl Read + 'static,
    budget: Rc<Cell<u64>>,
) -> Result<Box<dyn Read>, UnpackError> {
    let mut first = Vec::new();
    archive.by_ref().take(8).read_to_end(&mut first).map_err(UnpackError::Read)?;
    let other = OTHERS.into_iter().find(|(magic, _)| first.starts_with(magic));
    if let Some((_, name)) = other {
        return Err(UnpackError::Compression(name));
    }
    let is_gzip = first.starts_with(GZIP);
    let whole = io::Cursor::new(first).chain(archive);
    let whole: Box<dyn Read> = if is_gzip { Box::new(MultiGzDecoder::new(whole)) } else { Box::new(whole) };
    Ok(Box::new(Limited { inner: whole, budget }))
}

struct Limited<R> {
    inner: R,
    budget: Rc<Cell<u64>>,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(buffer)?;
        let left = self.budget.get().checked_sub(length as u64);
        self.budget.set(left.ok_or_else(|| io::Error::from(io::ErrorKind::FileTooLarge))?);
        Ok(length)
    }
}

/// An archive of which only [`MOST_OF_HEADERS`] bytes are read between two entries.
pub(super) struct Headers<R> {
    inner: R,
    left: HeaderLimit,
}

/// How many bytes of headers may still come. None: what is read now is the content of an entry.
#[derive(Clone)]
pub(super) struct HeaderLimit(Rc<Cell<Option<u64>>>);

impl HeaderLimit {
    /// Call this when an entry was found.
    pub(super) fn content(&self) {
        self.0.set(None);
    }

    /// Call this before the next entry is looked for.
    pub(super) fn headers(&self) {
        self.0.set(Some(MOST_OF_HEADERS));
    }
}

impl<R> Headers<R> {
    pub(super) fn new(inner: R) -> (Self, HeaderLimit) {
        let left = HeaderLimit(Rc::new(Cell::new(Some(MOST_OF_HEADERS))));
        (Self { inner, left: left.clone() }, left)
    }
}

impl<R: Read> Read for Headers<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some(left) = self.left.0.get() else { return self.inner.read(buffer) };
        let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        if most == 0 && !buffer.is_empty() {
            return Err(io::Error::other("the name or the attributes of an entry are too long"));
        }
        let length = self.inner.read(buffer.get_mut(..most).unwrap_or_default())?;
        self.left.0.set(Some(left - length as u64));
        Ok(length)
    }
}

impl<R: Seek> Seek for Headers<R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.inner.seek(to)
    }
}

/// Whether an archive may begin with these bytes: a header with its checksum, the end of an empty archive, or nothing.
pub(super) fn may_begin(first: &[u8]) -> bool {
    if first.iter().all(|byte| *byte == 0) {
        return true;
    }
    let Ok(block) = <&[u8; BLOCK as usize]>::try_from(first) else { return false };
    // The checksum itself counts as spaces.
    let byte = |(at, byte): (usize, &u8)| u32::from(if CHECKSUM.contains(&at) { b' ' } else { *byte });
    let sum: u32 = block.iter().enumerate().map(byte).sum();
    Header::from_byte_slice(block).cksum().is_ok_and(|found| found == sum)
}

/// Unpacks the archive below `root`.
pub(super) fn unpack(mut archive: impl Read, root: &File, kind: Kind) -> Result<(), UnpackError> {
    let mut first = Vec::new();
    archive.by_ref().take(BLOCK).read_to_end(&mut first).map_err(read_error)?;
    // The errors of a parser would have what is in the file.
    if !may_begin(&first) {
        return Err(UnpackError::NoTar);
    }
    let archive = io::Cursor::new(first).chain(archive);
    let mut unpacker = Unpacker { root, kind, written: BTreeSet::new(), written_bytes: 0 };
    let (archive, limit) = Headers::new(archive);
    let mut archive = Archive::new(archive);
    for entry in archive.entries().map_err(read_error)? {
        let mut entry = entry.map_err(read_error)?;
        limit.content();
        let name = entry.path_bytes().into_owned();
        unpacker.entry(&mut entry, &name).map_err(|reason| match reason {
            Reason::Kernel(Errno::FBIG) => UnpackError::TooLarge,
            Reason::Kernel(Errno::NOSPC) => UnpackError::TooLarge,
            Reason::Kernel(errno) => refused(&name, io::Error::from(errno).to_string()),
            Reason::Read(error) => read_error(error),
            Reason::Text(reason) => refused(&name, reason.into()),
        })?;
        // What an entry has that is not unpacked.
        io::copy(&mut entry, &mut io::sink()).map_err(read_error)?;
        limit.headers();
    }
    Ok(())
}

fn read_error(error: io::Error) -> UnpackError {
    match error.kind() {
        io::ErrorKind::FileTooLarge | io::ErrorKind::StorageFull => UnpackError::TooLarge,
        _ => UnpackError::Read(error),
    }
}

fn refused(name: &[u8], reason: String) -> UnpackError {
    let name = name.get(..SHOWN).unwrap_or(name);
    UnpackError::Entry { name: String::from_utf8_lossy(name).into_owned(), reason }
}

/// Why an entry cannot be unpacked.
enum Reason {
    Kernel(Errno),
    Read(io::Error),
    Text(&'static str),
}

impl From<Errno> for Reason {
    fn from(errno: Errno) -> Self {
        Self::Kernel(errno)
    }
}

impl From<io::Error> for Reason {
    fn from(error: io::Error) -> Self {
        Self::Read(error)
    }
}

struct Unpacker<'a> {
    root: &'a File,
    kind: Kind,
    /// What this layer has brought. An opaque directory keeps it, with all directories above it.
    written: BTreeSet<PathBuf>,
    /// Bytes of all names that were written to it.
    written_bytes: u64,
}

const UNSUPPORTED: &str = "this type of an entry is not supported";

/// A name in an open directory.
struct Place {
    parent: OwnedFd,
    name: PathBuf,
}

impl Unpacker<'_> {
    fn entry<R: Read>(&mut self, entry: &mut Entry<'_, R>, name: &[u8]) -> Result<(), Reason> {
        let kind = entry.header().entry_type();
        if kind == EntryType::XGlobalHeader {
            return Ok(());
        }
        // The parser keeps these for itself, but not if the header is older than they are. It would then read their
        // whole content as attributes.
        if kind.is_pax_local_extensions() || kind.is_gnu_longname() || kind.is_gnu_longlink() {
            return Err(Reason::Text(UNSUPPORTED));
        }
        let path = relative(name)?;
        refuse_sparse(entry)?;
        let Some(place) = self.place(&path)? else {
            // The root itself.
            return if kind.is_dir() {
                set_attributes(entry, self.root, Path::new("."))
            } else {
                Err(Reason::Text("it is the root, and no directory"))
            };
        };
        if self.kind == Kind::Layer && self.removes(&path, &place, entry.size())? {
            return Ok(());
        }
        match kind {
            EntryType::Directory => make_directory(&place)?,
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                remove(&place)?;
                let flags =
                    OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let file = openat(&place.parent, &place.name, flags, Mode::RUSR | Mode::WUSR)?;
                copy(entry, &mut File::from(file))?;
            }
            EntryType::Symlink => {
                remove(&place)?;
                let target = entry.link_name_bytes().ok_or(Reason::Text("a symlink without a target"))?;
                symlinkat(target.as_ref(), &place.parent, &place.name)?;
            }
            EntryType::Link => {
                let target = entry.link_name_bytes().ok_or(Reason::Text("a link without a target"))?;
                let target = relative(&target)?;
                let name = target.file_name().ok_or(Reason::Text("a link to the root"))?;
                let directory = open_in(self.root, target.parent().unwrap_or(Path::new("")))?;
                remove(&place)?;
                linkat(&directory, name, &place.parent, &place.name, AtFlags::empty())?;
                self.note(&path)?;
                // Owner and mode are those of the file.
                return Ok(());
            }
            EntryType::Fifo => {
                remove(&place)?;
                mknodat(&place.parent, &place.name, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
            }
            // The program has a /dev of its own.
            EntryType::Char | EntryType::Block if path.starts_with("dev") => return Ok(()),
            EntryType::Char | EntryType::Block => return Err(Reason::Text("device nodes are not supported")),
            _ => return Err(Reason::Text(UNSUPPORTED)),
        }
        self.note(&path)?;
        set_attributes(entry, &place.parent, &place.name)
    }

    fn note(&mut self, path: &Path) -> Result<(), Reason> {
        if self.kind == Kind::Layer {
            self.written_bytes += path.as_os_str().len() as u64;
            if self.written_bytes > MOST_WRITTEN {
                return Err(Reason::Text("the names of this layer are too long"));
            }
            self.written.insert(path.to_owned());
        }
        Ok(())
    }

    /// Whether this layer has brought something that has this path or is below it.
    fn has_brought(&self, path: &Path) -> bool {
        // The order of paths is that of their components.
        self.written.range(path.to_owned()..).next().is_some_and(|next| next.starts_with(path))
    }

    /// The directory of `path`, which is made if it is missing, and the name in it. None: it is the root.
    fn place(&self, path: &Path) -> Result<Option<Place>, Reason> {
        let Some(name) = path.file_name() else { return Ok(None) };
        let parent = path.parent().unwrap_or(Path::new(""));
        Ok(Some(Place { parent: self.open_directory(parent)?, name: name.into() }))
    }

    fn open_directory(&self, path: &Path) -> Result<OwnedFd, Reason> {
        let mut missing = Vec::new();
        let mut at = path;
        // From below, because most are there.
        let mut directory = loop {
            match open_in(self.root, at) {
                Err(Errno::NOENT) => {
                    let Some((parent, name)) = at.parent().zip(at.file_name()) else {
                        return Err(Errno::NOENT.into());
                    };
                    missing.push(name);
                    at = parent;
                }
                other => break other?,
            }
        };
        while let Some(name) = missing.pop() {
            mkdirat(&directory, name, Mode::from_raw_mode(0o755))?;
            directory = openat(
                &directory,
                name,
                OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
                Mode::empty(),
            )?;
        }
        Ok(directory)
    }

    /// Removes what a layer says is to be removed. Returns whether the entry, which has so many bytes, says that.
    fn removes(&mut self, path: &Path, place: &Place, bytes: u64) -> Result<bool, Reason> {
        use std::os::unix::ffi::OsStrExt;
        let name = place.name.as_os_str().as_bytes();
        if name.starts_with(WHITEOUT) && bytes > 0 {
            // A sparse file could have as many as it likes.
            return Err(Reason::Text("it says that something is removed, and is not empty"));
        }
        if name == OPAQUE {
            let directory = path.parent().unwrap_or(Path::new(""));
            // What was removed once is not there again. Each look at a large directory takes long.
            if self.has_brought(path) {
                return Ok(true);
            }
            self.note(path)?;
            for child in names_in(&place.parent)? {
                if !self.has_brought(&directory.join(&child)) {
                    remove(&Place { parent: place.parent.try_clone()?, name: child })?;
                }
            }
            return Ok(true);
        }
        let Some(hidden) = name.strip_prefix(WHITEOUT) else { return Ok(false) };
        // Other names with this prefix are those of AUFS, for itself.
        if !hidden.starts_with(b".wh.") {
            let hidden = Path::new(std::ffi::OsStr::from_bytes(hidden));
            let is_name = hidden.components().eq([Component::Normal(hidden.as_os_str())]);
            if !is_name {
                return Err(Reason::Text("it removes no file"));
            }
            remove(&Place { parent: place.parent.try_clone()?, name: hidden.into() })?;
        }
        Ok(true)
    }
}

/// GNU's sparse files of the PAX format begin with a map of their holes, which this would take for content.
fn refuse_sparse<R: Read>(entry: &mut Entry<'_, R>) -> Result<(), Reason> {
    let Some(extensions) = entry.pax_extensions()? else { return Ok(()) };
    for extension in extensions {
        if extension?.key_bytes().starts_with(b"GNU.sparse.") {
            return Err(Reason::Text(
                "sparse files of this form are not supported; pack them without --sparse",
            ));
        }
    }
    Ok(())
}

/// The path below the root.
fn relative(name: &[u8]) -> Result<PathBuf, Reason> {
    use std::os::unix::ffi::OsStrExt;
    if name.len() > LONGEST_NAME {
        return Err(Reason::Text("the name is too long"));
    }
    let mut path = PathBuf::new();
    for component in Path::new(std::ffi::OsStr::from_bytes(name)).components() {
        match component {
            Component::Normal(name) => path.push(name),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err(Reason::Text("the name has `..` in it"));
            }
        }
    }
    Ok(path)
}

/// Opens a directory. Symlinks on the way are resolved as if `root` were `/`.
fn open_in(root: impl AsFd, path: &Path) -> Result<OwnedFd, Errno> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    place_below(root, path, OFlags::DIRECTORY, ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS)
}

fn type_of(place: &Place) -> Result<Option<FileType>, Errno> {
    match statat(&place.parent, &place.name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => Ok(None),
        other => Ok(Some(FileType::from_raw_mode(other?.st_mode))),
    }
}

fn make_directory(place: &Place) -> Result<(), Reason> {
    if type_of(place)? == Some(FileType::Directory) {
        return Ok(());
    }
    remove(place)?;
    Ok(mkdirat(&place.parent, &place.name, Mode::from_raw_mode(0o755))?)
}

/// Removes what has the name, if anything has it.
fn remove(place: &Place) -> Result<(), Reason> {
    remove_tree(place, 0)
}

fn remove_tree(place: &Place, depth: usize) -> Result<(), Reason> {
    match type_of(place)? {
        None => return Ok(()),
        Some(FileType::Directory) => {}
        Some(_) => return Ok(unlinkat(&place.parent, &place.name, AtFlags::empty())?),
    }
    if depth == DEEPEST {
        return Err(Reason::Text("it removes directories that are too deep"));
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = openat(&place.parent, &place.name, flags, Mode::empty())?;
    for name in names_in(&directory)? {
        remove_tree(&Place { parent: directory.try_clone()?, name }, depth + 1)?;
    }
    Ok(unlinkat(&place.parent, &place.name, AtFlags::REMOVEDIR)?)
}

fn names_in(directory: impl AsFd) -> Result<Vec<PathBuf>, Errno> {
    use std::os::unix::ffi::OsStrExt;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut names = Vec::new();
    for entry in Dir::new(openat(directory, ".", flags, Mode::empty())?)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(std::ffi::OsStr::from_bytes(name).into());
        }
    }
    Ok(names)
}

fn copy(entry: &mut impl Read, file: &mut File) -> Result<(), Reason> {
    io::copy(entry, file)?;
    Ok(file.flush()?)
}

/// Sets the owner, the mode, the extended attributes and the time of what was made.
fn set_attributes<R: Read>(entry: &mut Entry<'_, R>, parent: impl AsFd, name: &Path) -> Result<(), Reason> {
    let (is_link, is_fifo) =
        (entry.header().entry_type() == EntryType::Symlink, entry.header().entry_type() == EntryType::Fifo);
    let id = |id: u64| u32::try_from(id).map_err(|_| Reason::Text("the owner has no valid number"));
    let (uid, gid) = (id(entry.header().uid()?)?, id(entry.header().gid()?)?);
    let owner = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
    chownat(&parent, name, owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW)?;
    if !is_link {
        let mode = Mode::from_raw_mode(entry.header().mode()? & 0o7777);
        // O_NONBLOCK: nobody writes to a FIFO.
        let access = if is_fifo { OFlags::NONBLOCK } else { OFlags::empty() };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | access;
        let file = openat(&parent, name, flags, Mode::empty())?;
        // After the owner, whose change takes the set-user-ID bit and the capabilities away.
        fchmod(&file, mode)?;
        set_xattrs(entry, &file)?;
    }
    let seconds = i64::try_from(entry.header().mtime()?).unwrap_or(0);
    let time = Timespec { tv_sec: seconds, tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    Ok(utimensat(&parent, name, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Sets `security.capability` and `user.*`. Other attributes concern only the host that packed the archive, or an
/// overlay.
fn set_xattrs<R: Read>(entry: &mut Entry<'_, R>, file: impl AsFd) -> Result<(), Reason> {
    let Some(extensions) = entry.pax_extensions()? else { return Ok(()) };
    for extension in extensions {
        let extension = extension?;
        let Ok(key) = extension.key() else { continue };
        let Some(name) = key.strip_prefix(XATTR) else { continue };
        if name == "security.capability" || name.starts_with("user.") {
            match fsetxattr(&file, name, extension.value_bytes(), XattrFlags::empty()) {
                // Linux before 6.6 has no attributes of users in memory.
                Err(Errno::NOTSUP) => {}
                other => other?,
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
