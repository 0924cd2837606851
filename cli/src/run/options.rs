//! The options of `bulkhead run`.

use std::{path::PathBuf, time::Duration};

use clap::{ArgGroup, Args, ValueEnum};

/// The least SIZE. Nothing runs with less, and whoever writes less has forgotten the unit.
const LEAST_SIZE: u64 = 1 << 20;

/// The options, as they are written.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("root").required(true)))]
pub(crate) struct Options {
    /// The program's root is this directory, which is not changed. `/` is the host's own root.
    ///
    /// What the program writes is kept in memory and dropped at the end (see --scratch). Other file systems that are
    /// mounted below the directory are not part of it. Name them with --volume.
    #[arg(long, value_name = "DIR", group = "root")]
    pub(crate) rootfs: Option<PathBuf>,
    /// The program's root is this archive: a .tar or a .tar.gz.
    ///
    /// It is unpacked into memory for each run (see --scratch).
    #[arg(long, value_name = "FILE", group = "root")]
    pub(crate) archive: Option<PathBuf>,
    /// The program's root is this image: an OCI image layout, as a directory or a .tar, or what `docker save` writes.
    ///
    /// It pulls nothing from a registry. The image is unpacked into memory for each run (see --scratch). Entrypoint,
    /// command, environment, working directory and user are those of the image, where no option says otherwise.
    #[arg(long, value_name = "FILE", group = "root")]
    pub(crate) image: Option<PathBuf>,
    /// The most that the root takes in memory: what the program writes to it, and an image or an archive.
    ///
    /// A number without a unit is bytes. k, m and g are powers of 1024.
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = size)]
    pub(crate) scratch: u64,
    /// The memory that the program may use, such as 512M or 2G. By default there is no limit of its own.
    ///
    /// A number without a unit is bytes. k, m and g are powers of 1024.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) memory: Option<u64>,
    /// The processors that the program may use, such as 2 or 0.5. By default it may use all of them.
    #[arg(long, value_name = "NUMBER", value_parser = processors)]
    pub(crate) cpus: Option<f64>,
    /// Sets a variable of the environment. A NAME alone takes the value that the variable has here.
    #[arg(long, short, value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<String>,
    /// Gives the program the whole environment of this command, but for variables that are not UTF-8.
    #[arg(long)]
    pub(crate) env_all: bool,
    /// Shows a file or a directory of the host at a path of the program. With `:ro`, the program cannot change it.
    #[arg(long, short, value_name = "HOST:PATH[:ro]", value_parser = volume)]
    pub(crate) volume: Vec<Volume>,
    /// The program's working directory. By default it is that of the image or `/`, with `--rootfs /` that of this
    /// command.
    #[arg(long, short, value_name = "PATH")]
    pub(crate) workdir: Option<String>,
    /// The user and the group, by name or by number. By default the user is that of the image, or root.
    #[arg(long, short, value_name = "USER[:GROUP]")]
    pub(crate) user: Option<String>,
    /// The network of the program: `none` (a loopback interface only) or `nat` (it reaches what the host reaches).
    ///
    /// With `nat`, pasta of the package passt makes the IPv4 connections for the program, as a program of the host.
    /// Services that listen on the host's loopback interface only are not reached, but for the host's resolver. Nothing
    /// can connect to the program.
    #[arg(long, value_enum, default_value_t = Network::None)]
    pub(crate) network: Network,
    /// Ends the run after this time, such as 90, 90s, 5m or 1h. The exit status is then 124.
    ///
    /// The time begins with this command: it includes the unpacking of an image and the start of the VM.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) timeout: Option<Duration>,
    /// A kernel for the VM instead of the one that the configuration names: an uncompressed ELF file.
    #[arg(long, value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,
    /// Writes the result to this file, as JUnit's XML: one test case.
    #[arg(long, value_name = "FILE")]
    pub(crate) junit: Option<PathBuf>,
    /// Gives the program a terminal, which is this one.
    #[arg(long, short)]
    pub(crate) tty: bool,
    /// The program and its arguments. With --image, they are added to its entrypoint and replace its command.
    ///
    /// If the program's name begins with `-`, write it after `--`. Its arguments may begin with `-` in any case.
    #[arg(value_name = "PROGRAM", trailing_var_arg = true, required_unless_present = "image")]
    pub(crate) command: Vec<String>,
}

/// A value of --network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Network {
    None,
    Nat,
}

/// A value of --volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Volume {
    /// On the host, absolute.
    pub(crate) source: PathBuf,
    /// In the root of the program.
    pub(crate) destination: String,
    pub(crate) read_only: bool,
}

