//! The command line. The man pages and the completions are made from it.

use std::path::PathBuf;

use bulkhead_host_shim::operator::version_and_commit;
use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;

use crate::{
    config_file::ConfigFile, containerd::ContainerdConfig, exec::Options as ExecOptions,
    install::Options as InstallOptions, metrics::Endpoint, run::Options as RunOptions,
};

/// Shows, checks and removes what Bulkhead has on this host.
///
/// Bulkhead is a containerd runtime that puts every pod in a microVM. This command is for the operator of a node.
/// Containers are created with containerd's clients, such as ctr, docker and kubectl. `bulkhead run` runs a program
/// in a microVM without containerd.
///
/// Exit status: 0 if all went well, 1 if something failed or a check has failed, 2 if the command line is wrong.
/// `bulkhead run` and `bulkhead exec` have a status of their own.
#[derive(Debug, Parser)]
#[command(name = "bulkhead", version = version_and_commit())]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Checks whether this host can run pods, and says what to do where it cannot.
    ///
    /// Each line is ok, warn or fail. `fail` says that no pods can run, or no pods of docker, or none of Kubernetes.
    /// `warn` says that some pods do not run, or that something works less well or less securely. A missing runtime
    /// handler or CNI plugin is `warn` too: pods of Kubernetes need both, but ctr and docker need neither. The exit
    /// status is 1 if a line is `fail`.
    Check {
        #[command(flatten)]
        format: Format,
        #[command(flatten)]
        config: ConfigFile,
        #[command(flatten)]
        containerd: ContainerdConfig,
    },
    /// Lists the pods of this host, with their processes and the memory that they use.
    ///
    /// MEMORY is what the VMM and its guest use on this host. Pages that several pods share are divided among them.
    Ps {
        #[command(flatten)]
        format: Format,
    },
    /// Shows what the pods of this host use, again and again until you press Ctrl-C.
    ///
    /// CPU is the processor time of the VMM, in per cent of one processor. OOM KILLS are the processes that were killed
    /// because memory was short, by the guest's kernel in a container or by the host's. EXITS/s needs debugfs on the
    /// host. FILES/s are the requests of the guest for files. A pod that is not up does not answer, or its shim has
    /// died. - is not known, as UP of a pod that starts.
    Top {
        /// The seconds between two listings. What is shown was used in this time.
        #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = clap::value_parser!(u16).range(1..=3600))]
        every: u16,
        /// Shows the pods once, and ends.
        #[arg(long)]
        once: bool,
        #[command(flatten)]
        format: Format,
    },
    /// Prints or serves metrics of all pods of this host, for Prometheus.
    ///
    /// The text has Prometheus's text format. The page observability.md lists the metrics. It is in
    /// /usr/share/doc/bulkhead/docs/ or /usr/local/share/doc/bulkhead/docs/.
    Metrics {
        /// Serves the metrics by HTTP at this address until SIGTERM or SIGINT, with the path /metrics.
        ///
        /// It is ADDRESS:PORT or unix:/PATH. Whoever can connect can read the metrics. Only root can connect to the
        /// Unix socket. With port 0, the host's kernel chooses a free one. The line on standard output says what is
        /// used: "serving metrics at http://127.0.0.1:9659/metrics", or "serving metrics at unix:/PATH".
        #[arg(long, value_name = "ENDPOINT")]
        listen: Option<Endpoint>,
    },
    /// Prints the last lines of the shim, the VMM and the guest's console of a pod, which may have ended.
    ///
    /// Those of the shim and the VMM are in containerd's log. There is a console only with `console = true` in the
    /// configuration, and as long as the pod exists.
    Logs {
        /// The id of the pod.
        pod: String,
        /// The namespace of the pod, if there are several pods with this id.
        #[arg(long, short)]
        namespace: Option<String>,
        /// The unit of systemd in whose log containerd writes, for example docker.
        ///
        /// Without it, this is `containerd`. On k3s and RKE2 it is the file to which their containerd writes its log,
        /// or, if there is none, the log of their units.
        #[arg(long, value_name = "UNIT", conflicts_with = "containerd_config")]
        unit: Option<String>,
        #[command(flatten)]
        containerd: ContainerdConfig,
        /// The most lines of the log, and of the console.
        #[arg(long, value_name = "NUMBER", default_value = "100", value_parser = clap::value_parser!(u32).range(1..=100_000))]
        lines: u32,
    },
    /// Shows what happens to the pods of this host, one line for each event, until you press Ctrl-C.
    ///
    /// The shim of a pod records: pod_began, vm_up, container_created, container_started, container_failed (a container
    /// could not be created or started, and the cause), container_paused, container_resumed, oom_kill (the guest's
    /// kernel has killed processes of a container), container_exited, vm_ended (the VM has ended although the pod was
    /// not to end) and vm_killed (by the shim). This command sees by itself: pod_removed, and shim_died. `lost` says
    /// that events are missing, and why.
    ///
    /// There are no events of processes that exec adds, of the deletion of a container, of templates, and of what the
    /// out-of-memory killer of the host kills: bulkhead metrics counts that. The record of a pod ends with the pod.
    Events {
        /// The id of the pod. Without it, the events of all pods are shown.
        pod: Option<String>,
        /// Only pods of this namespace.
        #[arg(long, short)]
        namespace: Option<String>,
        /// First shows the events that were already recorded for existing pods.
        #[arg(long)]
        all: bool,
        /// Shows the recorded events of existing pods, and exits.
        #[arg(long, conflicts_with = "all")]
        once: bool,
        #[command(flatten)]
        format: Lines,
    },
    /// Shows what the guest of a pod writes to its console, until the pod ends.
    ///
    /// There is a console only with `console = true` in the configuration when the pod is created. The first 4 MiB are
    /// kept. Characters that would do something to the terminal are shown as spaces.
    Console {
        /// The id of the pod, which `bulkhead ps` shows.
        pod: String,
        /// The namespace of the pod, if there are several pods with this id.
        #[arg(long, short)]
        namespace: Option<String>,
    },
    /// Shows how long each phase of the start of a pod and of each of its containers took.
    ///
    /// WHERE is what does most of the work: the shim, the VMM or the agent in the guest.
    Trace {
        /// The id of the pod, which `bulkhead ps` shows.
        pod: String,
        /// The namespace of the pod, if there are several pods with this id.
        #[arg(long, short)]
        namespace: Option<String>,
        /// Writes the phases as spans of OpenTelemetry (OTLP, JSON) to this file, which must not exist yet.
        #[arg(long, value_name = "FILE", conflicts_with = "json")]
        otlp: Option<PathBuf>,
        #[command(flatten)]
        format: Format,
    },
    /// Runs a program in a microVM without containerd, for example a test.
    ///
    /// Standard input, output and error are the program's. SIGINT, SIGTERM and SIGHUP are passed on to it. A second
    /// signal kills it, if it comes at least one second after the first.
    ///
    /// Exit status: that of the program, 128 + N after signal N, 124 after --timeout, 125 if Bulkhead fails, 126 if
    /// the program cannot be executed, 127 if there is none.
    Run(Box<RunOptions>),
    /// Runs a program in a container that runs, even while containerd is down.
    ///
    /// The program has the environment, the user, the working directory and the privileges of the container's own
    /// program, where no option says otherwise. The shim of the pod is asked for it, so this works for the pods of
    /// `bulkhead run` too, but no client of containerd knows of the program: use kubectl, docker, crictl or ctr where
    /// you can. SIGINT, SIGTERM and SIGHUP are passed on to the program. A second signal kills it, if it comes at least
    /// one second after the first.
    ///
    /// Exit status: that of the program, 128 + N after signal N, 125 if Bulkhead fails, 126 if the program cannot be
    /// executed, 127 if there is none.
    Exec(ExecOptions),
    /// Removes what crashed shims and killed commands have left, and templates that no pod will use.
    ///
    /// Each shim that starts removes what crashed shims have left, and templates. Each `bulkhead run` removes what
    /// killed runs have left, and each `bulkhead exec` what killed execs have left. Nothing of a shim that lives is
    /// removed, and nothing that containerd will remove itself. Empty directories, whose commands or shims were killed
    /// before they had put anything there, are removed when they are a minute old. A shim whose `bulkhead run` was
    /// killed is ended, and so is the program of a `bulkhead exec` that was killed.
    Gc {
        /// Lists what would be removed, and removes nothing.
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        format: Format,
    },
    /// Lists, makes or removes templates: saved VMs, of which the VMs of pods are clones.
    #[command(subcommand)]
    Template(TemplateCommand),
    /// Shows the configuration.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Writes an archive for a support request: versions, configuration, checks, kernel messages, states of pods.
    ///
    /// It contains no environment and no arguments of the processes of containers, also of those that exec adds, no
    /// spec, and no file of a container. Of containerd's configuration it contains only the names of all handlers and
    /// of their runtimes. A line `missing` says what could not be found out, as when a program of the host hangs: each
    /// has 20 s.
    Collect {
        /// The tar archive that is written. It must not exist yet.
        #[arg(long, short, value_name = "FILE", default_value = "bulkhead-support.tar")]
        output: PathBuf,
        #[command(flatten)]
        config: ConfigFile,
        /// The unit of systemd in whose log containerd writes, as for `bulkhead logs`.
        #[arg(long, value_name = "UNIT", conflicts_with = "containerd_config")]
        unit: Option<String>,
        #[command(flatten)]
        containerd: ContainerdConfig,
    },
    /// Configures containerd on this node, so that pods can choose Bulkhead.
    ///
    /// Adds the handlers to containerd's configuration, and writes the manifest of a RuntimeClass and
    /// /etc/bulkhead/config.toml, in which all keys are comments. Says what it has done. A configuration that
    /// --containerd-config names must exist, and is recorded in /etc/bulkhead/containerd-config for the other commands.
    /// /etc/containerd/config.toml is made if it is missing. `bulkhead uninstall` undoes all this.
    Install(InstallOptions),
    /// Undoes what `bulkhead install` has done, and removes templates and counts.
    ///
    /// Takes the handlers out of the configuration that was recorded, and of /etc/containerd, k3s and RKE2, or only out
    /// of the one that is named. Removes the files in /etc/bulkhead that nobody has changed. It also removes all
    /// templates and the counts of failures, and disables and stops bulkhead-metrics.service. Running pods are not
    /// affected.
    Uninstall(InstallOptions),
    /// Prints the completions for a shell.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Writes the man pages, one for each command.
    // Hidden commands are suggested for misspelt ones too, so this name resembles no other.
    #[command(hide = true, name = "roff")]
    ManPages {
        /// The directory they are written to.
        directory: PathBuf,
    },
}

