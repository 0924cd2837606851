use proptest::{prelude::*, sample::select};
use serde_json::{Value, json};

use super::*;
use crate::seccomp_filter::tests::{Call, run};

const X86_64: u32 = 0xc000_003e;
const X86: u32 = 0x4000_0003;
const ARM: u32 = 0x4000_0028;
const EPERM: u32 = ERRNO | 1;

fn compile(profile: &Value) -> Result<SeccompFilter, SpecError> {
    resolve(&serde_json::from_value(profile.clone()).unwrap())
}

fn call(architecture: u32, number: u32, first_argument: u64) -> Call {
    Call { architecture, number, arguments: [first_argument, 0, 0, 0, 0, 0] }
}

/// What the profile's filter makes of calls.
fn answers<const N: usize>(profile: &Value, calls: [Call; N]) -> [u32; N] {
    let filter = compile(profile).unwrap();
    calls.map(|call| run(&filter.program, call))
}

/// As containerd's default profile is built: some calls, some of them by their arguments, and ENOSYS for clone3.
fn allowing() -> Value {
    json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "syscalls": [
            {"names": ["read", "write", "no_such_call", "_llseek", "clone3"], "action": "SCMP_ACT_ALLOW"},
            {"names": ["socket"], "action": "SCMP_ACT_ALLOW",
                "args": [{"index": 0, "value": 40, "op": "SCMP_CMP_NE"}]},
            {"names": ["clone"], "action": "SCMP_ACT_ALLOW",
                "args": [{"index": 0, "value": 0x7e02_0000, "op": "SCMP_CMP_MASKED_EQ"}]},
            {"names": ["mkdir"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38},
        ]
    })
}

#[test]
fn each_rule_has_its_own_action() {
    let calls = [(0, 0), (1, 0), (2, 0), (83, 0), (41, 1), (41, 40), (56, 17), (56, 0x2000_0000), (435, 0)];
    let calls = calls.map(|(number, argument)| call(X86_64, number, argument));
    let expected = [ALLOW, ALLOW, EPERM, ENOSYS, ALLOW, EPERM, ALLOW, EPERM, ALLOW];
    assert_eq!(answers(&allowing(), calls), expected);
}

#[test]
fn what_is_newer_than_the_profile_does_not_exist() {
    let newer = [436, 1000, X32 - 1, X32, X32 + 1, NO_CALL].map(|number| call(X86_64, number, 0));
    assert_eq!(answers(&allowing(), newer), [ENOSYS; 6]);
    for default in ["SCMP_ACT_ALLOW", "SCMP_ACT_LOG", "SCMP_ACT_TRACE"] {
        let profile = json!({"defaultAction": default, "syscalls": [
            {"names": ["mkdir"], "action": "SCMP_ACT_KILL_PROCESS"}
        ]});
        let [mkdir, newer, none] =
            answers(&profile, [83, 1000, NO_CALL].map(|number| call(X86_64, number, 0)));
        assert_eq!(mkdir, KILL_PROCESS);
        assert_eq!([newer, none], answers(&profile, [call(X86_64, 0, 0); 2]), "{default}");
    }
    // Without a name there is nothing to be newer than.
    let profile = json!({"defaultAction": "SCMP_ACT_TRAP"});
    assert_eq!(answers(&profile, [call(X86_64, 1000, 0), call(X86_64, X32, 0)]), [TRAP, KILL_THREAD]);
}

#[test]
fn each_architecture_has_its_own_numbers() {
    // mkdir is 39 there, 83 is symlink; socket is 359, _llseek 140, the last is clone3, too.
    let calls = [(3, 0), (39, 0), (83, 0), (140, 0), (359, 2), (359, 40), (435, 0), (436, 0)];
    let calls = calls.map(|(number, argument)| call(X86, number, argument));
    assert_eq!(answers(&allowing(), calls), [ALLOW, ENOSYS, EPERM, ALLOW, ALLOW, EPERM, ALLOW, ENOSYS]);
    assert_eq!(answers(&allowing(), [call(ARM, 3, 0)]), [KILL_THREAD]);
    let mut native_only = allowing();
    native_only["architectures"] = json!([]);
    assert_eq!(answers(&native_only, [call(X86_64, 0, 0), call(X86, 3, 0)]), [ALLOW, KILL_THREAD]);
}

