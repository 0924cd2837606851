//! What CPUID answers on this machine, and what docs/security.md says that it may answer in a guest.

use std::arch::x86_64::__cpuid_count;
use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};

/// A leaf and a subleaf.
pub(crate) type Place = (u32, u32);
/// EAX, EBX, ECX and EDX.
pub(crate) type Registers = [u32; 4];

/// The leaves that say which one is the highest of their class.
const CLASSES: [u32; 3] = [0, 0x4000_0000, 0x8000_0000];
/// Has the most subleaves: one for each bit of a mask of 64.
const STATES: u32 = 0xd;

/// All leaves that this machine has, a line each, with numbers in hexadecimal.
pub(crate) fn read() -> String {
    let mut lines = String::new();
    for class in CLASSES {
        for leaf in class..=__cpuid_count(class, 0).eax {
            for subleaf in 0..if leaf == STATES { 64 } else { 8 } {
                let read = __cpuid_count(leaf, subleaf);
                let (eax, ebx, ecx, edx) = (read.eax, read.ebx, read.ecx, read.edx);
                lines += &format!("{leaf:x} {subleaf:x} {eax:x} {ebx:x} {ecx:x} {edx:x}\n");
            }
        }
    }
    lines
}

/// What [`read`] has written.
pub(crate) fn parse(lines: &str) -> Result<BTreeMap<Place, Registers>> {
    let line = |line: &str| {
        let numbers = line.split(' ').map(|number| u32::from_str_radix(number, 16));
        let numbers = numbers.collect::<Result<Vec<_>, _>>().with_context(|| format!("{line:?}"))?;
        let [leaf, subleaf, eax, ebx, ecx, edx] = numbers[..] else { anyhow::bail!("{line:?}") };
        Ok(((leaf, subleaf), [eax, ebx, ecx, edx]))
    };
    lines.lines().map(line).collect()
}

/// The table in docs/security.md.
pub(crate) struct Documented {
    /// Of each leaf the documented subleaf, or None if all are alike, and the bits.
    leaves: Vec<(u32, Option<u32>, Registers)>,
}

impl Documented {
    /// Reads the table as it was when this program was built.
    pub(crate) fn load() -> Result<Self> {
        let document = include_str!("../../../docs/security.md");
        let section = document.split("\n## ").find(|section| section.starts_with("What CPUID shows"));
        let rows = section.context("no table of CPUID")?.lines().filter(|line| line.starts_with("| `"));
        let leaves = rows.map(|line| row(line).with_context(|| format!("{line:?}")));
        let leaves = leaves.collect::<Result<Vec<_>>>()?;
        ensure!(!leaves.is_empty(), "the table of CPUID is empty");
        Ok(Self { leaves })
    }

    /// Whether there is a row about it.
    pub(crate) fn is_leaf(&self, leaf: u32) -> bool {
        self.leaves.iter().any(|(of, ..)| *of == leaf)
    }

    /// The bits that may be set there.
    pub(crate) fn at(&self, (leaf, subleaf): Place) -> Registers {
        let mut masks = [0; 4];
        for (_, _, bits) in
            self.leaves.iter().filter(|(of, only, _)| *of == leaf && only.is_none_or(|only| only == subleaf))
        {
            masks.iter_mut().zip(bits).for_each(|(mask, bits)| *mask |= bits);
        }
        masks
    }
}

/// "| `LEAF` or `LEAF.SUBLEAF` or `LEAF.*` | REGISTER | FIELDS |", where a field is a name after its bit or bits.
fn row(line: &str) -> Result<(u32, Option<u32>, Registers)> {
    let cells: Vec<_> = line.trim_matches(['|', ' ']).split(" | ").collect();
    let [place, register, fields] = cells[..] else { anyhow::bail!("not three cells") };
    let place = place.trim_matches('`').strip_prefix("0x").context("no leaf")?;
    let (leaf, subleaf) = place.split_once('.').unwrap_or((place, "*"));
    let subleaf = if subleaf == "*" { None } else { Some(subleaf.parse()?) };
    let names = ["eax", "ebx", "ecx", "edx"];
    let register = names.iter().position(|name| *name == register).context("no register")?;
    let mut masks = [0; 4];
    for field in fields.split("; ") {
        masks[register] |= bits(field);
    }
    Ok((u32::from_str_radix(leaf, 16)?, subleaf, masks))
}

/// "3 NAME", "3-5 NAME", or a name of the whole register.
fn bits(field: &str) -> u32 {
    let numbers = field.split(' ').next().unwrap_or_default();
    let (first, last) = numbers.split_once('-').unwrap_or((numbers, numbers));
    match (first.parse::<u32>(), last.parse::<u32>()) {
        (Ok(first), Ok(last)) => (u32::MAX >> (31 - last)) & (u32::MAX << first),
        _ => u32::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_is_understood() {
        let documented = Documented::load().unwrap();
        assert_eq!(documented.at((6, 0)), [4, 0, 0, 0]);
        assert_eq!(documented.at((0, 0)), [u32::MAX; 4]);
        assert_eq!(documented.at((0xb, 7))[0], 0x1f);
        assert_eq!(documented.at((7, 2)), [0, 0, 0, 0x3f]);
        assert_eq!(documented.at((7, 3)), [0; 4]);
        assert_eq!(documented.at((0xa, 0)), [0; 4]);
    }

    #[test]
    fn what_is_read_is_understood() {
        let read = parse(&read()).unwrap();
        assert_eq!(read[&(0, 0)], {
            let first = __cpuid_count(0, 0);
            [first.eax, first.ebx, first.ecx, first.edx]
        });
    }
}
