//! System call filters as classic BPF programs (kernel, userspace-api/seccomp_filter.rst).
//!
//! The kernel runs the program at each system call, on a `struct seccomp_data { int nr; u32 arch; u64
//! instruction_pointer; u64 args[6]; }`. Jumps go forward only. A conditional jump reaches at most 255 instructions. So
//! the program is built from its end: it is a tree of comparisons of the call's number, whose leaves return an action.
//!
//! seccompiler makes such programs too, but with one action for all calls that match. Several of its filters together
//! cannot express a profile with several actions, because the kernel takes the most severe of their results.

use crate::syscall::FilterInstruction;

/// The bits of SECCOMP_RET_* that are the action; the others are its data.
pub const ACTION: u32 = 0xffff_0000;
/// SECCOMP_RET_*: the thread ends.
pub const KILL_THREAD: u32 = 0;
/// SECCOMP_RET_*: the process ends.
pub const KILL_PROCESS: u32 = 0x8000_0000;
/// SECCOMP_RET_*: the thread gets SIGSYS.
pub const TRAP: u32 = 0x0003_0000;
/// SECCOMP_RET_*: the call returns the error number in the low 16 bits.
pub const ERRNO: u32 = 0x0005_0000;
/// SECCOMP_RET_*: a tracer is told, with the low 16 bits; without one the call returns ENOSYS.
pub const TRACE: u32 = 0x7ff0_0000;
/// SECCOMP_RET_*: the call is logged and made.
pub const LOG: u32 = 0x7ffc_0000;
/// SECCOMP_RET_*: the call is made.
pub const ALLOW: u32 = 0x7fff_0000;

// Operation codes (linux/filter.h). All but RETURN and JUMP work on the accumulator.
const LOAD: u16 = 0x20; // LD | W | ABS
const AND: u16 = 0x54; // ALU | AND | K
const JUMP: u16 = 0x05; // JMP | JA
const JUMP_EQUAL: u16 = 0x15; // JMP | JEQ | K
const JUMP_GREATER: u16 = 0x25; // JMP | JGT | K
const JUMP_AT_LEAST: u16 = 0x35; // JMP | JGE | K
const RETURN: u16 = 0x06; // RET | K

// Offsets in struct seccomp_data.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;

/// AUDIT_ARCH_X86_64 of linux/audit.h.
const X86_64: u32 = 0xc000_003e;

/// Whether a program lets a call of a 64-bit process through. Says no to a program that is none of this module's.
pub fn allows(program: &[FilterInstruction], number: i64, arguments: [u64; 6]) -> bool {
    let mut accumulator = 0_u32;
    let mut at = 0;
    while let Some(&FilterInstruction { code, jump_true, jump_false, constant }) = program.get(at) {
        at += 1;
        let skip = |holds: bool| usize::from(if holds { jump_true } else { jump_false });
        match code {
            LOAD => accumulator = loaded(number, arguments, constant),
            AND => accumulator &= constant,
            JUMP => at += constant as usize,
            JUMP_EQUAL => at += skip(accumulator == constant),
            JUMP_GREATER => at += skip(accumulator > constant),
            JUMP_AT_LEAST => at += skip(accumulator >= constant),
            RETURN => return [ALLOW, LOG].contains(&(constant & ACTION)),
            _ => break,
        }
    }
    false
}

/// The word at this offset of the call's `struct seccomp_data`; its instruction pointer is not known.
fn loaded(number: i64, arguments: [u64; 6], offset: u32) -> u32 {
    match offset {
        NUMBER => number as u32,
        ARCHITECTURE => X86_64,
        ARGUMENTS.. => {
            let argument = arguments.get((offset - ARGUMENTS) as usize / 8).copied().unwrap_or(0);
            if offset.is_multiple_of(8) { argument as u32 } else { (argument >> 32) as u32 }
        }
        _ => 0,
    }
}

/// What is done with the calls of one architecture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// AUDIT_ARCH_*.
    pub architecture: u32,
    /// Sorted; the first begins at 0, each ends where the next begins, and the last at the end of all numbers.
    pub spans: Vec<Span>,
}

/// What is done with the calls whose numbers are next to one another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// The lowest number.
    pub first: u32,
    /// The same for all of them.
    pub decision: Decision,
}

/// What is done with a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// SECCOMP_RET_*.
    Always(u32),
    /// The first rule decides all of whose conditions hold.
    ByArguments {
        /// In this order.
        rules: Vec<Rule>,
        /// SECCOMP_RET_* without such a rule.
        otherwise: u32,
    },
}

/// An action that depends on arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// At most one for each argument.
    pub conditions: Vec<Condition>,
    /// SECCOMP_RET_*.
    pub action: u32,
}

/// A comparison of an argument, as an unsigned number of 64 bits, with a constant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Condition {
    /// 0..=5.
    pub argument: u8,
    /// Between the argument and the value.
    pub relation: Relation,
    /// The constant.
    pub value: u64,
    /// Whether the relation must not hold.
    pub negated: bool,
}