#[test]
fn a_call_of_many_is_met_by_its_selector() {
    let profile = json!({
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": ["SCMP_ARCH_X86"],
        "syscalls": [
            {"names": ["connect", "msgget"], "action": "SCMP_ACT_ERRNO"},
            {"names": ["socket"], "action": "SCMP_ACT_ERRNO",
                "args": [{"index": 0, "value": 40, "op": "SCMP_CMP_EQ"}]},
        ]
    });
    // socketcall(2) is 102: socket, bind, connect. ipc(2) is 117: msgget, with a version too, and msgctl.
    let calls = [(102, 1), (102, 2), (102, 3), (117, 13), (117, 0x1_000d), (117, 14)];
    let calls = calls.map(|(number, argument)| call(X86, number, argument));
    assert_eq!(answers(&profile, calls), [EPERM, ALLOW, EPERM, EPERM, EPERM, ALLOW]);
}

#[test]
fn x32_is_listed_or_forbidden() {
    let mut profile = json!({"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X32"]});
    assert_eq!(answers(&profile, [call(X86_64, X32 + 1, 0)]), [ENOSYS]);
    profile["architectures"] = json!(["SCMP_ARCH_X86_64"]);
    let last = [X32 - 1, X32, NO_CALL - 1, NO_CALL].map(|number| call(X86_64, number, 0));
    assert_eq!(answers(&profile, last), [ALLOW, KILL_THREAD, KILL_THREAD, ALLOW]);
}

#[test]
fn a_rule_without_conditions_stands_above_those_with() {
    let condition = json!([{"index": 0, "value": 1, "op": "SCMP_CMP_EQ"}]);
    let with = json!({"names": ["read"], "action": "SCMP_ACT_LOG", "args": condition});
    let without = json!({"names": ["read"], "action": "SCMP_ACT_ALLOW"});
    for rules in [[&with, &without], [&without, &with]] {
        let profile = json!({"defaultAction": "SCMP_ACT_KILL", "syscalls": rules});
        assert_eq!(answers(&profile, [call(X86_64, 0, 1), call(X86_64, 0, 2)]), [ALLOW; 2]);
    }
    // One with the default action says nothing.
    let default = json!({"names": ["read"], "action": "SCMP_ACT_KILL"});
    let profile = json!({"defaultAction": "SCMP_ACT_KILL", "syscalls": [default, with]});
    assert_eq!(answers(&profile, [call(X86_64, 0, 1), call(X86_64, 0, 2)]), [LOG, KILL_THREAD]);
}

#[test]
fn actions_are_those_of_the_kernel() {
    for (action, expected) in [
        (json!({"action": "SCMP_ACT_KILL"}), KILL_THREAD),
        (json!({"action": "SCMP_ACT_KILL_THREAD"}), KILL_THREAD),
        (json!({"action": "SCMP_ACT_KILL_PROCESS"}), KILL_PROCESS),
        (json!({"action": "SCMP_ACT_TRAP"}), TRAP),
        (json!({"action": "SCMP_ACT_ERRNO"}), EPERM),
        (json!({"action": "SCMP_ACT_ERRNO", "errnoRet": 0}), ERRNO),
        (json!({"action": "SCMP_ACT_ERRNO", "errnoRet": 4095}), ERRNO | 4095),
        (json!({"action": "SCMP_ACT_TRACE", "errnoRet": 65535}), TRACE | 65535),
        (json!({"action": "SCMP_ACT_LOG"}), LOG),
    ] {
        let mut rule = action;
        rule["names"] = json!(["read"]);
        let profile = json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]});
        assert_eq!(answers(&profile, [call(X86_64, 0, 0)]), [expected], "{profile}");
    }
}

