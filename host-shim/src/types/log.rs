//! The least severe level that is logged, which a pod may choose after the log has begun.

use std::sync::OnceLock;

use tracing::Level;

type Change = Box<dyn Fn(Level) + Send + Sync>;

/// What changes the level. Not set: there is no log, or its level is fixed.
static CHANGE: OnceLock<Change> = OnceLock::new();

/// From now on `change` is called by [`set_level`].
pub(crate) fn on_change(change: impl Fn(Level) + Send + Sync + 'static) {
    // A process has one log.
    drop(CHANGE.set(Box::new(change)));
}

/// Logs this level and those that are more severe.
pub(crate) fn set_level(level: Level) {
    if let Some(change) = CHANGE.get() {
        change(level);
    }
}