/// The relations of which, with their negations, all others are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Relation {
    /// The bits of the mask are those of the value.
    Equal {
        /// All ones: the argument is the value.
        mask: u64,
    },
    /// The argument is greater than the value.
    Greater,
    /// The argument is the value or greater.
    AtLeast,
}

/// The program. A call of an architecture without a table ends its thread, as with libseccomp.
pub fn generate(tables: &[Table]) -> Vec<FilterInstruction> {
    let mut program = vec![returning(KILL_THREAD)];
    for table in tables.iter().rev() {
        let mut body = vec![load(NUMBER)];
        body.extend(tree(&table.spans));
        program = branch(JUMP_EQUAL, table.architecture, body, program);
    }
    program.insert(0, load(ARCHITECTURE));
    program
}

/// Finds the span of the number in the accumulator.
fn tree(spans: &[Span]) -> Vec<FilterInstruction> {
    match spans {
        // Not in a table. What nobody speaks of is not let through.
        [] => vec![returning(KILL_THREAD)],
        [span] => leaf(&span.decision),
        _ => {
            let (low, high) = spans.split_at(spans.len() / 2);
            branch(JUMP_AT_LEAST, high[0].first, tree(high), tree(low))
        }
    }
}

fn leaf(decision: &Decision) -> Vec<FilterInstruction> {
    match decision {
        Decision::Always(action) => vec![returning(*action)],
        Decision::ByArguments { rules, otherwise } => {
            let mut code: Vec<_> = rules.iter().flat_map(rule).collect();
            code.push(returning(*otherwise));
            code
        }
    }
}

/// Goes on behind its own end if a condition does not hold.
fn rule(rule: &Rule) -> Vec<FilterInstruction> {
    let mut code = vec![returning(rule.action)];
    for condition in rule.conditions.iter().rev() {
        // Six conditions of six instructions at most.
        let mut longer = test(condition, code.len() as u8);
        longer.append(&mut code);
        code = longer;
    }
    code
}

/// Goes on behind its own end if the condition holds, and `skip` instructions further if it does not. Compares the
/// halves of the argument, the high one first: the accumulator has 32 bits.
fn test(condition: &Condition, skip: u8) -> Vec<FilterInstruction> {
    let (yes, no) = if condition.negated { (skip, 0) } else { (0, skip) };
    let low = ARGUMENTS + 8 * u32::from(condition.argument);
    let high = low + 4;
    let half = |value: u64| (((value >> 32) as u32), value as u32);
    let (value_high, value_low) = half(condition.value);
    let greater = |code| {
        vec![
            load(high),
            jump(JUMP_GREATER, value_high, yes + 3, 0),
            jump(JUMP_EQUAL, value_high, 0, no + 2),
            load(low),
            jump(code, value_low, yes, no),
        ]
    };
    match condition.relation {
        Relation::Greater => greater(JUMP_GREATER),
        Relation::AtLeast => greater(JUMP_AT_LEAST),
        Relation::Equal { mask } => {
            let (mask_high, mask_low) = half(mask);
            let last = vec![load(low), and(mask_low), jump(JUMP_EQUAL, value_low & mask_low, yes, no)];
            let mut code = vec![load(high), and(mask_high)];
            code.push(jump(JUMP_EQUAL, value_high & mask_high, 0, no + last.len() as u8));
            code.extend(last);
            code
        }
    }
}

/// `then` if the comparison of the accumulator holds, or else `otherwise`; both return.
fn branch(
    code: u16,
    constant: u32,
    then: Vec<FilterInstruction>,
    otherwise: Vec<FilterInstruction>,
) -> Vec<FilterInstruction> {
    let mut program = match u8::try_from(otherwise.len()) {
        Ok(near) => vec![jump(code, constant, near, 0)],
        Err(_) => vec![
            jump(code, constant, 0, 1),
            FilterInstruction { code: JUMP, jump_true: 0, jump_false: 0, constant: otherwise.len() as u32 },
        ],
    };
    program.extend(otherwise);
    program.extend(then);
    program
}

fn load(offset: u32) -> FilterInstruction {
    FilterInstruction { code: LOAD, jump_true: 0, jump_false: 0, constant: offset }
}

fn and(mask: u32) -> FilterInstruction {
    FilterInstruction { code: AND, jump_true: 0, jump_false: 0, constant: mask }
}

fn jump(code: u16, constant: u32, jump_true: u8, jump_false: u8) -> FilterInstruction {
    FilterInstruction { code, jump_true, jump_false, constant }
}

fn returning(action: u32) -> FilterInstruction {
    FilterInstruction { code: RETURN, jump_true: 0, jump_false: 0, constant: action }
}

#[cfg(test)]
pub(crate) mod tests;