#[test]
fn flags_are_those_of_the_kernel() {
    let flags = |flags: Value| {
        let mut profile = json!({"defaultAction": "SCMP_ACT_ALLOW"});
        profile["flags"] = flags;
        compile(&profile).map(|filter| filter.flags)
    };
    let all =
        json!(["SECCOMP_FILTER_FLAG_TSYNC", "SECCOMP_FILTER_FLAG_LOG", "SECCOMP_FILTER_FLAG_SPEC_ALLOW"]);
    assert_eq!(flags(all).unwrap(), 7);
    assert_eq!(flags(json!([])).unwrap(), 0);
    assert_eq!(flags(Value::Null).unwrap(), 4);
    let error = flags(json!(["SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV"])).unwrap_err().to_string();
    assert_eq!(error, "linux.seccomp.flags: SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV: not implemented");
}

#[test]
fn what_cannot_be_honoured_is_refused_by_name() {
    let rule = |rule: Value| json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]});
    let cases = [
        (json!({"defaultAction": "SCMP_ACT_NOTIFY"}), "linux.seccomp: SCMP_ACT_NOTIFY: not implemented"),
        (
            json!({"defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/run/agent.sock"}),
            "linux.seccomp.listenerPath: not implemented",
        ),
        (
            json!({"defaultAction": "SCMP_ACT_ALLOW", "defaultErrnoRet": 1}),
            "linux.seccomp: SCMP_ACT_ALLOW takes no errno",
        ),
        (
            rule(json!({"names": ["read"], "action": "SCMP_ACT_NOTIFY"})),
            "linux.seccomp.syscalls[0]: SCMP_ACT_NOTIFY: not implemented",
        ),
        (
            rule(json!({"names": ["read"], "action": "SCMP_ACT_ERRNO", "errnoRet": 4096})),
            "linux.seccomp.syscalls[0]: errno 4096 is above 4095",
        ),
        (
            rule(json!({"names": [], "action": "SCMP_ACT_ERRNO"})),
            "linux.seccomp.syscalls[0].names: there must be a name in each place",
        ),
        (
            rule(json!({"names": ["read"], "action": "SCMP_ACT_TRAP",
                "args": [{"index": 6, "value": 0, "op": "SCMP_CMP_EQ"}]})),
            "linux.seccomp.syscalls[0].args: index 6 is not within 0..=5",
        ),
    ];
    for (profile, expected) in cases {
        assert_eq!(compile(&profile).unwrap_err().to_string(), expected);
    }
}

#[test]
fn what_is_for_a_listener_is_refused_by_name() {
    let metadata = json!({"defaultAction": "SCMP_ACT_ALLOW", "listenerMetadata": "m"});
    let error = compile(&metadata).unwrap_err().to_string();
    assert_eq!(error, "linux.seccomp.listenerMetadata: is set without a linux.seccomp.listenerPath");
    compile(&json!({"defaultAction": "SCMP_ACT_ALLOW", "listenerMetadata": "", "listenerPath": ""})).unwrap();
}

