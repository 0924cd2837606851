//! The freezer: stops all processes of a cgroup where they are (kernel, admin-guide/cgroup-v2.rst, `cgroup.freeze`).

use super::{Cgroup, CgroupError, io_error, write};

impl Cgroup {
    /// Stops every process in it and below it; returns when they have all stopped.
    pub async fn freeze(&self) -> Result<(), CgroupError> {
        self.set_frozen("1")?;
        // An empty cgroup is frozen too.
        self.watch("cgroup.events", |events| events.get("frozen").filter(|frozen| **frozen == 1).map(drop))
            .await
    }

    /// Lets the processes go on.
    pub fn thaw(&self) -> Result<(), CgroupError> {
        self.set_frozen("0")
    }

    fn set_frozen(&self, value: &str) -> Result<(), CgroupError> {
        let file = self.path().join("cgroup.freeze");
        write(&file, value).map_err(io_error("writing", &file))
    }
}
