//! Images in files: an OCI image layout as a directory or an archive (OCI image-spec, image-layout.md), or what
//! `docker save` writes.

use std::{
    cell::Cell,
    collections::HashMap,
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::{Component, Path, PathBuf},
    rc::Rc,
};

use rustix::fs::ResolveFlags;
use serde::{Deserialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};
use tar::{Archive, EntryType};

use crate::{
    process::regular_file::open_below,
    progress::{Count, CountedReader},
    run::unpack::{self, Kind, UnpackError},
};

/// The longest JSON document that is read.
const MOST_JSON: u64 = 4 << 20;

/// The most files of an archive, and the most layers of an image.
const MOST_FILES: usize = 1 << 16;
const MOST_LAYERS: usize = 512;

/// The most MiB of the names of an archive's files and of what its links lead to. They are in memory.
const MOST_NAMES_MIB: usize = if cfg!(test) { 1 } else { 64 };

/// How deep an index of images may be in another.
const DEEPEST: usize = 3;

/// The only platform.
const PLATFORM: (&str, &str) = ("linux", "amd64");

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImageError {
    #[error("{0}")]
    Open(io::Error),
    #[error(
        "there is no such file; --image takes a file or a directory, such as `docker save --output busybox.tar \
         busybox` writes; bulkhead run pulls nothing"
    )]
    NoFile,
    #[error("it is compressed; decompress it first, for example with gunzip")]
    Compressed,
    #[error(
        "it has neither index.json nor manifest.json, so it is no image; is it an archive for --archive?"
    )]
    NoImage,
    #[error("the names of its files take more than {MOST_NAMES_MIB} MiB")]
    Names,
    #[error("{0} is not in it")]
    Missing(String),
    #[error("{name}: {reason}")]
    Json { name: String, reason: String },
    #[error("it has {0} images for linux/amd64; save the one that is to run alone")]
    Several(usize),
    #[error("{name}: {reason}")]
    Blob { name: String, reason: String },
    #[error("layer {number}: {source}")]
    Layer { number: usize, source: UnpackError },
    #[error("layer {number}: its content does not have the digest that the image says")]
    Digest { number: usize },
}

/// An image that can be unpacked.
#[derive(Debug)]
pub(super) struct Image {
    blobs: Blobs,
    /// Files, from the lowest layer up, and the digest of what is in each.
    layers: Vec<(String, String)>,
    pub(super) settings: Settings,
}

/// How the program of an image is run.
#[derive(Debug, Default, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub(super) struct Settings {
    pub(super) entrypoint: Option<Vec<String>>,
    pub(super) cmd: Option<Vec<String>>,
    pub(super) env: Option<Vec<String>>,
    pub(super) working_dir: String,
    pub(super) user: String,
}

#[derive(Debug, Deserialize)]
struct Configuration {
    #[serde(default)]
    config: Option<Settings>,
    rootfs: RootFs,
}

#[derive(Debug, Deserialize)]
struct RootFs {
    diff_ids: Vec<String>,
}

/// An index of images, or one image: OCI's and docker's have the same fields.
#[derive(Debug, Deserialize)]
struct Manifest {
    #[serde(default)]
    manifests: Vec<Descriptor>,
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Vec<Descriptor>,
}

#[derive(Debug, Clone, Deserialize)]
struct Descriptor {
    digest: String,
    platform: Option<Platform>,
}

#[derive(Debug, Clone, Deserialize)]
struct Platform {
    os: String,
    architecture: String,
}

/// An image in manifest.json of `docker save`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    layers: Vec<String>,
}

/// The files of an image.
#[derive(Debug)]
enum Blobs {
    Directory(File),
    Archive {
        path: PathBuf,
        /// Where each file begins, and how long it is.
        files: HashMap<String, (u64, u64)>,
    },
}

impl Image {
    /// Finds the image for this platform in a file or a directory.
    pub(super) fn open(path: &Path) -> Result<Self, ImageError> {
        let blobs = Blobs::open(path)?;
        match blobs.json::<Manifest>("index.json", None) {
            Ok(index) => {
                let manifest = find(&blobs, index, DEEPEST)?;
                let config = manifest.config.ok_or_else(|| ImageError::Missing("config".into()))?;
                let layers = manifest.layers.iter().map(|layer| blob_name(&layer.digest));
                Self::new(
                    blob_name(&config.digest)?,
                    Some(&config.digest),
                    layers.collect::<Result<_, _>>()?,
                    blobs,
                )
            }
            Err(ImageError::Missing(_)) => match blobs.json::<Vec<Saved>>("manifest.json", None) {
                Ok(mut saved) => match (saved.pop(), saved.len()) {
                    (Some(image), 0) => Self::new(image.config, None, image.layers, blobs),
                    (None, _) => Err(ImageError::NoImage),
                    (Some(_), others) => Err(ImageError::Several(others + 1)),
                },
                Err(ImageError::Missing(_)) => Err(ImageError::NoImage),
                Err(error) => Err(error),
            },
            Err(error) => Err(error),
        }
    }

