//! Input and output: all of it arrives, in order, where it belongs.

use anyhow::Result;

use super::Case;
use crate::command::{Cmd, Finished};
use crate::ctr::Host;
use crate::fixtures::{digest, noise};

pub(super) const CASES: &[Case] = &[
    Case::both("ten_mib_of_input_arrive_whole", big_input),
    Case::both("twenty_mib_of_output_arrive_whole", big_output),
    Case::both("the_end_of_the_input_ends_cat", input_ends),
    Case::both("an_empty_input_is_empty", empty_input),
    Case::both("input_that_nobody_reads_holds_nothing_up", input_unread),
    Case::both("a_conversation_goes_back_and_forth", conversation),
    Case::both("standard_error_is_apart_from_standard_output", apart),
    Case::both("five_mib_of_errors_arrive_whole", big_error),
    Case::both("both_streams_at_once_arrive_whole", both_at_once),
    Case::both("lines_come_in_order", in_order),
    Case::both("bytes_are_not_text", bytes),
    Case::both("without_any_stdio_the_command_still_runs", null_io),
];

const MIB: usize = 1024 * 1024;
/// A line that `yes` repeats. Its length, 17, has no factor in common with any buffer's size, so that a lost or
/// doubled block shows in every byte after it.
const LINE: &str = "0123456789abcdef";

/// What `yes LINE | head -c length` prints.
fn yes(length: usize) -> Vec<u8> {
    LINE.bytes().chain([b'\n']).cycle().take(length).collect()
}

fn big_input(host: &Host) -> Result<()> {
    let input = noise(10 * MIB);
    let digest = digest(&input);
    let finished = host.container().run_with_input(&["sh", "-c", "cat | sha256sum"], input)?;
    finished.succeeds()?.prints(&format!("{digest}  -\n"))?;
    Ok(())
}

fn big_output(host: &Host) -> Result<()> {
    let finished = host.sh(&format!("yes {LINE} | head -c {}", 20 * MIB))?;
    finished.succeeds()?.prints_bytes(&yes(20 * MIB))?;
    Ok(())
}

/// Runs a command that copies or counts its input, and gives it this input once it runs: if the input ends
/// before the task is created, ctr forgets to tell the shim, and the container's input never ends.
fn with_short_input(host: &Host, command: &str, input: &[u8]) -> Result<Finished> {
    let mut attached = host.container().start(&["sh", "-c", &format!("echo ready; exec {command}")])?;
    attached.running.wait_for("ready\n")?;
    attached.running.write(input)?;
    attached.running.close_input();
    attached.finish()
}

fn input_ends(host: &Host) -> Result<()> {
    let finished = with_short_input(host, "cat", b"first\nsecond, without an end")?;
    finished.succeeds()?.prints("ready\nfirst\nsecond, without an end")?;
    Ok(())
}

fn empty_input(host: &Host) -> Result<()> {
    with_short_input(host, "wc -c", b"")?.succeeds()?.prints("ready\n0\n")?;
    Ok(())
}

fn input_unread(host: &Host) -> Result<()> {
    host.container().run_with_input(&["sh", "-c", "exit 3"], noise(10 * MIB))?.exits(3)?;
    Ok(())
}

fn conversation(host: &Host) -> Result<()> {
    let mut attached =
        host.container().start(&["sh", "-c", "while read word; do echo \"heard $word\"; done; exit 2"])?;
    for word in ["one", "two", "three"] {
        attached.running.write(format!("{word}\n").as_bytes())?;
        attached.running.wait_for(&format!("heard {word}\n"))?;
    }
    attached.running.close_input();
    attached.finish()?.exits(2)?.prints("heard one\nheard two\nheard three\n")?;
    Ok(())
}

fn apart(host: &Host) -> Result<()> {
    host.sh("echo out; echo err >&2")?.succeeds()?.prints("out\n")?.complains("err\n")?;
    Ok(())
}

fn big_error(host: &Host) -> Result<()> {
    let finished = host.sh(&format!("yes {LINE} | head -c {} >&2; exit 1", 5 * MIB))?;
    finished.exits(1)?.prints("")?.complains_bytes(&yes(5 * MIB))?;
    Ok(())
}

fn both_at_once(host: &Host) -> Result<()> {
    let size = 2 * MIB;
    let finished =
        host.sh(&format!("yes {LINE} | head -c {size} >&2 & yes {LINE} | head -c {size}; wait"))?;
    finished.succeeds()?.prints_bytes(&yes(size))?.complains_bytes(&yes(size))?;
    Ok(())
}

fn in_order(host: &Host) -> Result<()> {
    let expected: String = (1..=5000).map(|number| format!("{number}\n")).collect();
    host.run(&["seq", "1", "5000"])?.succeeds()?.prints(&expected)?;
    Ok(())
}

fn bytes(host: &Host) -> Result<()> {
    let every: Vec<u8> = (0..=255).collect();
    let expected: Vec<u8> = b"ready\n".iter().chain(&every).copied().collect();
    with_short_input(host, "cat", &every)?.succeeds()?.prints_bytes(&expected)?;
    Ok(())
}

fn null_io(host: &Host) -> Result<()> {
    let scratch = crate::fixtures::scratch()?;
    let script = "cat; echo lost; echo lost >&2; echo kept > /result/file";
    let container = host.container().flags(["--null-io"]).bind(scratch.path(), "/result", "rbind:rw");
    container.run(&["sh", "-c", script])?.succeeds()?.prints("")?.complains("")?;
    let file = scratch.path().join("file");
    Cmd::new("cat").args([&file]).run()?.succeeds()?.prints("kept\n")?;
    Ok(())
}
