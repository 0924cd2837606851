//! Parameters of the host's kernel that its guests have too.

use std::{collections::HashMap, fs, path::Path};

use bulkhead_agent_api::HOST_PARAMETERS;

/// What the host's /proc/sys says of them, without those that this kernel does not have.
pub(crate) fn read() -> HashMap<String, String> {
    let value = |name: &str| {
        let text = fs::read_to_string(Path::new("/proc/sys").join(name)).ok()?;
        Some((name.to_owned(), text.trim_end().to_owned()))
    };
    HOST_PARAMETERS.iter().filter_map(|name| value(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_the_hosts() {
        let parameters = read();
        for (name, value) in &parameters {
            assert!(value.parse::<u64>().is_ok(), "{name} is {value}");
        }
        for name in ["fs/file-max", "fs/nr_open", "vm/max_map_count"] {
            assert!(parameters.contains_key(name), "{name}");
        }
    }
}
