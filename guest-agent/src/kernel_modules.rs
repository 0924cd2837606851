//! The modules of the guest's kernel.
//!
//! If a process uses a part of the kernel that is a module, the kernel executes the program that kernel.modprobe names,
//! and waits for it. This is the agent's own program, which loads the module with all that it depends on. The modules,
//! and an index of them, are in the initramfs. The kernel checks that their signatures are those of its own build.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    process::ExitCode,
    time::Duration,
};

use rustix::system::finit_module;

use crate::cgroup;

/// What kernel.modprobe is: the program of the agent, which is process 1 in the pid namespace of the guest's own /proc.
/// The kernel passes it as argument zero too.
pub const MODPROBE: &str = "/proc/1/exe";

/// Where the initramfs has the modules, and where the guest has them.
pub const DIRECTORY: &str = "/lib/modules";

/// The list of the modules in their directory. Each line has words:
///
/// - `module NAME NEEDED...`: the file NAME.ko.xz, and the modules that must be loaded before it, in this order;
/// - `alias PATTERN NAME`: another name, under which the kernel asks for the module. A `*` stands for any characters.
const INDEX: &str = "index";

/// The largest index, in bytes.
const LONGEST_INDEX: u64 = 1 << 20;

/// MODULE_NAME_LEN of Linux, which limits what the kernel asks for.
const LONGEST_NAME: usize = 64;

/// MODULE_INIT_COMPRESSED_FILE of linux/module.h.
const COMPRESSED_FILE: i32 = 4;

/// The cgroup of the programs that the kernel executes to load modules. Containers cause them, but the kernel makes
/// them in the root.
const CGROUP: &str = "modules";

/// The memory that they may use together, bytes. One reads the index, and has some pages of its own.
const MEMORY: u64 = 32 << 20;

/// How many of them run. The kernel waits for 50 at once (kernel/module/kmod.c, MAX_KMOD_CONCURRENT), but not for one
/// whose request was given up.
const MOST_PROGRAMS: u64 = 64;

/// The time of this file is when a failure was logged last.
const LOGGED: &str = "/run/module-failure";

/// After a failure was logged, how long no other one is logged.
const LOG_PAUSE: Duration = Duration::from_secs(10);

/// From now on the kernel loads modules. A kernel without modules is left as it is.
pub fn enable() -> io::Result<()> {
    const FILE: &str = "/proc/sys/kernel/modprobe";
    if !fs::exists(FILE)? {
        return Ok(());
    }
    let cgroup = Path::new(cgroup::ROOT).join(CGROUP);
    fs::create_dir(&cgroup)?;
    fs::write(cgroup.join("memory.max"), MEMORY.to_string())?;
    fs::write(cgroup.join("pids.max"), MOST_PROGRAMS.to_string())?;
    fs::write(FILE, MODPROBE)
}

/// The program that the kernel executes: `/proc/1/exe -q -- NAME`. It has no standard streams, so a module that cannot
/// be loaded is named in the kernel's log.
pub fn main(mut arguments: impl Iterator<Item = String>) -> ExitCode {
    let request = match (arguments.next().as_deref(), arguments.next().as_deref(), arguments.next()) {
        (Some("-q"), Some("--"), Some(request)) => request,
        _ => return ExitCode::FAILURE,
    };
    let loaded = enter(&Path::new(cgroup::ROOT).join(CGROUP))
        .map_err(LoadError::Cgroup)
        .and_then(|()| load(Path::new(DIRECTORY), &request));
    match loaded {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            if may_log(Path::new(LOGGED))
                && let Ok(mut log) = OpenOptions::new().write(true).open("/dev/kmsg")
            {
                // Nobody else can be told.
                let _ = log.write_all(format!("bulkhead-agent: {error}\n").as_bytes());
            }
            ExitCode::FAILURE
        }
    }
}

/// Moves this process into the cgroup, which limits what it does from now on. The kernel lets any number of processes
/// in, so one that is too many ends.
fn enter(cgroup: &Path) -> io::Result<()> {
    fs::write(cgroup.join("cgroup.procs"), "0")?;
    let running = fs::read_to_string(cgroup.join("pids.current"))?;
    match running.trim_end().parse::<u64>() {
        Ok(running) if running <= MOST_PROGRAMS => Ok(()),
        Ok(running) => Err(io::Error::other(format!("{running} programs load modules"))),
        Err(error) => Err(io::Error::new(io::ErrorKind::InvalidData, error)),
    }
}

/// Whether a failure is logged now. Any number of processes of containers can cause one.
fn may_log(logged: &Path) -> bool {
    let before = fs::metadata(logged).and_then(|metadata| metadata.modified());
    // A clock that was set back does not keep failures from being logged.
    let age = before.ok().and_then(|before| before.elapsed().ok());
    age.is_none_or(|age| age >= LOG_PAUSE) && fs::write(logged, "x").is_ok()
}

