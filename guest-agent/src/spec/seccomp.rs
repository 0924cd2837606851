//! `linux.seccomp` (runtime-spec, "Seccomp"). Profiles rely on these rules of runc and libseccomp:
//!
//! - A name that no kernel we know of has is ignored.
//! - A rule with the default action is ignored. For one call, a rule without conditions wins over rules with
//!   conditions. Of two rules without conditions, the first wins. Of several rules with conditions, the first that
//!   matches wins. libseccomp tries those in an order of its own, so a profile cannot rely on the order.
//! - Conditions on different arguments must all hold. If one argument has two conditions, each of them is a rule of its
//!   own.
//! - A call that is newer than all calls in the profile fails with ENOSYS, as with an older kernel, unless the default
//!   action allows calls. So programs use an older call that the profile knows.

mod abi;

use std::collections::{BTreeMap, HashSet, btree_map::Entry};

use oci_spec::runtime::{
    Arch, LinuxSeccomp, LinuxSeccompAction, LinuxSeccompArg, LinuxSeccompFilterFlag, LinuxSeccompOperator,
    LinuxSyscall,
};

use self::abi::{Abi, Target};
use super::error::SpecError;
use crate::{
    seccomp_filter::{
        self, ACTION, ALLOW, Condition, Decision, ERRNO, KILL_PROCESS, KILL_THREAD, LOG, Relation, Rule,
        Span, TRACE, TRAP, Table,
    },
    stage_config::SeccompFilter,
};

/// The kernel's limit on a program (BPF_MAXINSNS).
const MAX_INSTRUCTIONS: usize = 4096;
/// The kernel's limit on error numbers (MAX_ERRNO).
const MAX_ERRNO: u32 = 4095;
/// The number of arguments of a system call.
const ARGUMENTS: usize = 6;

/// The first number of the x32 calls, which share an architecture with those of x86_64.
const X32: u32 = 0x4000_0000;
/// What a tracer makes of the number of a call that is not to be made.
const NO_CALL: u32 = u32::MAX;

const ENOSYS: u32 = ERRNO | libc::ENOSYS as u32;

/// What the profile says of one system call, apart from its default.
struct Statement<'a> {
    name: &'a str,
    action: u32,
    /// One set of conditions must hold. One that is empty does.
    alternatives: Vec<Vec<Condition>>,
}

/// The filter for the container's processes.
pub(super) fn resolve(profile: &LinuxSeccomp) -> Result<SeccompFilter, SpecError> {
    if profile.listener_path().as_ref().is_some_and(|path| !path.as_os_str().is_empty()) {
        return Err(SpecError::unimplemented("linux.seccomp.listenerPath"));
    }
    // runtime-spec: it must not be set without a listener.
    if profile.listener_metadata().as_ref().is_some_and(|text| !text.is_empty()) {
        let reason = "is set without a linux.seccomp.listenerPath".into();
        return Err(SpecError::invalid("linux.seccomp.listenerMetadata", reason));
    }
    let flags = flags(profile)?;
    let default = action("linux.seccomp", profile.default_action(), profile.default_errno_ret())?;
    let mut statements = Vec::new();
    for (index, entry) in profile.syscalls().iter().flatten().enumerate() {
        statements.extend(read(&format!("linux.seccomp.syscalls[{index}]"), entry)?);
    }
    let lists = |arch| profile.architectures().iter().flatten().any(|listed| *listed == arch);

    let mut native = table(Abi::X86_64, &statements, default);
    if native.spans.last().is_none_or(|span| span.decision != Decision::Always(ENOSYS)) {
        // The guest's kernel has no x32 and answers ENOSYS itself. What a profile does not list ends the thread.
        let x32 = if lists(Arch::ScmpArchX32) { ENOSYS } else { KILL_THREAD };
        native.spans.push(Span { first: X32, decision: Decision::Always(x32) });
        native.spans.push(Span { first: NO_CALL, decision: Decision::Always(default) });
    }
    let mut tables = vec![native];
    if lists(Arch::ScmpArchX86) {
        tables.push(table(Abi::X86, &statements, default));
    }
    let program = seccomp_filter::generate(&tables);
    if program.len() > MAX_INSTRUCTIONS {
        let reason = format!("takes {} instructions, and the kernel {MAX_INSTRUCTIONS}", program.len());
        return Err(SpecError::invalid("linux.seccomp", reason));
    }
    Ok(SeccompFilter { flags, program })
}

fn flags(profile: &LinuxSeccomp) -> Result<u64, SpecError> {
    use LinuxSeccompFilterFlag as Flag;
    const TSYNC: u64 = 1;
    const LOG: u64 = 2;
    const SPEC_ALLOW: u64 = 4;
    // As runc has it: a filter alone is no reason to switch speculation off.
    let Some(flags) = profile.flags() else { return Ok(SPEC_ALLOW) };
    flags.iter().try_fold(0, |bits, flag| match flag {
        Flag::SeccompFilterFlagTsync => Ok(bits | TSYNC),
        Flag::SeccompFilterFlagLog => Ok(bits | LOG),
        Flag::SeccompFilterFlagSpecAllow => Ok(bits | SPEC_ALLOW),
        // It speaks of SCMP_ACT_NOTIFY.
        Flag::SeccompFilterFlagWaitKillableRecv => {
            Err(SpecError::unimplemented(format!("linux.seccomp.flags: {flag}")))
        }
    })
}

