//! The variables of a process that a command names.

use std::env;

use crate::process::error::ProcessError;

/// Adds what the options `--env` name to `all`: `NAME=VALUE`, or the NAME of a variable of this command.
pub(crate) fn add(all: &mut Vec<String>, given: &[String]) -> Result<(), ProcessError> {
    for given in given {
        match given.split_once('=') {
            Some(_) => all.push(given.clone()),
            None => match env::var(given) {
                Ok(value) => all.push(format!("{given}={value}")),
                Err(env::VarError::NotPresent) => {
                    return Err(ProcessError::NoVariable { name: given.clone() });
                }
                Err(env::VarError::NotUnicode(_)) => {
                    return Err(ProcessError::NotUtf8 { name: given.clone() });
                }
            },
        }
    }
    Ok(())
}

/// The kind of this command's terminal, for a process that has one.
pub(crate) fn term() -> String {
    format!("TERM={}", env::var("TERM").as_deref().unwrap_or("xterm"))
}

/// The last value of each name.
pub(crate) fn last_of_each(all: Vec<String>) -> Vec<String> {
    let mut kept: Vec<String> = Vec::new();
    for variable in all {
        let name = variable.split_once('=').map_or(variable.as_str(), |(name, _)| name);
        let is_same = |other: &String| other.split_once('=').is_some_and(|(other, _)| other == name);
        kept.retain(|other| !is_same(other));
        kept.push(variable);
    }
    kept
}