/// Why a module is not loaded.
#[derive(Debug, thiserror::Error)]
enum LoadError {
    #[error("cannot load a module: {0}")]
    Cgroup(#[source] io::Error),
    #[error("cannot read the list of modules: {0}")]
    Index(#[source] io::Error),
    #[error("cannot load the module {name}: {source}")]
    Module { name: String, source: io::Error },
}

/// Loads each module that has this name or alias. Returns whether one was loaded: the kernel takes the answer no for an
/// error, even if the module is there.
fn load(directory: &Path, request: &str) -> Result<bool, LoadError> {
    let index = read_index(directory).map_err(LoadError::Index)?;
    load_each(resolve(&index, request), |name| load_file(directory, name))
}

/// Loads modules, each after what it needs.
fn load_each(
    modules: Vec<Vec<&str>>,
    mut load_file: impl FnMut(&str) -> io::Result<()>,
) -> Result<bool, LoadError> {
    let (mut is_loaded, mut failure) = (false, None);
    for names in modules {
        // Several modules can have one alias: the generic form of an algorithm, and one for some processors only.
        let loaded =
            names.iter().try_for_each(|name| load_file(name).map_err(|source| ((*name).to_owned(), source)));
        match loaded {
            Ok(()) => is_loaded = true,
            // The processor is another one.
            Err((_, source)) if source.raw_os_error() == Some(libc::ENODEV) => {}
            Err((name, source)) => failure = Some(LoadError::Module { name, source }),
        }
    }
    failure.map_or(Ok(is_loaded), Err)
}

fn read_index(directory: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(directory.join(INDEX))?.take(LONGEST_INDEX).read_to_string(&mut text)?;
    Ok(text)
}

fn load_file(directory: &Path, name: &str) -> io::Result<()> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(directory.join(name).with_extension("ko.xz"))?;
    match finit_module(&file, c"", COMPRESSED_FILE) {
        // It is loaded already.
        Err(rustix::io::Errno::EXIST) => Ok(()),
        result => Ok(result?),
    }
}

/// For each module of this name or alias, the names of what is to be loaded, in this order.
fn resolve<'a>(index: &'a str, request: &str) -> Vec<Vec<&'a str>> {
    if request.len() > LONGEST_NAME {
        return Vec::new();
    }
    let request = with_underscores(request);
    let names = index.lines().filter_map(|line| {
        let mut words = line.split(' ');
        let (kind, pattern) = (words.next()?, words.next()?);
        match kind {
            "module" if pattern == request => Some(pattern),
            "alias" if matches(&with_underscores(pattern), &request) => words.next(),
            _ => None,
        }
    });
    names.filter_map(|name| files_of(index, name)).collect()
}

/// The module of this name, after what it needs.
fn files_of<'a>(index: &'a str, name: &'a str) -> Option<Vec<&'a str>> {
    index.lines().find_map(|line| {
        let mut words = line.strip_prefix("module ")?.split(' ');
        (words.next() == Some(name)).then(|| words.chain([name]).collect())
    })
}

/// The kernel and modprobe(8) take `-` and `_` in names for the same.
fn with_underscores(name: &str) -> String {
    name.replace('-', "_")
}

