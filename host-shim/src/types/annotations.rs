//! Annotations by which a pod chooses values of the configuration, where that allows it.

use std::collections::BTreeMap;

use toml::{Table, Value};

use crate::types::{
    config::{ANNOTATION_KEYS, Config, ConfigError, nearest},
    request_error::{RequestError, invalid},
    text::one_line,
};

/// What the names of these annotations begin with. The key of the configuration follows.
pub(crate) const PREFIX: &str = "bulkhead.dev/";

/// The longest value that an error shows, characters.
const SHOWN: usize = 100;

/// The annotations among these that ask for something of the configuration, by its keys.
pub(crate) fn of_config<'a>(
    annotations: impl IntoIterator<Item = (&'a String, &'a String)>,
) -> BTreeMap<String, String> {
    let ours = |(name, value): (&String, &String)| Some((name.strip_prefix(PREFIX)?.into(), value.clone()));
    annotations.into_iter().filter_map(ours).collect()
}

impl Config {
    /// The configuration of a pod with these annotations, which [`of_config`] has found. Fails for one that there is
    /// not, that is not allowed, or whose value the key could not have in the file either.
    pub(crate) fn with_annotations(
        self,
        annotations: &BTreeMap<String, String>,
    ) -> Result<Self, RequestError> {
        let mut config = self;
        for (key, text) in annotations {
            config = config.with_annotation(key, text)?;
        }
        // A value may be possible only together with another one, so the order must not matter.
        let field = || annotations.keys().map(|key| field(key)).collect::<Vec<_>>().join(", ");
        match config.check_ranges() {
            Err(ConfigError::Range { field: key, value, allowed, .. }) => {
                Err(invalid(field(), format!("{key} = {value}: {allowed}")))
            }
            // No other error is one of a range.
            Err(error) => Err(invalid(field(), error.to_string())),
            Ok(()) => Ok(config),
        }
    }

    fn with_annotation(self, key: &str, text: &str) -> Result<Self, RequestError> {
        let field = field(key);
        if !ANNOTATION_KEYS.contains(&key) {
            let advice = match nearest(key, &ANNOTATION_KEYS) {
                Some(near) => format!("did you mean {PREFIX}{near}?"),
                None => format!("there are those of the keys {}", ANNOTATION_KEYS.join(", ")),
            };
            return Err(invalid(field, format!("there is no such annotation; {advice}")));
        }
        if !self.allowed_annotations.iter().any(|allowed| allowed == key) {
            let path = self.path.display();
            let reason = format!("it is not allowed; add \"{key}\" to `allowed_annotations` in {path}");
            return Err(invalid(field, reason));
        }
        let wrong = |reason: &str| {
            let shown: String = text.chars().take(SHOWN).collect();
            invalid(field.clone(), format!("{:?}: {}", shown, one_line(reason)))
        };
        let mut values = Table::try_from(&self).map_err(|error| wrong(&error.to_string()))?;
        values.insert(key.into(), value(text));
        let changed = values.try_into::<Self>().map_err(|error| wrong(error.message()))?;
        Ok(Self { path: self.path, origins: self.origins, ..changed })
    }
}

/// How an error names the annotation.
fn field(key: &str) -> String {
    format!("annotations[{PREFIX}{}]", one_line(&key.chars().take(SHOWN).collect::<String>()))
}

/// An annotation is a text. What looks like a number, or is true or false, is meant so.
fn value(text: &str) -> Value {
    match (text.parse::<i64>(), text.parse::<bool>()) {
        (Ok(number), _) => Value::Integer(number),
        (_, Ok(is_set)) => Value::Boolean(is_set),
        _ => Value::String(text.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::config::LogLevel;

    fn annotated(pairs: &[(&str, &str)]) -> Result<Config, String> {
        let allowed =
            ANNOTATION_KEYS.iter().filter(|key| **key != "templates").map(|key| (*key).into()).collect();
        let config = Config { allowed_annotations: allowed, ..Config::default() };
        let all: BTreeMap<_, _> =
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        config.with_annotations(&of_config(&all)).map_err(|error| error.to_string())
    }

    #[test]
    fn an_allowed_annotation_sets_the_value_of_its_key() {
        let config = annotated(&[
            ("bulkhead.dev/console", "true"),
            ("bulkhead.dev/log_level", "debug"),
            ("bulkhead.dev/memory_mib", "4096"),
            // Only together with this one.
            ("bulkhead.dev/unlimited_memory_mib", "8192"),
            ("example.com/console", "perhaps"),
        ])
        .unwrap();
        assert_eq!((config.console, config.log_level), (true, LogLevel::Debug));
        assert_eq!((config.memory_mib, config.unlimited_memory_mib), (4096, Some(8192)));
        assert_eq!((config.templates, config.vcpus), (true, None), "the rest is as it was");
        assert_eq!(annotated(&[]).unwrap().path, Config::default().path);
    }

    #[test]
    fn what_is_not_allowed_unknown_or_impossible_is_refused_by_name() {
        for (name, value, reason) in [
            ("templates", "false", "it is not allowed; add \"templates\" to `allowed_annotations` in /etc/"),
            (
                "kernel",
                "/tmp/mine",
                "there is no such annotation; there are those of the keys vcpus, max_vcpus",
            ),
            ("consle", "true", "there is no such annotation; did you mean bulkhead.dev/console?"),
            ("allowed_annotations", "x", "there is no such annotation; "),
            ("console", "yes", "\"yes\": invalid type: string \"yes\", expected a boolean"),
            ("memory_mib", "much", "\"much\": invalid type: string \"much\", expected u32"),
            ("memory_mib", "8", "memory_mib = 8: at least 64 are needed"),
            ("memory_mib", "-1", "\"-1\": invalid value: integer `-1`, expected u32"),
            ("vcpus", "33", "vcpus = 33: it must be 1 to 32"),
            ("log_level", "loud", "\"loud\": unknown variant `loud`, expected one of"),
            ("log_level", "\u{1b}[2J", "\"\\u{1b}[2J\": "),
        ] {
            let error = annotated(&[(&format!("bulkhead.dev/{name}"), value)]).unwrap_err();
            let expected = format!("annotations[bulkhead.dev/{name}]: {reason}");
            assert!(error.starts_with(&expected), "expected  {expected}\ncame      {error}");
            assert!(!error.contains(|c: char| c.is_control()), "{error}");
        }
    }
}