/// SECCOMP_RET_*, with its data.
fn action(field: &str, action: LinuxSeccompAction, errno: Option<u32>) -> Result<u32, SpecError> {
    use LinuxSeccompAction as Action;
    let (action, limit) = match action {
        Action::ScmpActErrno => (ERRNO, MAX_ERRNO),
        Action::ScmpActTrace => (TRACE, u32::from(u16::MAX)),
        Action::ScmpActNotify => return Err(SpecError::unimplemented(format!("{field}: {action}"))),
        // runtime-spec: an errno for an action that takes none must be an error.
        _ if errno.is_some() => {
            return Err(SpecError::invalid(field, format!("{action} takes no errno")));
        }
        Action::ScmpActKill | Action::ScmpActKillThread => (KILL_THREAD, 0),
        Action::ScmpActKillProcess => (KILL_PROCESS, 0),
        Action::ScmpActTrap => (TRAP, 0),
        Action::ScmpActLog => (LOG, 0),
        Action::ScmpActAllow => (ALLOW, 0),
    };
    let data = if limit == 0 { 0 } else { errno.unwrap_or(libc::EPERM as u32) };
    if data > limit {
        return Err(SpecError::invalid(field, format!("errno {data} is above {limit}")));
    }
    Ok(action | data)
}

/// The statements of an entry of `syscalls`, one for each name.
fn read<'a>(field: &str, entry: &'a LinuxSyscall) -> Result<Vec<Statement<'a>>, SpecError> {
    if entry.names().is_empty() || entry.names().iter().any(String::is_empty) {
        return Err(SpecError::invalid(
            &format!("{field}.names"),
            "there must be a name in each place".into(),
        ));
    }
    let action = action(field, entry.action(), entry.errno_ret())?;
    let arguments = entry.args().as_deref().unwrap_or_default();
    let conditions =
        arguments.iter().map(|argument| condition(field, argument)).collect::<Result<Vec<_>, _>>()?;
    let mut seen = HashSet::new();
    let alternatives = if conditions.iter().all(|condition| seen.insert(condition.argument)) {
        vec![conditions]
    } else {
        conditions.into_iter().map(|condition| vec![condition]).collect()
    };
    let statement = |name| Statement { name, action, alternatives: alternatives.clone() };
    Ok(entry.names().iter().map(|name| statement(name.as_str())).collect())
}

fn condition(field: &str, argument: &LinuxSeccompArg) -> Result<Condition, SpecError> {
    use LinuxSeccompOperator as Operator;
    let index = u8::try_from(argument.index()).ok().filter(|index| usize::from(*index) < ARGUMENTS);
    let Some(index) = index else {
        let reason = format!("index {} is not within 0..={}", argument.index(), ARGUMENTS - 1);
        return Err(SpecError::invalid(&format!("{field}.args"), reason));
    };
    let equal = Relation::Equal { mask: u64::MAX };
    let (relation, negated) = match argument.op() {
        Operator::ScmpCmpEq => (equal, false),
        Operator::ScmpCmpNe => (equal, true),
        Operator::ScmpCmpGt => (Relation::Greater, false),
        Operator::ScmpCmpLe => (Relation::Greater, true),
        Operator::ScmpCmpGe => (Relation::AtLeast, false),
        Operator::ScmpCmpLt => (Relation::AtLeast, true),
        Operator::ScmpCmpMaskedEq => (Relation::Equal { mask: argument.value() }, false),
    };
    let value = match argument.op() {
        Operator::ScmpCmpMaskedEq => argument.value_two().unwrap_or(0),
        _ => argument.value(),
    };
    Ok(Condition { argument: index, relation, value, negated })
}

fn table(abi: Abi, statements: &[Statement<'_>], default: u32) -> Table {
    let mut decisions = BTreeMap::new();
    let mut newest = None;
    for statement in statements {
        for target in abi.targets(statement.name) {
            newest = newest.max(Some(target.number));
            if statement.action != default {
                state(&mut decisions, abi, target, statement, default);
            }
        }
    }
    let mut spans = vec![Span { first: 0, decision: Decision::Always(default) }];
    let mut put = |first, decision| {
        // One span in the place of two that begin at the same number or say the same.
        if spans.last().is_some_and(|span| span.first == first) {
            spans.pop();
        }
        if spans.last().is_none_or(|span| span.decision != decision) {
            spans.push(Span { first, decision });
        }
    };
    for (number, decision) in decisions {
        put(number, decision);
        put(number + 1, Decision::Always(default));
    }
    let lets_through = matches!(default & ACTION, ALLOW | LOG | TRACE);
    if let Some(newest) = newest.filter(|_| !lets_through) {
        put(newest + 1, Decision::Always(ENOSYS));
    }
    Table { architecture: abi.architecture(), spans }
}

/// Adds what a statement says of one number.
fn state(
    decisions: &mut BTreeMap<u32, Decision>,
    abi: Abi,
    target: Target,
    statement: &Statement<'_>,
    default: u32,
) {
    for conditions in &statement.alternatives {
        let conditions = match target.selector {
            Some(selector) => vec![selector],
            None => conditions.iter().map(|condition| abi.narrow(*condition)).collect(),
        };
        let unconditional = conditions.is_empty();
        let rule = Rule { conditions, action: statement.action };
        match decisions.entry(target.number) {
            Entry::Occupied(mut decision) => match decision.get_mut() {
                Decision::Always(_) => {}
                decision if unconditional => *decision = Decision::Always(statement.action),
                Decision::ByArguments { rules, .. } => rules.push(rule),
            },
            Entry::Vacant(place) if unconditional => drop(place.insert(Decision::Always(statement.action))),
            Entry::Vacant(place) => {
                place.insert(Decision::ByArguments { rules: vec![rule], otherwise: default });
            }
        }
    }
}

#[cfg(test)]
mod tests;
