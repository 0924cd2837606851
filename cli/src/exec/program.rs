//! The process that is added to a container: that of the container's spec, with what the options say.

use std::{fs::File, path::Path, time::Duration};

use bulkhead_host_shim::operator::ContainerPlace;
use rustix::fs::{Mode, OFlags, open};
use serde_json::{Value, json};
use tokio::{task::spawn_blocking, time::timeout};

use crate::{
    exec::{error::ExecError, options::Options},
    process::{ProcessError, environment, terminal::Size, user::User},
};

/// How long the file systems of a container may take to give the names of its users.
const LOOKUP: Duration = Duration::from_secs(10);

/// The user that the option names, by the files of the container.
pub(super) async fn user(place: &ContainerPlace, user: &str) -> Result<User, ExecError> {
    let (path, name) = (place.root.clone(), user.to_owned());
    // They may be on a file system that hangs.
    let found = spawn_blocking(move || find_user(&path, &name));
    match timeout(LOOKUP, found).await {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => Err(ProcessError::Begin(std::io::Error::other(error)).into()),
        Err(_) => Err(ExecError::SlowRoot { user: user.into(), seconds: LOOKUP.as_secs() }),
    }
}

fn find_user(root: &Path, user: &str) -> Result<User, ExecError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match open(root, flags, Mode::empty()) {
        Ok(root) => Ok(User::find(user, File::from(root))?),
        Err(errno) => {
            // Numbers need no files, but then the groups of the user are not known.
            User::of_numbers(user).ok_or_else(|| ExecError::Root {
                user: user.into(),
                path: root.into(),
                source: errno.into(),
            })
        }
    }
}

/// The process (OCI runtime-spec) for the container with this `spec`, which is in the bundle.
pub(super) fn process(
    spec: &Value,
    bundle: &Path,
    options: &Options,
    user: Option<User>,
    window: Option<Size>,
) -> Result<Vec<u8>, ExecError> {
    let missing = |field| ExecError::NoField { path: bundle.join("config.json"), field };
    let mut process = spec.get("process").and_then(Value::as_object).cloned();
    let process = process.as_mut().ok_or_else(|| missing("process"))?;
    process.remove("consoleSize");
    if let Some(Size { width, height }) = window.filter(|_| options.tty) {
        process.insert("consoleSize".into(), json!({ "width": width, "height": height }));
    }
    process.insert("terminal".into(), options.tty.into());
    process.insert("args".into(), options.command.clone().into());
    let own = process.get("env").and_then(Value::as_array).into_iter().flatten();
    let mut env: Vec<_> = own.filter_map(Value::as_str).map(str::to_owned).collect();
    if options.tty {
        env.push(environment::term());
    }
    environment::add(&mut env, &options.env)?;
    process.insert("env".into(), environment::last_of_each(env).into());
    if let Some(path) = &options.workdir {
        if !path.starts_with('/') {
            return Err(ProcessError::Workdir { path: path.clone() }.into());
        }
        process.insert("cwd".into(), path.clone().into());
    }
    if let Some(User { uid, gid, groups }) = user {
        let entry = process.entry("user").or_insert_with(|| json!({}));
        // What else is there, such as umask, stays.
        let entry = entry.as_object_mut().ok_or_else(|| missing("process.user"))?;
        entry.insert("uid".into(), uid.into());
        entry.insert("gid".into(), gid.into());
        entry.insert("additionalGids".into(), groups.into());
    }
    Ok(Value::Object(std::mem::take(process)).to_string().into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::options;

    fn added(spec: &Value, words: &[&str], user: Option<User>) -> Result<Value, String> {
        let options = options(&[words, &["pod", "--", "id", "-u"]].concat()).unwrap();
        let window = Some(Size { width: 91, height: 23 });
        let bytes =
            process(spec, Path::new("/b"), &options, user, window).map_err(|error| error.to_string())?;
        Ok(serde_json::from_slice(&bytes).unwrap())
    }

    fn spec() -> Value {
        json!({ "process": {
            "terminal": true, "consoleSize": { "width": 1, "height": 1 },
            "user": { "uid": 5, "gid": 6, "additionalGids": [7], "umask": 18 },
            "args": ["own"], "env": ["PATH=/bin", "A=1"], "cwd": "/srv",
            "capabilities": { "bounding": ["CAP_KILL"] }, "noNewPrivileges": true,
            "apparmorProfile": "docker-default", "rlimits": [], "oomScoreAdj": 3,
        }})
    }

    #[test]
    fn a_program_is_like_the_containers_own_but_for_the_options() {
        let mut expected = spec()["process"].clone();
        expected["args"] = json!(["id", "-u"]);
        expected["terminal"] = false.into();
        expected.as_object_mut().unwrap().remove("consoleSize");
        assert_eq!(added(&spec(), &[], None), Ok(expected.clone()));
        let user = User { uid: 1, gid: 2, groups: vec![3] };
        let words = ["-t", "--workdir", "/tmp", "-e", "A=2", "-e", "TERM=dumb"];
        expected["user"] = json!({ "uid": 1, "gid": 2, "additionalGids": [3], "umask": 18 });
        expected["terminal"] = true.into();
        expected["consoleSize"] = json!({ "width": 91, "height": 23 });
        expected["env"] = json!(["PATH=/bin", "A=2", "TERM=dumb"]);
        expected["cwd"] = "/tmp".into();
        assert_eq!(added(&spec(), &words, Some(user)), Ok(expected));
    }

    #[test]
    fn what_cannot_be_is_named() {
        assert!(added(&json!({}), &[], None).unwrap_err().contains("/b/config.json: it is no spec"));
        assert!(
            added(&spec(), &["-w", "tmp"], None).unwrap_err().contains("\"tmp\" is not absolute (--workdir)")
        );
        let error = added(&spec(), &["-e", "BULKHEAD_NO_SUCH"], None).unwrap_err();
        assert!(error.contains("--env BULKHEAD_NO_SUCH: this command has no such variable"), "{error}");
    }

    #[test]
    fn a_root_that_the_host_does_not_have_has_numbers_only() {
        let none = Path::new("/nonexistent/rootfs");
        assert_eq!(find_user(none, "7:8").unwrap(), User { uid: 7, gid: 8, groups: vec![] });
        let error = find_user(none, "build").unwrap_err().to_string();
        assert!(error.contains("--user build: the root directory /nonexistent/rootfs"), "{error}");
        // The guest cannot make its root lead elsewhere, and if it could, it would not be followed.
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("rootfs")).unwrap();
        assert!(find_user(&dir.path().join("rootfs"), "root").is_err());
    }
}
