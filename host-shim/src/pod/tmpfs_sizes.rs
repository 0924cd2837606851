//! The sizes of file systems in memory for which the spec gives none, or a part of all memory.
//!
//! Linux takes half of the memory then, which it has at the moment of the mount. A guest has little, and gets more
//! later. So these are the sizes that Linux would take on the host. What is written is charged to the container.

use serde_json::Value;

/// Bytes of a page, and of the memory for which Linux allows one file.
const PAGE: u64 = 4096;
/// Up to this size, as /dev and /dev/shm have it, a tmpfs keeps the guest's own number of files, and so the options
/// that it shows on runc: the smallest guest allows one for each page of it.
const SMALL: u64 = 64 << 20;

/// Writes the sizes into a spec, for a host with this much memory (bytes).
pub(super) fn write(document: &mut Value, memory: u64) {
    let Some(mounts) = document.get_mut("mounts").and_then(Value::as_array_mut) else { return };
    for mount in mounts.iter_mut().filter(|mount| mount["type"] == "tmpfs") {
        match &mut mount["options"] {
            Value::Array(options) => give_options(options, memory),
            options @ Value::Null => {
                let mut added = Vec::new();
                give_options(&mut added, memory);
                *options = added.into();
            }
            // The agent says what is wrong with it.
            _ => {}
        }
    }
}

/// tmpfs(5).
fn give_options(options: &mut Vec<Value>, memory: u64) {
    let texts = || options.iter().filter_map(Value::as_str);
    if texts().any(|option| option == "bind" || option == "rbind") {
        return;
    }
    let has_inodes = texts().any(|option| option.starts_with("nr_inodes="));
    let has_size = texts().any(|option| option.starts_with("size=") || option.starts_with("nr_blocks="));
    let is_small = texts().any(|option| {
        option.strip_prefix("size=").and_then(bytes_of).is_some_and(|bytes| (1..=SMALL).contains(&bytes))
    });
    for option in options.iter_mut() {
        let percent = option.as_str().and_then(|text| text.strip_prefix("size=")?.strip_suffix('%'));
        if let Some(percent) = percent.and_then(|percent| percent.parse::<u64>().ok()) {
            let bytes = u128::from(memory) * u128::from(percent) / 100;
            *option = format!("size={bytes}").into();
        }
    }
    // In whole pages, as the kernel counts (mm/shmem.c, shmem_default_max_blocks).
    let half = memory / PAGE / 2;
    if !has_size {
        options.push(format!("size={}", half * PAGE).into());
    }
    if !has_inodes && !is_small {
        options.push(format!("nr_inodes={half}").into());
    }
}

/// A number as the kernel reads it (lib/cmdline.c, memparse), in decimal.
fn bytes_of(text: &str) -> Option<u64> {
    let shift = match text.chars().last()? {
        'k' | 'K' => 10,
        'm' | 'M' => 20,
        'g' | 'G' => 30,
        _ => 0,
    };
    let digits = if shift == 0 { text } else { &text[..text.len() - 1] };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn given(mount: Value) -> Value {
        let mut document = json!({ "mounts": [mount] });
        write(&mut document, 1 << 30);
        document["mounts"][0]["options"].clone()
    }

    #[test]
    fn without_a_size_it_is_half_of_the_hosts_memory() {
        let half = ["size=536870912", "nr_inodes=131072"];
        assert_eq!(given(json!({"type": "tmpfs", "destination": "/t"})), json!(half));
        let options = given(json!({"type": "tmpfs", "options": ["nosuid", "mode=755"]}));
        assert_eq!(options, json!(["nosuid", "mode=755", half[0], half[1]]));
    }

    #[test]
    fn a_part_is_one_of_the_hosts_memory() {
        assert_eq!(
            given(json!({"type": "tmpfs", "options": ["size=25%", "nr_inodes=7"]})),
            json!(["size=268435456", "nr_inodes=7"])
        );
    }

    #[test]
    fn a_size_in_bytes_or_blocks_stays() {
        for size in ["size=65536k", "size=64M", "size=1", "size=67108864"] {
            assert_eq!(given(json!({"type": "tmpfs", "options": [size]})), json!([size]));
        }
        for size in ["size=65537k", "size=1G", "size=0", "nr_blocks=9", "size=x%", "size=", "size=\u{e9}"] {
            let options = given(json!({"type": "tmpfs", "options": [size]}));
            assert_eq!(options, json!([size, "nr_inodes=131072"]));
        }
    }

    #[test]
    fn other_mounts_stay() {
        for mount in [
            json!({"type": "proc", "options": []}),
            json!({"type": "bind", "source": "/dev/shm", "options": ["bind"]}),
            json!({"type": "tmpfs", "source": "/run", "options": ["rbind"]}),
            json!({"type": "tmpfs", "options": "size=1"}),
        ] {
            assert_eq!(given(mount.clone()), mount["options"]);
        }
        let mut none = json!({"mounts": 1});
        write(&mut none, 1);
        assert_eq!(none, json!({"mounts": 1}));
    }
}
