//! The states of a process and what may happen in each, as a pure function. It holds for the init of a container and
//! for a process that exec added.

use crate::types::exit::Exit;

/// The state of a process, with what is known in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Created,
    /// The guest was asked to execute its program.
    Starting,
    Running,
    Paused,
    Stopped(Exit),
    /// Nothing is left of it. None: it never ran.
    Deleted(Option<Exit>),
}

/// A state without its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Created,
    Starting,
    Running,
    Paused,
    Stopped,
    Deleted,
}

/// What containerd asks for, and what happens by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    Start,
    /// The program was executed.
    Started,
    /// The program could not be executed.
    NotStarted,
    /// The process ended, or its VM did.
    Exit,
    Delete,
    Pause,
    Resume,
    Update,
    Kill,
    CloseIo,
    /// A process is added, or one that was is started.
    Exec,
    /// The size of the terminal is set.
    Resize,
    /// State, Pids, Stats, Connect.
    Query,
}

/// Why an action is not possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("no such task")]
    NotFound,
    #[error("the task already exists")]
    Exists,
    #[error("the task is being created")]
    Creating,
    #[error("the process has ended already")]
    Ended,
    #[error("{action:?} is not possible while the process is {status:?}")]
    Precondition { action: Action, status: Status },
}

/// The state after `action` in `status`, or why it may not happen then.
pub(crate) fn next(status: Status, action: Action) -> Result<Status, Refusal> {
    use Action as A;
    use Status as S;
    match (status, action) {
        (S::Deleted, _) => Err(Refusal::NotFound),
        (S::Created, A::Start) => Ok(S::Starting),
        (S::Starting, A::Started) => Ok(S::Running),
        (S::Starting, A::NotStarted) => Ok(S::Created),
        (S::Running, A::Pause) => Ok(S::Paused),
        (S::Paused, A::Resume) => Ok(S::Running),
        (S::Created | S::Starting | S::Running | S::Paused, A::Exit) => Ok(S::Stopped),
        (S::Created | S::Stopped, A::Delete) => Ok(S::Deleted),
        (S::Stopped, A::Kill) => Err(Refusal::Ended),
        (S::Created | S::Starting | S::Running, A::Exec | A::Resize) => Ok(status),
        (S::Created | S::Starting | S::Running | S::Paused, A::Update) => Ok(status),
        (_, A::Kill | A::CloseIo | A::Query) => Ok(status),
        _ => Err(Refusal::Precondition { action, status }),
    }
}

impl State {
    /// The state without its data.
    pub(crate) fn status(self) -> Status {
        match self {
            State::Created => Status::Created,
            State::Starting => Status::Starting,
            State::Running => Status::Running,
            State::Paused => Status::Paused,
            State::Stopped(_) => Status::Stopped,
            State::Deleted(_) => Status::Deleted,
        }
    }

    /// Whether `action` is possible now.
    pub(crate) fn allow(self, action: Action) -> Result<(), Refusal> {
        next(self.status(), action).map(drop)
    }

