//! tar archives that do not depend on the time, the user or the order of directories.

use std::io::Write;

use anyhow::{Context, Result};
use flate2::{Compression, GzBuilder};
use tar::{Builder, EntryType, Header};

/// The time of all files. The archive would differ from build to build with their own.
const TIME: u64 = 0;

/// A regular file of root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct File {
    /// Relative to `/`.
    pub(crate) path: String,
    pub(crate) mode: u32,
    pub(crate) data: Vec<u8>,
}

/// A tar archive of the files, compressed. It has no directories: unpacking it leaves those of the host as they are.
pub(super) fn gzipped(files: &[File]) -> Result<Vec<u8>> {
    gzip(&plain(files, false)?)
}

/// A tar archive of the files and of their directories, which dpkg needs, compressed.
pub(super) fn gzipped_with_directories(files: &[File]) -> Result<Vec<u8>> {
    gzip(&plain(files, true)?)
}

fn plain(files: &[File], with_directories: bool) -> Result<Vec<u8>> {
    let mut files: Vec<_> = files.iter().collect();
    files.sort_by(|one, other| one.path.cmp(&other.path));
    let mut builder = Builder::new(Vec::new());
    let mut last = Vec::new();
    for file in files {
        let parents: Vec<_> = file.path.split('/').collect();
        let parents = parents.split_last().map_or(&[] as &[&str], |(_, parents)| parents);
        for depth in 1..=parents.len() {
            if with_directories && last.get(..depth) != parents.get(..depth) {
                let name = format!("{}/", parents.get(..depth).unwrap_or_default().join("/"));
                append(&mut builder, &name, EntryType::Directory, 0o755, &[])?;
            }
        }
        last = parents.to_vec();
        append(&mut builder, &file.path, EntryType::Regular, file.mode, &file.data)?;
    }
    builder.into_inner().context("cannot end an archive")
}

fn append(builder: &mut Builder<Vec<u8>>, name: &str, kind: EntryType, mode: u32, data: &[u8]) -> Result<()> {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_mtime(TIME);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(data.len() as u64);
    header.set_username("root").and_then(|()| header.set_groupname("root")).context("cannot name root")?;
    builder.append_data(&mut header, name, data).with_context(|| format!("cannot pack {name}"))
}

fn gzip(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut gzip = GzBuilder::new().mtime(0).write(Vec::new(), Compression::default());
    gzip.write_all(bytes).and_then(|()| gzip.finish()).context("cannot compress an archive")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Read;

    use super::*;

    fn file(path: &str, mode: u32) -> File {
        File { path: path.into(), mode, data: path.as_bytes().to_vec() }
    }

    #[test]
    fn an_archive_depends_on_its_files_only() {
        let files = [file("usr/b", 0o644), file("usr/a/x", 0o755)];
        let reversed = [files[1].clone(), files[0].clone()];
        let bytes = gzipped_with_directories(&files).unwrap();
        assert_eq!(bytes, gzipped_with_directories(&reversed).unwrap());
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(bytes.as_slice()));
        let mut seen = Vec::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let header = entry.header();
            assert_eq!((header.mtime().unwrap(), header.uid().unwrap(), header.gid().unwrap()), (0, 0, 0));
            let mode = header.mode().unwrap();
            let path = String::from_utf8(entry.path_bytes().into_owned()).unwrap();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            seen.push((path, mode, text));
        }
        let seen: Vec<_> =
            seen.iter().map(|(path, mode, text)| (path.as_str(), *mode, text.as_str())).collect();
        assert_eq!(
            seen,
            [
                ("usr/", 0o755, ""),
                ("usr/a/", 0o755, ""),
                ("usr/a/x", 0o755, "usr/a/x"),
                ("usr/b", 0o644, "usr/b"),
            ]
        );
        let without = gzipped(&files).unwrap();
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(without.as_slice()));
        assert_eq!(archive.entries().unwrap().count(), 2);
    }
}