impl Command {
    /// Whether it shows something until nobody reads it any more.
    pub(crate) fn is_endless(&self) -> bool {
        matches!(self, Self::Top { .. } | Self::Events { .. } | Self::Console { .. })
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum TemplateCommand {
    /// Lists the templates, and how many pods are clones of each.
    Ls {
        #[command(flatten)]
        format: Format,
    },
    /// Makes the templates of this host, so that its first pods start as fast as the next ones.
    ///
    /// There is one for each shape of a VM: with `memory_mib` or with `unlimited_memory_mib`, and with all vCPUs online
    /// or with one. Those that are there are kept. Each takes as long as the boot of a VM, and about 50 MiB of /run, or
    /// 80 MiB if its VM begins with 2 GiB. Without this command the first pod of a shape makes its template. While one
    /// is made, `bulkhead ps` lists it in the namespace template-build.
    Build {
        #[command(flatten)]
        config: ConfigFile,
    },
    /// Removes templates. Pods that run are not affected. The next pod makes a new template.
    Rm {
        /// The names that `bulkhead template ls` shows.
        #[arg(required_unless_present = "all", conflicts_with = "all")]
        names: Vec<String>,
        /// Removes all templates, also those of other versions and those that were never completed, except for those
        /// that are being made.
        #[arg(long)]
        all: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Shows each value that is in force, and the file that it comes from.
    Show {
        #[command(flatten)]
        config: ConfigFile,
        #[command(flatten)]
        format: Format,
    },
}

#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Lines {
    /// Prints an object of JSON in each line.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Format {
    /// Prints JSON.
    #[arg(long)]
    pub(crate) json: bool,
}