    /// How the process ended, once it has.
    pub(crate) fn exit(self) -> Option<Exit> {
        match self {
            State::Stopped(exit) => Some(exit),
            State::Deleted(exit) => exit,
            State::Created | State::Starting | State::Running | State::Paused => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::{prelude::*, sample::select};

    use super::*;

    const STATUSES: [Status; 6] = [
        Status::Created,
        Status::Starting,
        Status::Running,
        Status::Paused,
        Status::Stopped,
        Status::Deleted,
    ];
    const ACTIONS: [Action; 13] = [
        Action::Start,
        Action::Started,
        Action::NotStarted,
        Action::Exit,
        Action::Delete,
        Action::Pause,
        Action::Resume,
        Action::Update,
        Action::Kill,
        Action::CloseIo,
        Action::Exec,
        Action::Resize,
        Action::Query,
    ];

    fn rank(status: Status) -> usize {
        STATUSES.iter().position(|other| *other == status).unwrap()
    }

    /// The states along a history, refused actions left out.
    fn live(actions: &[Action]) -> Vec<(Action, Status)> {
        let mut status = Status::Created;
        let mut history = Vec::new();
        for action in actions {
            if let Ok(after) = next(status, *action) {
                status = after;
                history.push((*action, status));
            }
        }
        history
    }

    proptest! {
        #[test]
        fn life_goes_forward_except_when_a_start_fails_or_a_pause_ends(
            actions in prop::collection::vec(select(&ACTIONS), 0..64)
        ) {
            let mut before = Status::Created;
            for (action, after) in live(&actions) {
                let may_go_back = matches!(action, Action::NotStarted | Action::Resume);
                prop_assert!(may_go_back || rank(after) >= rank(before));
                before = after;
            }
        }

        #[test]
        fn each_thing_happens_once(actions in prop::collection::vec(select(&ACTIONS), 0..64)) {
            for once in [Action::Started, Action::Exit, Action::Delete] {
                prop_assert!(live(&actions).iter().filter(|(action, _)| *action == once).count() <= 1);
            }
        }

        #[test]
        fn nothing_happens_after_delete(actions in prop::collection::vec(select(&ACTIONS), 0..64)) {
            let history = live(&actions);
            let deleted = history.iter().position(|(action, _)| *action == Action::Delete);
            prop_assert!(deleted.is_none_or(|at| at + 1 == history.len()));
        }

        #[test]
        fn pauses_and_resumes_take_turns(actions in prop::collection::vec(select(&ACTIONS), 0..64)) {
            let history = live(&actions);
            let is_turn = |action: &Action| matches!(action, Action::Pause | Action::Resume);
            let turns: Vec<_> = history.iter().map(|(action, _)| *action).filter(is_turn).collect();
            for (index, action) in turns.iter().enumerate() {
                prop_assert_eq!(*action, if index % 2 == 0 { Action::Pause } else { Action::Resume });
            }
        }

        #[test]
        fn a_running_process_is_never_deleted(actions in prop::collection::vec(select(&ACTIONS), 0..64)) {
            let history = live(&actions);
            for pair in history.windows(2) {
                let runs = matches!(pair[0].1, Status::Starting | Status::Running | Status::Paused);
                prop_assert!(!(runs && pair[1].0 == Action::Delete));
            }
        }

        #[test]
        fn questions_change_nothing(
            status in select(&STATUSES),
            action in select(&[
                Action::Query, Action::Kill, Action::CloseIo, Action::Exec, Action::Resize,
                Action::Update,
            ]),
        ) {
            if let Ok(after) = next(status, action) {
                prop_assert_eq!(after, status);
            }
        }

        #[test]
        fn who_is_told_not_found_finds_nothing(status in select(&STATUSES), action in select(&ACTIONS)) {
            if next(status, action) == Err(Refusal::NotFound) {
                prop_assert_eq!(status, Status::Deleted);
            }
        }
    }

    #[test]
    fn a_paused_task_can_be_killed_and_resumed_but_takes_no_process() {
        assert_eq!(next(Status::Paused, Action::Kill), Ok(Status::Paused));
        assert_eq!(next(Status::Paused, Action::Exit), Ok(Status::Stopped));
        assert_eq!(
            next(Status::Paused, Action::Exec).unwrap_err().to_string(),
            "Exec is not possible while the process is Paused"
        );
        assert_eq!(
            next(Status::Created, Action::Pause).unwrap_err().to_string(),
            "Pause is not possible while the process is Created"
        );
    }

    #[test]
    fn killing_what_has_ended_says_so() {
        assert_eq!(next(Status::Stopped, Action::Kill), Err(Refusal::Ended));
        assert_eq!(
            next(Status::Running, Action::Delete).unwrap_err().to_string(),
            "Delete is not possible while the process is Running"
        );
    }
}
