//! The variables of a process that a command names.

use std::{collections::HashMap, env};

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

/// The last value of each name, in the order of these. An image may have very many.
pub(crate) fn last_of_each(all: Vec<String>) -> Vec<String> {
    let name = |variable: &str| variable.split_once('=').map_or(variable.len(), |(name, _)| name.len());
    let mut last = HashMap::new();
    for (index, variable) in all.iter().enumerate() {
        last.insert(variable[..name(variable)].to_owned(), index);
    }
    let kept = all.into_iter().enumerate();
    kept.filter(|(index, variable)| last.get(&variable[..name(variable)]) == Some(index))
        .map(|(_, variable)| variable)
        .collect()
}
