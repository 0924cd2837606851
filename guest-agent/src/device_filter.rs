//! `linux.resources.devices` as a BPF program of the type BPF_PROG_TYPE_CGROUP_DEVICE.
//!
//! cgroup v2 has no device files: a program attached to the cgroup is asked at each open and mknod. It gets a
//! `struct bpf_cgroup_dev_ctx { u32 access_type, major, minor }`, in which access_type is `access << 16 | type`
//! (linux/bpf.h), and returns 1 to allow.

use std::fs;

use oci_spec::runtime::{LinuxDeviceCgroup, LinuxDeviceType};

use crate::syscall::BpfInstruction;

const TYPE_BLOCK: u32 = 1;
const TYPE_CHAR: u32 = 2;
const ACCESS_MKNOD: u32 = 1;
const ACCESS_READ: u32 = 2;
const ACCESS_WRITE: u32 = 4;
const ACCESS_ALL: u32 = ACCESS_MKNOD | ACCESS_READ | ACCESS_WRITE;

// Registers of the program.
const RESULT: u8 = 0;
const CONTEXT: u8 = 1;
const TYPE: u8 = 2;
const ACCESS: u8 = 3;
const MAJOR: u8 = 4;
const MINOR: u8 = 5;
/// The context's register is free once its three words are loaded.
const SCRATCH: u8 = CONTEXT;

// Operation codes (kernel, bpf/standardization/instruction-set.rst).
const LOAD_WORD: u8 = 0x61; // LDX | MEM | W
const MOVE_REGISTER: u8 = 0xbf; // ALU64 | MOV | X
const MOVE: u8 = 0xb7; // ALU64 | MOV | K
const AND: u8 = 0x57; // ALU64 | AND | K
const SHIFT_RIGHT: u8 = 0x77; // ALU64 | RSH | K
const JUMP_EQUAL: u8 = 0x15; // JMP | JEQ | K
const JUMP_NOT_EQUAL: u8 = 0x55; // JMP | JNE | K
const JUMP_NOT_EQUAL_REGISTER: u8 = 0x5d; // JMP | JNE | X
const EXIT: u8 = 0x95;

/// Why a rule is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("linux.resources.devices[{index}]: {reason}")]
pub struct RuleError {
    index: usize,
    reason: String,
}

/// One rule; None matches every number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rule {
    allow: bool,
    /// None: both block and character devices.
    kind: Option<u32>,
    major: Option<u32>,
    minor: Option<u32>,
    access: u32,
}

/// The program for the rules of the spec, followed by the devices that every container may use. What no rule speaks
/// of is denied.
///
/// A rule about all devices, which a privileged container has, does not speak of the host's disks, whose major number
/// is `disks`: the shim adds a rule for each one that the container gets. So a node that has the number of one by
/// accident, such as a node of the host in a volume, opens no disk of another container.
pub fn generate(rules: &[LinuxDeviceCgroup], disks: Option<u32>) -> Result<Vec<BpfInstruction>, RuleError> {
    let mut all = Vec::new();
    for (index, rule) in rules.iter().enumerate() {
        let rule = parse(rule).map_err(|reason| RuleError { index, reason })?;
        all.push(rule);
        if rule.allow && rule.major.is_none() && rule.kind != Some(TYPE_CHAR) {
            let of_disks = |major| Rule {
                allow: false,
                kind: Some(TYPE_BLOCK),
                major: Some(major),
                minor: None,
                access: ACCESS_READ | ACCESS_WRITE,
            };
            all.extend(disks.map(of_disks));
        }
    }
    all.extend(default_rules());
    Ok(assemble(&all))
}

/// The major number of the disks that the VMM attaches. None: the kernel has no driver for any.
pub fn disks() -> Option<u32> {
    const DRIVER: &str = "virtblk";
    let drivers = fs::read_to_string("/proc/devices").unwrap_or_default();
    number_of(&drivers, DRIVER)
}

