//! The options of `bulkhead exec`.

use clap::Args;

/// The options, as they are written.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The id of the pod, which `bulkhead ps` shows.
    pub(crate) pod: String,
    /// The namespace of the pod, if there are several pods with this id.
    #[arg(long, short)]
    pub(crate) namespace: Option<String>,
    /// The container, by its id or by the name that Kubernetes has for it, if the pod has several.
    #[arg(long, short, value_name = "CONTAINER")]
    pub(crate) container: Option<String>,
    /// Gives the program a terminal, which is shown in this one.
    #[arg(long, short)]
    pub(crate) tty: bool,
    /// Gives the program the standard input of this command. Without it, it has none.
    #[arg(long, short)]
    pub(crate) interactive: bool,
    /// The user and the group, by name or by number. By default they are those of the container.
    #[arg(long, short, value_name = "USER[:GROUP]")]
    pub(crate) user: Option<String>,
    /// The program's working directory. By default it is that of the container.
    #[arg(long, short, value_name = "PATH")]
    pub(crate) workdir: Option<String>,
    /// Sets a variable of the environment. A NAME alone takes the value that the variable has here.
    #[arg(long, short, value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<String>,
    /// The program and its arguments.
    ///
    /// If the program's name begins with `-`, write it after `--`. Its arguments may begin with `-` in any case.
    #[arg(value_name = "COMMAND", trailing_var_arg = true, required = true)]
    pub(crate) command: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process;

    #[test]
    fn what_follows_two_dashes_is_the_programs() {
        let line = ["-it", "pod", "-c", "web", "--", "ls", "--user", "x", "--", "-t"];
        let options = process::options::<Options>(&line).unwrap();
        assert_eq!(options.command, ["ls", "--user", "x", "--", "-t"]);
        assert!(options.tty && options.interactive && options.user.is_none());
        assert_eq!((options.pod.as_str(), options.container.as_deref()), ("pod", Some("web")));
        let bare = process::options::<Options>(&["pod", "-c", "web", "ls", "-t", "--", "x"]).unwrap();
        assert_eq!((bare.command, bare.tty), (["ls", "-t", "--", "x"].map(String::from).into(), false));
        assert_eq!(bare.container.as_deref(), Some("web"));
        for wrong in [&["pod"][..], &["pod", "--"], &["--", "ls"], &["pod", "--usr", "x", "ls"]] {
            assert!(process::options::<Options>(wrong).is_err(), "{wrong:?}");
        }
    }
}
