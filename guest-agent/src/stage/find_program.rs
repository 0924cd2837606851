//! Finds the container's program, in the container's root and as the container's user.

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{AT_FDCWD, AtFlags},
    unistd::{AccessFlags, faccessat},
};

use super::{SetupError, Step, errno_text};

/// Most of /etc/passwd that is read: it comes from the image.
const PASSWD_LIMIT: u64 = 1 << 20;

/// The path to execute for `name`: itself if it has a slash in it, otherwise the first match in `PATH` of `env`.
///
/// The errors are worded as runc's are, since containerd's clients look for these words.
pub(super) fn find_program(name: &str, env: &[String]) -> Result<PathBuf, SetupError> {
    let step = || format!("exec: {name:?}");
    if name.contains('/') {
        let path = PathBuf::from(name);
        check_program(&path).step(step)?;
        return Ok(path);
    }
    let path = variable(env, "PATH").unwrap_or_default();
    path.split(':')
        .map(|directory| Path::new(if directory.is_empty() { "." } else { directory }).join(name))
        .find(|candidate| check_program(candidate).is_ok())
        .ok_or("executable file not found in $PATH")
        .step(step)
}

fn check_program(path: &Path) -> Result<(), String> {
    let metadata =
        path.metadata().map_err(|error| format!("stat {}: {}", path.display(), errno_text(&error)))?;
    if metadata.is_dir() {
        return Err("is a directory".into());
    }
    // glibc's eaccess(3) leaves the capabilities out if the effective user is the real one.
    match faccessat(AT_FDCWD, path, AccessFlags::X_OK, AtFlags::AT_EACCESS) {
        // The container's system call filter refuses the call, and execve(2) will say the rest.
        Err(Errno::EPERM) if metadata.mode() & 0o111 != 0 => Ok(()),
        executable => executable.map_err(|error| errno_text(&error.into())),
    }
}

/// The environment with HOME in it: the spec's, or else the user's according to the image, or else `/`.
pub(super) fn with_home(env: &[String], uid: u32) -> Vec<String> {
    let mut env = env.to_vec();
    if variable(&env, "HOME").is_none_or(str::is_empty) {
        let home = read_passwd().ok().and_then(|passwd| home_of(&passwd, uid)).unwrap_or_else(|| "/".into());
        env.retain(|entry| !entry.starts_with("HOME="));
        env.push(format!("HOME={home}"));
    }
    env
}

fn variable<'a>(env: &'a [String], name: &str) -> Option<&'a str> {
    env.iter().rev().find_map(|entry| entry.strip_prefix(name)?.strip_prefix('='))
}

fn read_passwd() -> io::Result<String> {
    // O_NONBLOCK: an image can have a FIFO there.
    let file =
        File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open("/etc/passwd")?;
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut text = Vec::new();
    file.take(PASSWD_LIMIT).read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn home_of(passwd: &str, uid: u32) -> Option<String> {
    passwd.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let home = fields.get(5).filter(|home| !home.is_empty())?;
        (fields.get(2)?.parse() == Ok(uid)).then(|| (*home).to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(path: &str) -> Vec<String> {
        vec![format!("PATH={path}")]
    }

    #[test]
    fn programs_are_found_in_the_path() {
        assert_eq!(find_program("sh", &env("/nowhere:/bin")).unwrap(), Path::new("/bin/sh"));
        assert_eq!(find_program("/bin/sh", &[]).unwrap(), Path::new("/bin/sh"));
    }

    #[test]
    fn failures_are_worded_as_those_of_runc() {
        let cases = [
            ("nope", r#"exec: "nope": executable file not found in $PATH"#),
            ("/nope", r#"exec: "/nope": stat /nope: no such file or directory"#),
            ("/", r#"exec: "/": is a directory"#),
            ("/etc/passwd", r#"exec: "/etc/passwd": permission denied"#),
        ];
        for (name, expected) in cases {
            assert_eq!(find_program(name, &env("/bin")).unwrap_err().to_string(), expected);
        }
        assert!(find_program("sh", &[]).is_err());
    }

    #[test]
    fn home_comes_from_the_spec_or_from_passwd() {
        let passwd =
            "root:x:0:0:root:/root:/bin/sh\nbroken\nuser:x:1000:1000::/home/user:/bin/sh\nno:x:7:7:::\n";
        assert_eq!(home_of(passwd, 0).as_deref(), Some("/root"));
        assert_eq!(home_of(passwd, 1000).as_deref(), Some("/home/user"));
        assert_eq!(home_of(passwd, 7), None);
        let given = vec!["HOME=/h".to_owned()];
        assert_eq!(with_home(&given, 0), given);
        assert_eq!(with_home(&[], 4_000_000_000), ["HOME=/"]);
    }
}