/// The major number of a driver of block devices, which is unlike those of character devices (proc_devices(5)).
fn number_of(drivers: &str, name: &str) -> Option<u32> {
    let (_, blocks) = drivers.split_once("Block devices:")?;
    blocks
        .lines()
        .filter_map(|line| line.trim().split_once(' '))
        .find(|(_, driver)| *driver == name)?
        .0
        .parse()
        .ok()
}

/// Every node may be made; the default devices of the runtime-spec, pseudo-terminals among them, may be used.
fn default_rules() -> Vec<Rule> {
    let rule = |kind, major, minor, access| Rule { allow: true, kind: Some(kind), major, minor, access };
    let mut rules = vec![
        rule(TYPE_CHAR, None, None, ACCESS_MKNOD),
        rule(TYPE_BLOCK, None, None, ACCESS_MKNOD),
        rule(TYPE_CHAR, Some(136), None, ACCESS_ALL),
    ];
    // null, zero, full, random, urandom; tty, console, ptmx.
    let default = [(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2)];
    rules.extend(default.map(|(major, minor)| rule(TYPE_CHAR, Some(major), Some(minor), ACCESS_ALL)));
    rules
}

fn parse(rule: &LinuxDeviceCgroup) -> Result<Rule, String> {
    let kind = match rule.typ().unwrap_or_default() {
        LinuxDeviceType::A => None,
        LinuxDeviceType::B => Some(TYPE_BLOCK),
        LinuxDeviceType::C | LinuxDeviceType::U => Some(TYPE_CHAR),
        LinuxDeviceType::P => return Err("type \"p\" is no device".into()),
    };
    let number = |name: &str, value: Option<i64>, bits: u32| match value {
        // -1 is how the kernel's numbers and Go say "all".
        None | Some(-1) => Ok(None),
        Some(n) => match u32::try_from(n) {
            Ok(n) if n >> bits == 0 => Ok(Some(n)),
            _ => Err(format!("{name} {n} is not within {bits} bits")),
        },
    };
    let mut access = 0;
    for letter in rule.access().as_deref().unwrap_or_default().chars() {
        access |= match letter {
            'm' => ACCESS_MKNOD,
            'r' => ACCESS_READ,
            'w' => ACCESS_WRITE,
            other => return Err(format!("access {other:?} is none of r, w, m")),
        };
    }
    // A rule without access means all of it: so does the usual "deny everything".
    let access = if access == 0 { ACCESS_ALL } else { access };
    let (major, minor) = (number("major", rule.major(), 12)?, number("minor", rule.minor(), 20)?);
    Ok(Rule { allow: rule.allow(), kind, major, minor, access })
}

/// The last rule that matches decides, hence the reverse order.
fn assemble(rules: &[Rule]) -> Vec<BpfInstruction> {
    let mut program = vec![
        instruction(LOAD_WORD, TYPE, CONTEXT, 0, 0),
        instruction(MOVE_REGISTER, ACCESS, TYPE, 0, 0),
        instruction(AND, TYPE, 0, 0, 0xffff),
        instruction(SHIFT_RIGHT, ACCESS, 0, 0, 16),
        instruction(LOAD_WORD, MAJOR, CONTEXT, 4, 0),
        instruction(LOAD_WORD, MINOR, CONTEXT, 8, 0),
    ];
    for rule in rules.iter().rev() {
        program.extend(assemble_rule(rule));
        let matches_all = rule.kind.is_none() && rule.major.is_none() && rule.minor.is_none();
        if matches_all && rule.access == ACCESS_ALL {
            // The verifier refuses instructions that cannot be reached.
            return program;
        }
    }
    program.extend(answer(false));
    program
}

