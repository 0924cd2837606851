//! A table of values with numbers that are never used again. So a stale number is detected.

use rustix::io::Errno;

use super::abi::Result;

/// The low bits of a number are the index of its value. The other bits are a serial number.
const PLACE_BITS: u32 = 20;
/// The most values of a table. Index 0 stays unused, so that no number is 0.
const MOST_VALUES: usize = (1 << PLACE_BITS) - 1;

pub(super) struct Table<T> {
    places: Vec<Option<Entry<T>>>,
    free: Vec<u32>,
    /// The serial number of the next value.
    serial: u64,
    /// The index at which [`Table::next`] continues.
    hand: usize,
}

struct Entry<T> {
    number: u64,
    value: T,
}

impl<T> Table<T> {
    /// An empty table. Its first value gets the number 1.
    pub(super) fn new() -> Self {
        Self { places: vec![None], free: Vec::new(), serial: 0, hand: 0 }
    }

    /// Makes later numbers differ from all numbers of `other`, which this table replaces.
    pub(super) fn continue_after(&mut self, other: &Self) {
        self.serial = self.serial.max(other.serial);
    }

    pub(super) fn len(&self) -> usize {
        self.places.len() - 1 - self.free.len()
    }

    /// Adds a value, and returns its number.
    pub(super) fn insert(&mut self, value: T) -> Result<u64> {
        if self.len() >= MOST_VALUES {
            return Err(Errno::NFILE);
        }
        let place = self.free.pop().unwrap_or(self.places.len() as u32);
        let number = self.serial << PLACE_BITS | u64::from(place);
        self.serial += 1;
        let entry = Some(Entry { number, value });
        match self.places.get_mut(place as usize) {
            Some(free) => *free = entry,
            None => self.places.push(entry),
        }
        Ok(number)
    }

    /// All values, with their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.places.iter().flatten().map(|entry| (entry.number, &entry.value))
    }

    /// All values.
    pub(super) fn into_values(self) -> impl Iterator<Item = T> {
        self.places.into_iter().flatten().map(|entry| entry.value)
    }

    pub(super) fn get(&self, number: u64) -> Option<&T> {
        let entry = self.places.get(place(number))?.as_ref()?;
        (entry.number == number).then_some(&entry.value)
    }

    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        let entry = self.places.get_mut(place(number))?.as_mut()?;
        (entry.number == number).then_some(&mut entry.value)
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<T> {
        self.get(number)?;
        self.free.push(place(number) as u32);
        Some(self.places[place(number)].take()?.value)
    }

    /// Goes to the next index, and after the last to the first. Returns the value there, if there is one.
    pub(super) fn next(&mut self) -> Option<(u64, &mut T)> {
        self.hand = (self.hand + 1) % self.places.len();
        self.places[self.hand].as_mut().map(|entry| (entry.number, &mut entry.value))
    }

    /// The number of calls after which [`Table::next`] has visited all indices.
    pub(super) fn round(&self) -> usize {
        self.places.len()
    }
}

fn place(number: u64) -> usize {
    (number & MOST_VALUES as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_never_used_again() {
        let mut table = Table::new();
        let first = table.insert('a').unwrap();
        assert_eq!((first, table.get(first), table.get(0), table.get(2)), (1, Some(&'a'), None, None));
        assert_eq!(table.remove(first), Some('a'));
        let second = table.insert('b').unwrap();
        assert_eq!((place(second), table.places.len(), table.len()), (place(first), 2, 1));
        assert_eq!(table.remove(first), None);
        assert_eq!((table.get(first), table.get(second)), (None, Some(&'b')));
    }

    #[test]
    fn a_number_is_not_used_again_by_a_later_table() {
        let (mut earlier, mut later) = (Table::new(), Table::new());
        let numbers = [earlier.insert('a').unwrap(), earlier.insert('b').unwrap()];
        later.continue_after(&earlier);
        (0..3).for_each(|_| assert!(!numbers.contains(&later.insert('c').unwrap())));
    }

    #[test]
    fn the_hand_comes_to_every_value() {
        let mut table = Table::new();
        let numbers: Vec<_> = (0..5).map(|value| table.insert(value).unwrap()).collect();
        table.remove(numbers[2]);
        let mut seen: Vec<_> =
            (0..table.round()).filter_map(|_| table.next().map(|(_, value)| *value)).collect();
        seen.sort();
        assert_eq!(seen, [0, 1, 3, 4]);
    }
}