    fn new(
        name: String,
        digest: Option<&str>,
        layers: Vec<String>,
        blobs: Blobs,
    ) -> Result<Self, ImageError> {
        let configuration: Configuration = blobs.json(&name, digest)?;
        let diff_ids = configuration.rootfs.diff_ids;
        if diff_ids.len() != layers.len() || layers.len() > MOST_LAYERS {
            let reason = format!("it has {} diff_ids for {} layers", diff_ids.len(), layers.len());
            return Err(ImageError::Json { name, reason });
        }
        let layers = layers.into_iter().zip(diff_ids).collect();
        Ok(Self { blobs, layers, settings: configuration.config.unwrap_or_default() })
    }

    /// Unpacks the layers below `root`. Together they have `most` bytes at most. Counts the bytes that it has read.
    pub(super) fn unpack(&self, root: &File, most: u64, count: &Count) -> Result<(), ImageError> {
        let budget = Rc::new(Cell::new(most));
        count.set(0, self.bytes());
        for (index, (name, diff_id)) in self.layers.iter().enumerate() {
            let number = index + 1;
            count.set_detail(&format!("layer {number} of {}", self.layers.len()));
            let failed = |source| ImageError::Layer { number, source };
            let file = CountedReader { inner: self.blobs.open_file(name)?, count: count.clone() };
            let archive = unpack::decompressed(file, Rc::clone(&budget)).map_err(failed)?;
            let mut archive = Digesting { inner: archive, digest: Sha256::new() };
            unpack::unpack(&mut archive, root, Kind::Layer).map_err(failed)?;
            // What follows the end of the archive belongs to the digest.
            io::copy(&mut archive, &mut io::sink()).map_err(|error| failed(UnpackError::Read(error)))?;
            if format!("sha256:{:x}", archive.digest.finalize()) != *diff_id {
                return Err(ImageError::Digest { number });
            }
        }
        Ok(())
    }

    /// The size of all layers as they are stored. Of one that cannot be opened, its unpacking says why.
    fn bytes(&self) -> u64 {
        let files = self.layers.iter().filter_map(|(name, _)| self.blobs.open_file(name).ok());
        // A file in an archive is a part of the file that is open.
        let size =
            |file: io::Take<File>| file.get_ref().metadata().map_or(0, |all| all.len().min(file.limit()));
        files.map(size).fold(0, u64::saturating_add)
    }
}

/// The image for this platform in an index.
fn find(blobs: &Blobs, index: Manifest, depth: usize) -> Result<Manifest, ImageError> {
    if index.config.is_some() {
        return Ok(index);
    }
    let is_ours = |platform: &Platform| (platform.os.as_str(), platform.architecture.as_str()) == PLATFORM;
    let fitting: Vec<_> =
        index.manifests.into_iter().filter(|image| image.platform.as_ref().is_none_or(is_ours)).collect();
    match fitting.as_slice() {
        [image] if depth > 0 => {
            let found = blobs.json(&blob_name(&image.digest)?, Some(&image.digest))?;
            find(blobs, found, depth - 1)
        }
        [] | [_] => Err(ImageError::Missing("an image for linux/amd64".into())),
        several => Err(ImageError::Several(several.len())),
    }
}

/// The file with this digest.
fn blob_name(digest: &str) -> Result<String, ImageError> {
    match digest.strip_prefix("sha256:") {
        Some(hex) if hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
            Ok(format!("blobs/sha256/{hex}"))
        }
        _ => Err(ImageError::Blob {
            name: digest.into(),
            reason: "only digests by sha256 are supported".into(),
        }),
    }
}