fn assemble_rule(rule: &Rule) -> Vec<BpfInstruction> {
    let mut body = Vec::new();
    if let Some(kind) = rule.kind {
        body.push(instruction(JUMP_NOT_EQUAL, TYPE, 0, 0, kind as i32));
    }
    if rule.access != ACCESS_ALL {
        body.push(instruction(MOVE_REGISTER, SCRATCH, ACCESS, 0, 0));
        body.push(instruction(AND, SCRATCH, 0, 0, rule.access as i32));
        body.push(if rule.allow {
            // All that is asked for must be in the rule to be allowed by it...
            instruction(JUMP_NOT_EQUAL_REGISTER, SCRATCH, ACCESS, 0, 0)
        } else {
            // ... and anything in it is denied by it.
            instruction(JUMP_EQUAL, SCRATCH, 0, 0, 0)
        });
    }
    for (register, number) in [(MAJOR, rule.major), (MINOR, rule.minor)] {
        if let Some(number) = number {
            body.push(instruction(JUMP_NOT_EQUAL, register, 0, 0, number as i32));
        }
    }
    body.extend(answer(rule.allow));
    // Every jump goes behind the rule; an offset counts from the instruction after the jump.
    let length = body.len();
    for (at, instruction) in body.iter_mut().enumerate() {
        if matches!(instruction.code, JUMP_EQUAL | JUMP_NOT_EQUAL | JUMP_NOT_EQUAL_REGISTER) {
            instruction.offset = (length - at - 1) as i16;
        }
    }
    body
}

fn answer(allow: bool) -> [BpfInstruction; 2] {
    [instruction(MOVE, RESULT, 0, 0, i32::from(allow)), instruction(EXIT, 0, 0, 0, 0)]
}

