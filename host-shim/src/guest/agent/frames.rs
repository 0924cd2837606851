//! Checks what a guest sends on the connection of its agent's service: one answer to each request, of a bounded length.
//!
//! The ttrpc crate accepts more. A frame of a stream ends a call but keeps its entry in the crate's table. Answers to
//! no request are read without limit. An answer may have 4 MiB, and takes many times as much memory when it is
//! decoded.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bulkhead_agent_api::MAX_ANSWER;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use ttrpc::proto::{MESSAGE_HEADER_LENGTH, MESSAGE_TYPE_RESPONSE, MessageHeader};

/// A connection whose answers are checked. Reading fails after an illegal one.
pub(super) struct CheckedStream<S> {
    stream: S,
    requests: Frames,
    answers: Frames,
    /// Requests without an answer.
    open: usize,
}

/// What the agent never sends.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Illegal {
    #[error("the guest sends a frame of type {0}, which is no answer")]
    Kind(u8),
    #[error("the guest sends an answer of {0} bytes; there are {MAX_ANSWER} at most")]
    Length(u32),
    #[error("the guest answers a request that was not made")]
    NoRequest,
}

impl<S> CheckedStream<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, requests: Frames::default(), answers: Frames::default(), open: 0 }
    }

    fn sent(&mut self, bytes: &[u8]) {
        self.requests.follow(bytes, |_| self.open += 1);
    }

    fn received(&mut self, bytes: &[u8]) -> Result<(), Illegal> {
        let mut result = Ok(());
        self.answers.follow(bytes, |header| {
            if result.is_ok() {
                result = check(&header, &mut self.open);
            }
        });
        result
    }
}

fn check(header: &MessageHeader, open: &mut usize) -> Result<(), Illegal> {
    if header.type_ != MESSAGE_TYPE_RESPONSE {
        return Err(Illegal::Kind(header.type_));
    }
    if header.length > MAX_ANSWER {
        return Err(Illegal::Length(header.length));
    }
    *open = open.checked_sub(1).ok_or(Illegal::NoRequest)?;
    Ok(())
}

/// The position in the frames of one direction of a connection. A frame is a header and as many bytes as it says
/// (ttrpc's PROTOCOL.md).
#[derive(Default)]
struct Frames {
    header: Vec<u8>,
    left_of_body: usize,
}

impl Frames {
    /// Advances by these bytes. Calls `tell` with each header that they complete.
    fn follow(&mut self, mut bytes: &[u8], mut tell: impl FnMut(MessageHeader)) {
        while !bytes.is_empty() {
            let (body, rest) = bytes.split_at(self.left_of_body.min(bytes.len()));
            self.left_of_body -= body.len();
            let missing = MESSAGE_HEADER_LENGTH - self.header.len();
            let (header, rest) = rest.split_at(missing.min(rest.len()));
            self.header.extend(header);
            bytes = rest;
            if self.header.len() == MESSAGE_HEADER_LENGTH {
                let header = MessageHeader::from(&self.header);
                self.header.clear();
                self.left_of_body = header.length as usize;
                tell(header);
            }
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for CheckedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let received = buffer.filled().get(before..).unwrap_or_default();
        Poll::Ready(self.received(received).map_err(io::Error::other))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for CheckedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, bytes))?;
        self.sent(bytes.get(..written).unwrap_or_default());
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::io::AsyncWriteExt;
    use ttrpc::proto::{MESSAGE_TYPE_DATA, MESSAGE_TYPE_REQUEST};

    use super::*;
    use crate::guest::agent::Agent;

    fn frame(kind: u8, length: u32) -> Vec<u8> {
        let header: Vec<u8> = MessageHeader { length, stream_id: 1, type_: kind, flags: 0 }.into();
        [header, vec![MESSAGE_TYPE_DATA; length as usize]].concat()
    }

    fn asked(times: usize) -> CheckedStream<()> {
        let mut stream = CheckedStream::new(());
        (0..times).for_each(|_| stream.sent(&frame(MESSAGE_TYPE_REQUEST, 100)));
        stream
    }

    #[test]
    fn there_is_one_answer_to_each_request() {
        let mut stream = asked(2);
        let answer = frame(MESSAGE_TYPE_RESPONSE, MAX_ANSWER);
        assert_eq!(stream.received(&[&answer[..], &answer[..]].concat()), Ok(()));
        assert_eq!(stream.received(&answer), Err(Illegal::NoRequest));
    }

    #[test]
    fn frames_of_streams_and_long_answers_are_illegal() {
        assert_eq!(asked(1).received(&frame(MESSAGE_TYPE_DATA, 0)), Err(Illegal::Kind(MESSAGE_TYPE_DATA)));
        let long = frame(MESSAGE_TYPE_RESPONSE, MAX_ANSWER + 1);
        // Known from the header: nobody waits for the rest.
        assert_eq!(asked(1).received(&long[..MESSAGE_HEADER_LENGTH]), Err(Illegal::Length(MAX_ANSWER + 1)));
    }

    #[tokio::test]
    async fn a_call_fails_on_a_guest_that_breaks_the_rules() {
        let (shim, mut guest) = tokio::io::duplex(1 << 10);
        let agent = Agent::over(shim);
        // Taken by the crate for an empty answer.
        guest.write_all(&frame(MESSAGE_TYPE_DATA, 0)).await.unwrap();
        let error = agent.list_pids("demo").await.unwrap_err().to_string();
        assert!(error.contains("the guest sends a frame of type 3, which is no answer"), "{error}");
        // The connection is of no use any more.
        assert!(agent.wait("demo").await.is_err());
    }

    proptest! {
        #[test]
        fn pieces_of_any_size_are_the_same_frames(
            lengths in prop::collection::vec(0_u32..40, 0..10),
            cuts in prop::collection::vec(1_usize..60, 1..10),
        ) {
            let bytes: Vec<u8> = lengths.iter().flat_map(|len| frame(MESSAGE_TYPE_RESPONSE, *len)).collect();
            let (mut frames, mut lengths_seen, mut rest) = (Frames::default(), Vec::new(), bytes.as_slice());
            for cut in cuts.iter().cycle() {
                let (piece, next) = rest.split_at((*cut).min(rest.len()));
                frames.follow(piece, |header| lengths_seen.push(header.length));
                rest = next;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(lengths_seen, lengths);
        }
    }
}