/// The name in an archive to which a link in the directory `from` leads. None: out of the archive.
fn target_of(from: Option<&Path>, target: &Path) -> Option<String> {
    let mut path = from.map(Path::to_owned).unwrap_or_default();
    for component in target.components() {
        match component {
            Component::Normal(name) => path.push(name),
            Component::CurDir => {}
            Component::ParentDir => {
                if !path.pop() {
                    return None;
                }
            }
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    path.into_os_string().into_string().ok()
}

impl Blobs {
    fn open(path: &Path) -> Result<Self, ImageError> {
        let mut file = File::open(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => ImageError::NoFile,
            _ => ImageError::Open(error),
        })?;
        if file.metadata().map_err(ImageError::Open)?.is_dir() {
            return Ok(Self::Directory(file));
        }
        let mut first = Vec::new();
        file.by_ref().take(unpack::BLOCK).read_to_end(&mut first).map_err(ImageError::Open)?;
        if first.starts_with(unpack::GZIP) {
            return Err(ImageError::Compressed);
        }
        if first.is_empty() || !unpack::may_begin(&first) {
            return Err(ImageError::NoImage);
        }
        file.seek(SeekFrom::Start(0)).map_err(ImageError::Open)?;
        let (mut files, mut links, mut room) = (HashMap::new(), Vec::new(), MOST_NAMES_MIB << 20);
        let mut take = |text: &String| {
            room.checked_sub(text.capacity()).map(|left| room = left).ok_or(ImageError::Names)
        };
        let (headers, limit) = unpack::Headers::new(&file);
        for entry in Archive::new(headers).entries_with_seek().map_err(ImageError::Open)? {
            let entry = entry.map_err(ImageError::Open)?;
            limit.headers();
            let name = entry.path_bytes();
            // No file of an image has a longer name, and all of them are kept.
            let is_kept = name.len() <= unpack::LONGEST_NAME && files.len() + links.len() < MOST_FILES;
            if !is_kept {
                continue;
            }
            let name = String::from_utf8_lossy(&name).trim_start_matches("./").to_owned();
            let kind = entry.header().entry_type();
            match entry.link_name_bytes().filter(|target| target.len() <= unpack::LONGEST_NAME) {
                _ if kind == EntryType::Regular => {
                    take(&name)?;
                    files.insert(name, (entry.raw_file_position(), entry.size()));
                }
                Some(target) if kind.is_symlink() || kind.is_hard_link() => {
                    // The target of a hard link is a name in the archive.
                    let from = if kind.is_symlink() { Path::new(&name).parent() } else { None };
                    let to = target_of(from, Path::new(&*String::from_utf8_lossy(&target)));
                    if let Some(to) = to {
                        take(&name).and_then(|()| take(&to))?;
                        links.push((name, to));
                    }
                }
                _ => {}
            }
        }
        // If a layer is in the archive already, docker up to 24 saves a link to it. docker makes no links to links.
        let targets: Vec<_> =
            links.into_iter().filter_map(|(name, to)| Some((name, *files.get(&to)?))).collect();
        for (name, place) in targets {
            files.entry(name).or_insert(place);
        }
        Ok(Self::Archive { path: path.into(), files })
    }

    fn open_file(&self, name: &str) -> Result<io::Take<File>, ImageError> {
        match self {
            Self::Directory(directory) => {
                let file = open_below(directory, name, ResolveFlags::BENEATH).map_err(|error| {
                    let (name, reason) = (name.into(), error.to_string());
                    match error.kind() {
                        io::ErrorKind::InvalidInput => ImageError::Blob { name, reason },
                        _ => ImageError::Missing(name),
                    }
                })?;
                Ok(file.take(u64::MAX))
            }
            Self::Archive { path, files } => {
                let (position, size) = files.get(name).ok_or_else(|| ImageError::Missing(name.into()))?;
                let mut file = File::open(path).map_err(ImageError::Open)?;
                file.seek(SeekFrom::Start(*position)).map_err(ImageError::Open)?;
                Ok(file.take(*size))
            }
        }
    }

    /// Reads a document, which has this digest, if one is given.
    fn json<T: DeserializeOwned>(&self, name: &str, digest: Option<&str>) -> Result<T, ImageError> {
        let mut text = Vec::new();
        self.open_file(name)?.take(MOST_JSON).read_to_end(&mut text).map_err(ImageError::Open)?;
        if digest.is_some_and(|digest| digest != format!("sha256:{:x}", Sha256::digest(&text))) {
            return Err(ImageError::Blob {
                name: name.into(),
                reason: "its content has another digest".into(),
            });
        }
        let damaged =
            |error: serde_json::Error| ImageError::Json { name: name.into(), reason: error.to_string() };
        serde_json::from_slice(&text).map_err(damaged)
    }
}

/// A reader that computes the digest of what it has brought.
struct Digesting<R> {
    inner: R,
    digest: Sha256,
}

impl<R: Read> Read for Digesting<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(buffer)?;
        self.digest.update(buffer.get(..length).unwrap_or_default());
        Ok(length)
    }
}

#[cfg(test)]
mod tests;