/// Whether a name is of the form of a pattern. It takes no more steps than the product of the two lengths.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut at, mut matched) = (0, 0);
    // Where to go on if what follows the last `*` does not match: that `*` stands for one more character.
    let mut retry = None;
    while matched < name.len() {
        match pattern.get(at) {
            Some(b'*') => {
                retry = Some((at, matched));
                at += 1;
            }
            Some(character) if name.get(matched) == Some(character) => {
                at += 1;
                matched += 1;
            }
            _ => {
                let Some((star, from)) = retry else { return false };
                retry = Some((star, from + 1));
                (at, matched) = (star + 1, from + 1);
            }
        }
    }
    pattern.iter().skip(at).all(|character| *character == b'*')
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use proptest::prelude::*;

    use super::*;

    const SOME: &str = "module aes_generic\nmodule aesni_intel crypto_simd cryptd\nmodule loop\nmodule sctp libcrc32c\n\
        alias block-major-7-* loop\nalias devname:loop-control loop\nalias net-pf-2-proto-132-type-1 sctp\n\
        alias crypto-aes aes_generic\nalias crypto-aes aesni_intel\nalias lost nowhere\n";

    #[test]
    fn a_module_is_found_by_name_and_alias_and_comes_after_what_it_needs() {
        for (request, expected) in [
            ("sctp", vec![vec!["libcrc32c", "sctp"]]),
            ("net-pf-2-proto-132-type-1", vec![vec!["libcrc32c", "sctp"]]),
            ("block-major-7-3", vec![vec!["loop"]]),
            ("aesni-intel", vec![vec!["crypto_simd", "cryptd", "aesni_intel"]]),
            ("crypto-aes", vec![vec!["aes_generic"], vec!["crypto_simd", "cryptd", "aesni_intel"]]),
        ] {
            assert_eq!(resolve(SOME, request), expected, "{request}");
        }
    }

    #[test]
    fn what_no_line_names_loads_nothing() {
        for request in [
            "",
            "*",
            "block-major-8-0",
            "net-pf-2-proto-132-type-11",
            "../loop",
            "module",
            "lost",
            "crypto_simd",
        ] {
            assert_eq!(resolve(SOME, request), Vec::<Vec<&str>>::new(), "{request}");
        }
        assert_eq!(
            resolve(&format!("module {0}\n", "a".repeat(65)), &"a".repeat(65)),
            Vec::<Vec<&str>>::new()
        );
    }

    #[test]
    fn a_damaged_index_loads_nothing_else() {
        for index in ["module", "alias a", "alias a b", "\n \n", "alias  sctp", "module  a"] {
            assert_eq!(resolve(index, "a"), Vec::<Vec<&str>>::new(), "{index:?}");
        }
    }

    #[test]
    fn a_star_stands_for_any_characters() {
        for (pattern, name, expected) in [
            ("a*c", "abc", true),
            ("a*c", "ac", true),
            ("a*c", "abcd", false),
            ("*", "", true),
            ("a*b*c", "a_b_b_c", true),
            ("a*b*c", "a_c_b", false),
            ("", "", true),
            ("", "a", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn the_kernel_is_told_whether_a_module_is_there() {
        let request = |name: &str, errno: i32| {
            let mut tried = Vec::new();
            let loaded = load_each(resolve(SOME, name), |file| {
                tried.push(file.to_owned());
                if file == "aesni_intel" { Err(io::Error::from_raw_os_error(errno)) } else { Ok(()) }
            });
            (loaded.map_err(|error| error.to_string()), tried.join(" "))
        };
        assert_eq!(request("sctp", 0), (Ok(true), "libcrc32c sctp".to_owned()));
        assert_eq!(request("tipc", 0), (Ok(false), String::new()));
        let tried = "aes_generic crypto_simd cryptd aesni_intel".to_owned();
        assert_eq!(request("crypto-aes", libc::ENODEV), (Ok(true), tried.clone()));
        assert_eq!(request("aesni_intel", libc::ENODEV).0, Ok(false));
        let (loaded, all) = request("crypto-aes", libc::ENOMEM);
        assert!(loaded.unwrap_err().starts_with("cannot load the module aesni_intel: "));
        assert_eq!(all, tried);
    }

    #[test]
    fn what_loads_a_module_is_in_a_cgroup_with_so_many_others_at_most() {
        let cgroup = tempfile::tempdir().unwrap();
        let at = |name: &str| cgroup.path().join(name);
        fs::write(at("pids.current"), "64\n").unwrap();
        enter(cgroup.path()).unwrap();
        assert_eq!(fs::read_to_string(at("cgroup.procs")).unwrap(), "0");
        fs::write(at("pids.current"), "65\n").unwrap();
        assert_eq!(enter(cgroup.path()).unwrap_err().to_string(), "65 programs load modules");
        fs::write(at("pids.current"), "").unwrap();
        enter(cgroup.path()).unwrap_err();
    }

    #[test]
    fn one_failure_is_logged_in_ten_seconds() {
        let directory = tempfile::tempdir().unwrap();
        let logged = directory.path().join("logged");
        assert!(may_log(&logged) && !may_log(&logged));
        let set = |time| File::open(&logged).unwrap().set_modified(time).unwrap();
        set(SystemTime::now() - LOG_PAUSE);
        assert!(may_log(&logged) && !may_log(&logged));
        set(SystemTime::now() + Duration::from_secs(3600));
        assert!(may_log(&logged));
    }

    #[test]
    fn a_file_that_is_no_module_is_refused_and_named() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join(INDEX), "module bad\nmodule absent\n").unwrap();
        fs::write(directory.path().join("bad.ko.xz"), "no module").unwrap();
        let error = load(directory.path(), "bad").unwrap_err();
        assert!(error.to_string().starts_with("cannot load the module bad: "), "{error}");
        let error = load(directory.path(), "absent").unwrap_err();
        assert!(error.to_string().contains("module absent: No such file"), "{error}");
        assert!(!load(directory.path(), "unknown").unwrap());
    }

    proptest! {
        #[test]
        fn any_request_and_index_have_an_answer(index in "(module|alias|[a*_ \n-]){0,60}", request in ".{0,70}") {
            for names in resolve(&index, &request) {
                prop_assert!(!names.is_empty());
            }
        }
    }
}
