//! The loop in which the thread of a device waits for events and serves the device's queues.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
};

use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::EventFd,
};

/// The token of the stop event. All other tokens belong to the device.
const TOKEN_STOP: u64 = u64::MAX;
/// How many events are taken at once.
const EVENTS_AT_ONCE: usize = 64;

/// The loop cannot wait for events.
#[derive(Debug, thiserror::Error)]
#[error("cannot wait for events")]
pub struct EventError(#[from] io::Error);

/// What a device does in the loop.
pub trait EventHandler {
    /// Why the device stops serving its driver.
    type Error: From<EventError>;

    /// An event of the source that was added with `token`. Notifications of queues need no handling if
    /// [`EventHandler::serve_queues`] looks at all queues.
    fn on_event(&mut self, _token: u64, _events: EventSet) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Serves the queues, but not for long: the stop event is checked between two calls. Returns true if there may be
    /// more work for which no event will arrive. Then it is called again without waiting.
    fn serve_queues(&mut self) -> Result<bool, Self::Error>;
}

/// The events that the thread of a device waits for: its stop event, and sources with tokens of the device's choice.
pub struct Events(Epoll);

impl Events {
    /// Waits for `stop` only.
    pub fn new(stop: &EventFd) -> Result<Self, EventError> {
        let epoll = Epoll::new()?;
        epoll.ctl(ControlOperation::Add, stop.as_raw_fd(), EpollEvent::new(EventSet::IN, TOKEN_STOP))?;
        Ok(Self(epoll))
    }

    /// Adds a source until `fd` is closed. Events are edge-triggered: each is reported once, and an eventfd need not be
    /// read.
    pub fn watch(&self, fd: RawFd, events: EventSet, token: u64) -> Result<(), EventError> {
        let event = EpollEvent::new(events | EventSet::EDGE_TRIGGERED, token);
        Ok(self.0.ctl(ControlOperation::Add, fd, event)?)
    }

    /// Runs the loop until the stop event is signalled or `handler` returns an error.
    pub fn run<H: EventHandler>(&self, handler: &mut H) -> Result<(), H::Error> {
        let mut buffer = [EpollEvent::default(); EVENTS_AT_ONCE];
        // The driver may have made buffers available before its notifications were watched.
        let mut busy = true;
        while let Some(events) = self.wait(busy, &mut buffer)? {
            for (token, events) in events {
                handler.on_event(token, events)?;
            }
            busy = handler.serve_queues()?;
        }
        Ok(())
    }

    /// Waits for an event, or does not wait if `busy` is set. Returns false if the stop event is signalled.
    pub fn wait_for_any(&self, busy: bool) -> Result<bool, EventError> {
        let mut buffer = [EpollEvent::default(); EVENTS_AT_ONCE];
        Ok(self.wait(busy, &mut buffer)?.is_some())
    }

    /// Waits for events, or does not wait if `busy` is set. Returns None if the stop event is signalled.
    fn wait<'b>(
        &self,
        busy: bool,
        buffer: &'b mut [EpollEvent],
    ) -> Result<Option<impl Iterator<Item = (u64, EventSet)> + use<'b>>, EventError> {
        let count = loop {
            match self.0.wait(if busy { 0 } else { -1 }, buffer) {
                Ok(count) => break count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        };
        let events = &buffer[..count];
        if events.iter().any(|event| event.data() == TOKEN_STOP) {
            return Ok(None);
        }
        Ok(Some(events.iter().map(|event| (event.data(), EventSet::from_bits_truncate(event.events())))))
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    /// Records the events. Signals the stop event in the third turn.
    struct Recorder<'s> {
        events: Vec<(u64, EventSet)>,
        turns: Vec<usize>,
        stop: &'s EventFd,
    }

    impl EventHandler for Recorder<'_> {
        type Error = EventError;

        fn on_event(&mut self, token: u64, events: EventSet) -> Result<(), EventError> {
            self.events.push((token, events));
            Ok(())
        }

        fn serve_queues(&mut self) -> Result<bool, EventError> {
            self.turns.push(self.events.len());
            if self.turns.len() == 3 {
                self.stop.write(1).unwrap();
            }
            Ok(true)
        }
    }

    #[test]
    fn an_event_is_reported_once_and_the_stop_event_ends_the_loop() {
        let stop = EventFd::new(EFD_NONBLOCK).unwrap();
        let kick = EventFd::new(EFD_NONBLOCK).unwrap();
        let events = Events::new(&stop).unwrap();
        events.watch(kick.as_raw_fd(), EventSet::IN, 7).unwrap();
        kick.write(1).unwrap();
        let mut recorder = Recorder { events: Vec::new(), turns: Vec::new(), stop: &stop };
        events.run(&mut recorder).unwrap();
        assert_eq!((recorder.events, recorder.turns), (vec![(7, EventSet::IN)], vec![1, 1, 1]));
    }
}