fn volume(text: &str) -> Result<Volume, String> {
    let parts: Vec<_> = text.split(':').collect();
    let (source, destination, read_only) = match parts[..] {
        [source, destination] | [source, destination, "rw"] => (source, destination, false),
        [source, destination, "ro"] => (source, destination, true),
        _ => return Err("it is written HOST:PATH or HOST:PATH:ro".into()),
    };
    if !destination.starts_with('/') {
        return Err(format!("the path {destination:?} of the program is not absolute"));
    }
    // A path that cannot be looked at is named in the error.
    let source = std::fs::canonicalize(source).map_err(|error| format!("{source}: {error}"))?;
    if source.to_str().is_none() {
        return Err(format!("the path {} is not UTF-8", source.display()));
    }
    Ok(Volume { source, destination: destination.into(), read_only })
}

fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "ki" | "kb" | "kib" => 10,
        "m" | "mi" | "mb" | "mib" => 20,
        "g" | "gi" | "gb" | "gib" => 30,
        _ => return Err("the units are k, m and g".into()),
    };
    let number: u64 = digits.parse().map_err(|_| "it is a number and a unit, such as 512M".to_owned())?;
    let bytes = number.checked_mul(1 << unit).filter(|bytes| *bytes <= i64::MAX.unsigned_abs());
    match bytes {
        Some(bytes @ 1..LEAST_SIZE) => Err(format!("it is {bytes} bytes; did you mean {number}M?")),
        Some(bytes) if bytes > 0 => Ok(bytes),
        _ => Err("it is out of range".into()),
    }
}

fn processors(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| "it is a number, such as 2 or 0.5".to_owned())?;
    // The kernel takes no quota below 1 ms, which is a hundredth of the period.
    match (0.01..=1024.0).contains(&number) {
        true => Ok(number),
        false => Err("0.01 to 1024 are possible".into()),
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let seconds = match &text[digits.len()..] {
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        _ => return Err("the units are s, m, h and d".into()),
    };
    let number: f64 = digits.parse().map_err(|_| "it is a number and a unit, such as 90s".to_owned())?;
    match Duration::try_from_secs_f64(number * seconds) {
        Ok(time) if !time.is_zero() && time <= Duration::from_secs(365 * 86_400) => Ok(time),
        _ => Err("it must be more than 0 and at most 365 days".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process;

    #[test]
    fn sizes_have_units_and_a_range() {
        assert_eq!(size("512M"), Ok(512 << 20));
        assert_eq!((size("1048576"), size("2GiB"), size("2048k")), (Ok(1 << 20), Ok(2 << 30), Ok(2 << 20)));
        assert_eq!(["1024Ki", "1Mi", "1Gi"].map(size), [Ok(1 << 20), Ok(1 << 20), Ok(1 << 30)]);
        assert_eq!(size("512"), Err("it is 512 bytes; did you mean 512M?".into()));
        assert_eq!(size("7k"), Err("it is 7168 bytes; did you mean 7M?".into()));
        for wrong in ["", "M", "0", "-1M", "1.5G", "1T", "99999999999G", "1é"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_option_that_does_not_exist_is_no_program() {
        let options = |words: &[&str]| process::options::<Options>(words);
        for (words, unknown) in [
            (&["--rootfs", "/", "--memroy", "512M", "--", "true"][..], "'--memroy'"),
            (&["--rootfs", "/", "-it", "--", "sh"], "'-i'"),
            (&["--rootfs", "/", "--name", "x", "--", "sh"], "'--name'"),
            (&["--rm", "--rootfs", "/", "--", "sh"], "'--rm'"),
        ] {
            let error = options(words).unwrap_err().to_string();
            assert!(error.starts_with(&format!("error: unexpected argument {unknown} found")), "{error}");
        }
        let runner =
            options(&["--rootfs", "/", "target/test", "--nocapture", "--", "-t", "--memory"]).unwrap();
        assert_eq!(runner.command, ["target/test", "--nocapture", "--", "-t", "--memory"]);
        let dashed = options(&["--rootfs", "/", "--", "-program", "-t"]).unwrap();
        assert_eq!((dashed.command.len(), dashed.tty), (2, false));
    }

    #[test]
    fn times_have_units_and_a_range() {
        assert_eq!(duration("90"), Ok(Duration::from_secs(90)));
        assert_eq!((duration("1.5m"), duration("1h")), (duration("90s"), Ok(Duration::from_secs(3600))));
        for wrong in ["", "0", "-1", "5x", "nan", "inf", "400d", "s"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn processors_are_more_than_none() {
        assert_eq!(processors("0.5"), Ok(0.5));
        for wrong in ["0", "-1", "nan", "inf", "2000", "two"] {
            assert!(processors(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_volume_exists_and_has_a_place() {
        let read_only = volume("/usr/../usr:/data:ro").unwrap();
        assert_eq!(read_only, Volume { source: "/usr".into(), destination: "/data".into(), read_only: true });
        assert!(!volume("/usr:/data").unwrap().read_only);
        assert!(volume("/no/such:/data").unwrap_err().starts_with("/no/such: "));
        for wrong in ["/usr", "/usr:data", "/usr:/data:rx", "/usr:/a:ro:ro"] {
            assert!(volume(wrong).is_err(), "{wrong}");
        }
    }
}
