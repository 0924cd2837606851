//! The ids of a user namespace, and those of an id-mapped root. containerd's snapshotters give those of a root in the
//! options of its mount (`uidmap=` and `gidmap=`), which are containerd's own, and not those of a file system.

use serde::{Deserialize, Serialize};

use super::request_error::{RequestError, invalid};

/// Ids that follow one another, named as in the runtime-spec.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct IdRange {
    /// The first one in the container, or on the file system.
    #[serde(rename = "containerID")]
    container_id: u32,
    /// The first one on the host, or where the file system is mounted.
    #[serde(rename = "hostID")]
    host_id: u32,
    size: u32,
}

/// Those of users and groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct IdMappings {
    pub(crate) users: Vec<IdRange>,
    pub(crate) groups: Vec<IdRange>,
}

impl IdMappings {
    /// Takes them out of the options of the mount number `index` of a root, which are words of this form:
    /// `uidmap=0:100000:65536,65536:200000:1000`.
    pub(crate) fn take(index: usize, options: &mut Vec<String>) -> Result<Option<Self>, RequestError> {
        let mut take = |name: &str| -> Result<Vec<IdRange>, RequestError> {
            let mut ranges = Vec::new();
            for option in options.extract_if(.., |option| option.starts_with(name)) {
                for range in option.trim_start_matches(name).split(',') {
                    let range = parse(range).ok_or_else(|| {
                        invalid(format!("rootfs[{index}].options"), format!("{option:?} maps no ids"))
                    })?;
                    ranges.push(range);
                }
            }
            Ok(ranges)
        };
        let (users, groups) = (take("uidmap=")?, take("gidmap=")?);
        match (users.is_empty(), groups.is_empty()) {
            (true, true) => Ok(None),
            (false, false) => Ok(Some(Self { users, groups })),
            _ => Err(invalid(format!("rootfs[{index}].options"), "map ids either of users or of groups")),
        }
    }

    /// Whether somebody has this user and this group where the ids are mapped to.
    pub(crate) fn have(&self, uid: u32, gid: u32) -> bool {
        let has = |ranges: &[IdRange], id: u32| {
            ranges.iter().any(|range| id.checked_sub(range.host_id).is_some_and(|offset| offset < range.size))
        };
        has(&self.users, uid) && has(&self.groups, gid)
    }

    /// The user and the group that root is where the root is mounted.
    pub(crate) fn root(&self) -> Option<(u32, u32)> {
        Some((root_of(&self.users)?, root_of(&self.groups)?))
    }
}

/// What 0 is where the ids are mapped to.
pub(crate) fn root_of(ranges: &[IdRange]) -> Option<u32> {
    ranges.iter().find(|range| range.container_id == 0 && range.size > 0).map(|range| range.host_id)
}

fn parse(range: &str) -> Option<IdRange> {
    let mut numbers = range.split(':').map(str::parse);
    let range = IdRange {
        container_id: numbers.next()?.ok()?,
        host_id: numbers.next()?.ok()?,
        size: numbers.next()?.ok()?,
    };
    numbers.next().is_none().then_some(range)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(options: &[&str]) -> Result<(Option<IdMappings>, Vec<String>), RequestError> {
        let mut options = options.iter().map(|&option| option.to_owned()).collect();
        Ok((IdMappings::take(0, &mut options)?, options))
    }

    #[test]
    fn options_of_containerd_are_the_ids_and_the_others_are_left() {
        assert_eq!(take(&["ro"]).unwrap(), (None, vec!["ro".to_owned()]));
        let (ids, left) = take(&["uidmap=5:7:1,0:100000:5", "gidmap=0:200000:65536", "lowerdir=/l"]).unwrap();
        assert_eq!((ids.unwrap().root(), left), (Some((100_000, 200_000)), vec!["lowerdir=/l".to_owned()]));
    }

    #[test]
    fn ids_outside_of_the_ranges_are_nobodys() {
        let ids = take(&["uidmap=0:1000:2,5:7:1", "gidmap=0:0:1"]).unwrap().0.unwrap();
        let users = (0..2000).filter(|uid| ids.have(*uid, 0));
        assert_eq!(users.collect::<Vec<_>>(), [7, 1000, 1001]);
        assert!(!ids.have(7, 1));
    }

    #[test]
    fn what_is_no_mapping_is_refused() {
        for options in
            [&["uidmap=0:1"][..], &["uidmap=0:1:2"], &["uidmap=0:1:2:3", "gidmap=0:1:2"], &["gidmap=x"]]
        {
            let error = take(options).unwrap_err().to_string();
            assert!(error.starts_with("rootfs[0].options: "), "{error}");
        }
    }
}