fn instruction(code: u8, destination: u8, source: u8, offset: i16, immediate: i32) -> BpfInstruction {
    BpfInstruction { code, registers: source << 4 | destination, offset, immediate }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Interprets the few instructions that programs here consist of.
    fn run(program: &[BpfInstruction], kind: u32, access: u32, major: u32, minor: u32) -> bool {
        let mut r = [0_u64; 6];
        let mut at = 0;
        loop {
            let i = program[at];
            let (d, s) = (usize::from(i.registers & 0xf), usize::from(i.registers >> 4));
            at += 1;
            let jump = match i.code {
                LOAD_WORD => {
                    assert_eq!(s, usize::from(CONTEXT));
                    r[d] = u64::from([access << 16 | kind, major, minor][i.offset as usize / 4]);
                    false
                }
                MOVE_REGISTER => (r[d] = r[s], false).1,
                MOVE => (r[d] = i.immediate as u64, false).1,
                AND => (r[d] &= i.immediate as u64, false).1,
                SHIFT_RIGHT => (r[d] >>= i.immediate, false).1,
                JUMP_EQUAL => r[d] == i.immediate as u64,
                JUMP_NOT_EQUAL => r[d] != i.immediate as u64,
                JUMP_NOT_EQUAL_REGISTER => r[d] != r[s],
                EXIT => return r[0] == 1,
                code => panic!("operation {code:#x}"),
            };
            if jump {
                at += i.offset as usize;
            }
        }
    }

    fn program(json: serde_json::Value) -> Vec<BpfInstruction> {
        generate(&serde_json::from_value::<Vec<LinuxDeviceCgroup>>(json).unwrap(), Some(254)).unwrap()
    }

    #[test]
    fn deny_all_leaves_the_default_devices() {
        let program = program(serde_json::json!([{"allow": false, "access": "rwm"}]));
        assert!(run(&program, TYPE_CHAR, ACCESS_READ | ACCESS_WRITE, 1, 3));
        assert!(run(&program, TYPE_CHAR, ACCESS_READ, 136, 5));
        assert!(run(&program, TYPE_BLOCK, ACCESS_MKNOD, 8, 0));
        assert!(!run(&program, TYPE_BLOCK, ACCESS_READ, 8, 0));
        assert!(!run(&program, TYPE_CHAR, ACCESS_WRITE, 1, 1));
        assert!(!run(&program, TYPE_BLOCK, ACCESS_READ, 1, 3));
    }

    #[test]
    fn without_rules_the_rest_is_denied() {
        let program = program(serde_json::json!([]));
        assert!(!run(&program, TYPE_CHAR, ACCESS_READ, 10, 200));
    }

    #[test]
    fn allow_all_allows_all() {
        let program = program(serde_json::json!([{"allow": true, "type": "a", "access": "rwm"}]));
        assert!(run(&program, TYPE_BLOCK, ACCESS_ALL, 8, 1));
    }

    #[test]
    fn a_disk_needs_a_rule_of_its_own() {
        let mut disk = serde_json::json!({"type": "b", "major": 254, "minor": 16, "access": "rwm"});
        let mut disk = |allow: bool| {
            disk["allow"] = allow.into();
            disk.clone()
        };
        for all in [
            serde_json::json!([{"allow": true, "access": "rwm"}]),
            serde_json::json!([{"allow": false, "access": "rwm"}, {"allow": true, "type": "b", "access": "rw"}]),
        ] {
            let without = program(all.clone());
            assert!(run(&without, TYPE_BLOCK, ACCESS_READ | ACCESS_WRITE, 253, 0));
            assert!(run(&without, TYPE_BLOCK, ACCESS_MKNOD, 254, 0));
            for access in [ACCESS_READ, ACCESS_WRITE, ACCESS_READ | ACCESS_WRITE] {
                assert!(!run(&without, TYPE_BLOCK, access, 254, 16));
            }
            let mut rules = all.as_array().unwrap().clone();
            rules.extend([disk(false), disk(true)]);
            let with = program(rules.into());
            assert!(run(&with, TYPE_BLOCK, ACCESS_READ | ACCESS_WRITE, 254, 16));
            assert!(!run(&with, TYPE_BLOCK, ACCESS_READ, 254, 0));
        }
    }

    #[test]
    fn drivers_are_found_by_their_names() {
        let drivers =
            "Character devices:\n  1 mem\n254 virtblk\n\nBlock devices:\n  7 loop\n253 virtblk\n259 blkext\n";
        assert_eq!((number_of(drivers, "virtblk"), number_of(drivers, "loop")), (Some(253), Some(7)));
        assert_eq!((number_of(drivers, "mem"), number_of("", "loop")), (None, None));
    }

    #[test]
    fn the_last_match_decides_and_access_counts() {
        let program = program(serde_json::json!([
            {"allow": true, "type": "b", "major": 8, "access": "r"},
            {"allow": true, "type": "c", "major": 10, "minor": 200, "access": "rwm"},
            {"allow": false, "type": "c", "major": 10, "minor": 200, "access": "w"}
        ]));
        assert!(run(&program, TYPE_BLOCK, ACCESS_READ, 8, 3));
        assert!(!run(&program, TYPE_BLOCK, ACCESS_READ | ACCESS_WRITE, 8, 3));
        assert!(run(&program, TYPE_CHAR, ACCESS_READ, 10, 200));
        assert!(!run(&program, TYPE_CHAR, ACCESS_READ | ACCESS_WRITE, 10, 200));
        assert!(!run(&program, TYPE_CHAR, ACCESS_READ, 10, 201));
    }

    #[test]
    fn a_wrong_rule_is_refused() {
        let rules: Vec<LinuxDeviceCgroup> =
            serde_json::from_value(serde_json::json!([{"allow": true}, {"allow": true, "access": "x"}]))
                .unwrap();
        let error = generate(&rules, None).unwrap_err().to_string();
        assert_eq!(error, "linux.resources.devices[1]: access 'x' is none of r, w, m");
    }

    #[test]
    fn numbers_that_no_device_can_have_are_refused() {
        let of = |json: serde_json::Value| {
            generate(&serde_json::from_value::<Vec<LinuxDeviceCgroup>>(json).unwrap(), None)
                .map_err(|e| e.to_string())
        };
        for (numbers, expected) in [
            (serde_json::json!({"major": 4096}), "major 4096 is not within 12 bits"),
            (serde_json::json!({"minor": 1 << 20}), "minor 1048576 is not within 20 bits"),
            (serde_json::json!({"major": -2}), "major -2 is not within 12 bits"),
            (serde_json::json!({"minor": i64::MAX}), "is not within 20 bits"),
        ] {
            let mut rule = numbers;
            rule["allow"] = true.into();
            assert!(of(serde_json::json!([rule])).unwrap_err().contains(expected));
        }
        of(serde_json::json!([{"allow": true, "type": "c", "major": 4095, "minor": (1 << 20) - 1}])).unwrap();
        of(serde_json::json!([{"allow": true, "major": -1, "minor": -1}])).unwrap();
    }
}