#[test]
fn a_program_beyond_the_kernels_limit_is_refused() {
    let conditions: Vec<_> =
        (0..6).map(|index| json!({"index": index, "value": u64::MAX, "op": "SCMP_CMP_GT"})).collect();
    let rule = json!({"names": ["read"], "action": "SCMP_ACT_ALLOW", "args": conditions});
    let profile = json!({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": vec![rule; 200]});
    let error = compile(&profile).unwrap_err().to_string();
    assert!(error.starts_with("linux.seccomp: takes 62"), "{error}");
}

/// Calls that both architectures have, with their numbers.
const NAMES: [(&str, u32, u32); 5] =
    [("read", 0, 3), ("write", 1, 4), ("open", 2, 5), ("mkdir", 83, 39), ("openat2", 437, 437)];
const OPERATORS: [&str; 7] = [
    "SCMP_CMP_NE",
    "SCMP_CMP_LT",
    "SCMP_CMP_LE",
    "SCMP_CMP_EQ",
    "SCMP_CMP_GE",
    "SCMP_CMP_GT",
    "SCMP_CMP_MASKED_EQ",
];

fn an_action() -> impl Strategy<Value = (&'static str, Option<u32>)> {
    select(vec![
        ("SCMP_ACT_ALLOW", None),
        ("SCMP_ACT_KILL_PROCESS", None),
        ("SCMP_ACT_LOG", None),
        ("SCMP_ACT_ERRNO", None),
        ("SCMP_ACT_ERRNO", Some(38)),
    ])
}

prop_compose! {
    fn an_argument()(
        index in 0..2_usize, value in 0..4_u64, value_two in 0..4_u64, op in select(&OPERATORS),
    ) -> Value {
        json!({"index": index, "value": value, "valueTwo": value_two, "op": op})
    }
}

prop_compose! {
    fn a_rule()(
        names in prop::sample::subsequence(NAMES.map(|(name, ..)| name).to_vec(), 1..4),
        action in an_action(),
        args in prop_oneof![
            Just(Vec::new()).boxed(),
            prop::collection::vec(an_argument(), 1..4).boxed(),
        ],
    ) -> Value {
        json!({"names": names, "action": action.0, "errnoRet": action.1, "args": args})
    }
}

fn value_of(action: &Value, errno: &Value) -> u32 {
    match action.as_str().unwrap() {
        "SCMP_ACT_ALLOW" => ALLOW,
        "SCMP_ACT_KILL_PROCESS" => KILL_PROCESS,
        "SCMP_ACT_LOG" => LOG,
        "SCMP_ACT_ERRNO" => ERRNO | errno.as_u64().unwrap_or(1) as u32,
        other => panic!("{other}"),
    }
}

fn argument_holds(condition: &Value, arguments: [u64; 2]) -> bool {
    let number = |key: &str| condition[key].as_u64().unwrap();
    let (argument, value) = (arguments[number("index") as usize], number("value"));
    match condition["op"].as_str().unwrap() {
        "SCMP_CMP_NE" => argument != value,
        "SCMP_CMP_LT" => argument < value,
        "SCMP_CMP_LE" => argument <= value,
        "SCMP_CMP_EQ" => argument == value,
        "SCMP_CMP_GE" => argument >= value,
        "SCMP_CMP_GT" => argument > value,
        "SCMP_CMP_MASKED_EQ" => argument & value == number("valueTwo") & value,
        other => panic!("{other}"),
    }
}

/// What the profile says of a call, read from its JSON rule by rule.
fn said(profile: &Value, name: &str, arguments: [u64; 2]) -> u32 {
    let default = value_of(&profile["defaultAction"], &profile["defaultErrnoRet"]);
    let rules = || {
        profile["syscalls"].as_array().unwrap().iter().filter(|rule| {
            rule["names"].as_array().unwrap().iter().any(|listed| listed == name)
                && value_of(&rule["action"], &rule["errnoRet"]) != default
        })
    };
    let args = |rule: &Value| rule["args"].as_array().unwrap().clone();
    let holds = |rule: &&Value| {
        let args = args(rule);
        let of = |index: u64| args.iter().filter(|arg| arg["index"] == index).count();
        let mut each = args.iter().map(|arg| argument_holds(arg, arguments));
        if of(0) > 1 || of(1) > 1 { each.any(|holds| holds) } else { each.all(|holds| holds) }
    };
    let unconditional = rules().find(|rule| args(rule).is_empty());
    let decisive = unconditional.or_else(|| rules().find(holds));
    decisive.map_or(default, |rule| value_of(&rule["action"], &rule["errnoRet"]))
}

proptest! {
    #[test]
    fn the_filter_says_what_the_profile_says(
        default in an_action(),
        rules in prop::collection::vec(a_rule(), 0..8),
        calls in prop::collection::vec((select(&NAMES), any::<bool>(), 0..5_u64, 0..5_u64), 32),
    ) {
        // The newest of all that are called, so that none of them is newer than the profile.
        let newest = json!({"names": ["faccessat2"], "action": default.0, "errnoRet": default.1, "args": []});
        let profile = json!({
            "defaultAction": default.0,
            "defaultErrnoRet": default.1,
            "architectures": ["SCMP_ARCH_X86"],
            "syscalls": rules.into_iter().chain([newest]).collect::<Vec<_>>(),
        });
        let filter = compile(&profile).unwrap();
        for ((name, number, number_x86), wide, first, second) in calls {
            let (architecture, number) = if wide { (X86_64, number) } else { (X86, number_x86) };
            let call = Call { architecture, number, arguments: [first, second, 0, 0, 0, 0] };
            let came = run(&filter.program, call);
            prop_assert_eq!(came, said(&profile, name, [first, second]), "{} {:?} of {}", name, call, profile);
        }
    }
}
