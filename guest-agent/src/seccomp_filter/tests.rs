use proptest::{prelude::*, sample::select};

use super::*;

/// `struct seccomp_data`, without the instruction pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) architecture: u32,
    pub(crate) number: u32,
    pub(crate) arguments: [u64; 6],
}

/// Runs a program as the kernel would, and as strictly as its checker: the accumulator only, forward jumps only, no
/// end without a return.
pub(crate) fn run(program: &[FilterInstruction], call: Call) -> u32 {
    let mut accumulator = 0;
    let mut at = 0;
    loop {
        let FilterInstruction { code, jump_true, jump_false, constant } = program[at];
        at += 1;
        let mut jump_if = |condition: bool| at += usize::from(if condition { jump_true } else { jump_false });
        match code {
            LOAD => accumulator = word(call, constant),
            AND => accumulator &= constant,
            JUMP => at += constant as usize,
            JUMP_EQUAL => jump_if(accumulator == constant),
            JUMP_GREATER => jump_if(accumulator > constant),
            JUMP_AT_LEAST => jump_if(accumulator >= constant),
            RETURN => return constant,
            other => panic!("operation {other:#x}"),
        }
    }
}

fn word(call: Call, offset: u32) -> u32 {
    match offset {
        NUMBER => call.number,
        ARCHITECTURE => call.architecture,
        _ => {
            let argument = call.arguments[(offset - ARGUMENTS) as usize / 8];
            if offset.is_multiple_of(8) { argument as u32 } else { (argument >> 32) as u32 }
        }
    }
}

fn holds(condition: &Condition, arguments: [u64; 6]) -> bool {
    let argument = arguments[usize::from(condition.argument)];
    let holds = match condition.relation {
        Relation::Equal { mask } => argument & mask == condition.value & mask,
        Relation::Greater => argument > condition.value,
        Relation::AtLeast => argument >= condition.value,
    };
    holds != condition.negated
}

/// What a table says of a call, without a program.
fn looked_up(tables: &[Table], call: Call) -> u32 {
    let Some(table) = tables.iter().find(|table| table.architecture == call.architecture) else {
        return KILL_THREAD;
    };
    match &table.spans.iter().rfind(|span| span.first <= call.number).unwrap().decision {
        Decision::Always(action) => *action,
        Decision::ByArguments { rules, otherwise } => rules
            .iter()
            .find(|rule| rule.conditions.iter().all(|condition| holds(condition, call.arguments)))
            .map_or(*otherwise, |rule| rule.action),
    }
}

/// Numbers that are near to each other and to what splits into halves, so that comparisons hold and fail.
fn value() -> impl Strategy<Value = u64> {
    let near = select(vec![0, 1, 40, 0xffff_ffff, 1 << 32, (1 << 32) + 40, 1 << 63, u64::MAX]);
    prop_oneof![
        near.clone(),
        (near, -1..=1_i64).prop_map(|(value, step)| value.wrapping_add_signed(step)),
        any::<u64>()
    ]
}

fn condition(argument: u8) -> impl Strategy<Value = Condition> {
    let relation = prop_oneof![
        Just(Relation::Equal { mask: u64::MAX }),
        value().prop_map(|mask| Relation::Equal { mask }),
        Just(Relation::Greater),
        Just(Relation::AtLeast),
    ];
    (relation, value(), any::<bool>()).prop_map(move |(relation, value, negated)| Condition {
        argument,
        relation,
        value,
        negated,
    })
}

/// Any, and often one that lets a call through.
fn action() -> impl Strategy<Value = u32> {
    prop_oneof![any::<u32>(), select(vec![ALLOW, LOG, ERRNO])]
}

fn rule_strategy() -> impl Strategy<Value = Rule> {
    let conditions = prop::sample::subsequence(vec![0, 1, 2, 3, 4, 5], 0..=6)
        .prop_flat_map(|arguments| arguments.into_iter().map(condition).collect::<Vec<_>>());
    (conditions, action()).prop_map(|(conditions, action)| Rule { conditions, action })
}

fn decision() -> impl Strategy<Value = Decision> {
    let by_arguments = (prop::collection::vec(rule_strategy(), 0..4), action())
        .prop_map(|(rules, otherwise)| Decision::ByArguments { rules, otherwise });
    prop_oneof![2 => action().prop_map(Decision::Always), 1 => by_arguments]
}

fn table(architecture: u32) -> impl Strategy<Value = Table> {
    let later = prop::collection::btree_map(1..1000_u32, decision(), 0..120);
    (decision(), later).prop_map(move |(at_zero, later)| {
        let spans = std::iter::once((0, at_zero)).chain(later);
        Table { architecture, spans: spans.map(|(first, decision)| Span { first, decision }).collect() }
    })
}

proptest! {
    // Of 64 calls each.
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_program_says_what_the_tables_say(
        tables in (table(7), table(8)),
        calls in prop::collection::vec(
            (7..10_u32, prop_oneof![0..1100_u32, any::<u32>()], prop::array::uniform6(value())),
            64,
        ),
    ) {
        let tables = [tables.0, tables.1];
        let program = generate(&tables);
        for (architecture, number, arguments) in calls {
            let call = Call { architecture, number, arguments };
            prop_assert_eq!(run(&program, call), looked_up(&tables, call), "{:?}", call);
        }
    }

    #[test]
    fn a_call_is_allowed_if_the_program_lets_it_through(
        table in table(X86_64),
        calls in prop::collection::vec((0..1100_u32, prop::array::uniform6(value())), 64),
    ) {
        let program = generate(&[table]);
        for (number, arguments) in calls {
            let action = run(&program, Call { architecture: X86_64, number, arguments }) & ACTION;
            let expected = action == ALLOW || action == LOG;
            prop_assert_eq!(allows(&program, number.into(), arguments), expected, "{} {:?}", number, arguments);
        }
    }

    #[test]
    fn one_condition_decides_as_its_comparison(condition in condition(3), argument in value()) {
        let rules = vec![Rule { conditions: vec![condition], action: ALLOW }];
        let spans = vec![Span { first: 0, decision: Decision::ByArguments { rules, otherwise: TRAP } }];
        let call = Call { architecture: 1, number: 5, arguments: [9, 9, 9, argument, 9, 9] };
        let expected = if holds(&condition, call.arguments) { ALLOW } else { TRAP };
        prop_assert_eq!(run(&generate(&[Table { architecture: 1, spans }]), call), expected);
    }
}

#[test]
fn a_call_costs_few_instructions() {
    // Every other number: the most spans that there can be.
    let spans = (0..900).map(|first| Span { first, decision: Decision::Always(first % 2) }).collect();
    let program = generate(&[Table { architecture: 1, spans }]);
    // One comparison and one return for each span, and a jump for those that are far.
    assert!(program.len() < 2 * 900 + 20, "{}", program.len());
}
