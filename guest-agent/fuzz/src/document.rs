//! JSON that is nearly right: a document that has everything, changed at a few places.

use bulkhead_fuzz::input::Input;
use serde_json::{Value, json};

/// How often a part of it is copied: into itself, that doubles it.
const COPIES: usize = 5;

/// The document after the acts, until the bytes are over.
pub(crate) fn change(mut document: Value, input: &mut Input) -> Value {
    let mut copies = 0;
    while !input.is_over() {
        let new = match input.below(6) {
            0 if copies < COPIES => {
                copies += 1;
                find(&mut document, input).clone()
            }
            1 => json!(input.u64() as i64),
            2 => json!(String::from_utf8_lossy(input.bytes(8))),
            _ => value(input),
        };
        let place = find(&mut document, input);
        match place {
            Value::Array(items) if input.u8() & 1 == 0 => items.push(new),
            Value::Object(fields) if input.u8() & 1 == 0 => {
                drop(fields.insert(String::from_utf8_lossy(input.bytes(8)).into_owned(), new));
            }
            _ => *place = new,
        }
    }
    document
}

/// A part of it: the bytes lead there from the root.
fn find<'v>(root: &'v mut Value, input: &mut Input) -> &'v mut Value {
    let children = match root {
        Value::Array(items) => items.len(),
        Value::Object(fields) => fields.len(),
        _ => 0,
    };
    if children == 0 || input.u8() >= 240 {
        return root;
    }
    let index = input.below(children.min(256));
    let child = match root {
        Value::Array(items) => items.get_mut(index),
        Value::Object(fields) => fields.values_mut().nth(index),
        _ => None,
    };
    // There is one: the index is below their number.
    child.map_or_else(|| panic!("no child {index}"), |child| find(child, input))
}

/// What breaks those who do not expect it.
fn value(input: &mut Input) -> Value {
    const WORDS: [&str; 20] = [
        "",
        ".",
        "..",
        "/",
        "../../x",
        "/proc/self/../x",
        "a\0b",
        "a=b",
        "\n",
        "0",
        "-1",
        "max",
        "\u{20ac}",
        "18446744073709551616",
        "shared",
        "ro",
        "bind",
        "SCMP_ACT_ALLOW",
        "CAP_ALL",
        "network",
    ];
    match input.below(7) {
        0 => Value::Null,
        1 => json!(input.u8() & 1 == 0),
        2 => json!(input.choose(&[0, 1, -1, 7, 64, 4095, 65536, i64::from(u32::MAX), i64::MAX, i64::MIN])),
        3 => json!(input.choose(&[u64::MAX, 1 << 63])),
        4 => json!(input.choose(&[1e300, -0.5])),
        5 => input.choose(&[0_u8, 1]).checked_sub(1).map_or_else(|| json!([]), |_| json!({})),
        _ => json!(input.choose(&WORDS).repeat(input.choose(&[1, 1, 1, 1, 300, 5000]))),
    }
}
