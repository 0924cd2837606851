//! The fields of the spec that are not built yet, each refused by its name.

use oci_spec::runtime::{Hook, Linux};

use super::{
    config_json::{Process, Spec},
    error::SpecError,
};

const PROCESS_LABEL: &str = "process.selinuxLabel";
const MOUNT_LABEL: &str = "linux.mountLabel";

/// What to do about a label of SELinux.
const NO_LABELS: &str = "; the guest's kernel has no SELinux: set enable_selinux = false for containerd's CRI plugin, or \
                         give docker --security-opt label=disable";

/// A field by its name, and whether it is set.
type Field = (&'static str, bool);

/// Refuses the first field that is set and that the agent could not honour.
pub(super) fn check(spec: &Spec, process: &Process, linux: &Linux) -> Result<(), SpecError> {
    let of_spec = [
        ("hooks", has_hooks(spec)),
        ("solaris", spec.solaris.is_some()),
        ("windows", spec.windows.is_some()),
        ("vm", spec.vm.is_some()),
        ("zos", spec.zos.is_some()),
    ];
    let of_linux = [
        ("linux.netDevices", linux.net_devices().as_ref().is_some_and(|m| !m.is_empty())),
        (MOUNT_LABEL, is_filled(linux.mount_label())),
        ("linux.intelRdt", linux.intel_rdt().is_some()),
        ("linux.memoryPolicy", linux.memory_policy().is_some()),
    ];
    // Not here, although the agent does nothing with them: `annotations` and `linux.cgroupsPath`, which speak to the
    // shim.
    refuse_first(of_spec.into_iter().chain(of_process(process)).chain(of_linux))
}

/// As [`check`], of a process that joins a running container.
pub(super) fn check_exec(process: &Process) -> Result<(), SpecError> {
    refuse_first(of_process(process).into_iter())
}

fn of_process(process: &Process) -> [Field; 4] {
    [
        ("process.commandLine", is_filled(&process.command_line)),
        ("process.user.username", is_filled(process.user.username())),
        (PROCESS_LABEL, is_filled(&process.selinux_label)),
        // In a container's spec, too: there it is for the processes that join later (runtime-spec, config.md).
        ("process.execCPUAffinity", process.exec_cpu_affinity.is_some()),
    ]
}

fn refuse_first(mut fields: impl Iterator<Item = Field>) -> Result<(), SpecError> {
    match fields.find(|(_, is_set)| *is_set) {
        Some((field @ (PROCESS_LABEL | MOUNT_LABEL), _)) => {
            Err(SpecError::Unimplemented { field: field.into(), hint: NO_LABELS })
        }
        Some((field, _)) => Err(SpecError::unimplemented(field)),
        None => Ok(()),
    }
}

fn is_filled(value: &Option<String>) -> bool {
    value.as_ref().is_some_and(|value| !value.is_empty())
}

fn has_hooks(spec: &Spec) -> bool {
    let Some(hooks) = &spec.hooks else { return false };
    // `prestart` is deprecated in the runtime-spec, and yet must not be dropped in silence.
    #[allow(deprecated)]
    let prestart = hooks.prestart();
    let lists: [&Option<Vec<Hook>>; 6] = [
        prestart,
        hooks.create_runtime(),
        hooks.create_container(),
        hooks.start_container(),
        hooks.poststart(),
        hooks.poststop(),
    ];
    lists.iter().any(|list| list.as_ref().is_some_and(|hooks| !hooks.is_empty()))
}
