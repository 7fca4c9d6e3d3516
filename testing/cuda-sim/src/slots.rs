//! A table of values under numbers that are never reused.
//!
//! A number contains a place and the generation of the place, so the number of a removed value
//! differs from that of the value now in its place. There is no search and no order.
//!
//! Invariant: `get(number)` is `Some` iff `insert` returned `number` and it is not yet removed.

/// Things under numbers; a number is never 0.
#[derive(Debug)]
pub(super) struct Slots<T> {
    places: Vec<Place<T>>,
    vacant: Vec<u32>,
}

#[derive(Debug)]
struct Place<T> {
    generation: u32,
    thing: Option<T>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self { places: Vec::new(), vacant: Vec::new() }
    }
}

impl<T> Slots<T> {
    /// Puts something in and gives its number.
    ///
    /// # Panics
    /// If there are 2^32 of them: the model is for tests.
    pub(super) fn insert(&mut self, thing: T) -> u64 {
        let at = self.vacant.pop().unwrap_or_else(|| {
            self.places.push(Place { generation: 1, thing: None });
            u32::try_from(self.places.len() - 1).unwrap_or(u32::MAX)
        });
        let place = &mut self.places[at as usize];
        place.thing = Some(thing);
        u64::from(place.generation) << 32 | u64::from(at)
    }

    pub(super) fn get(&self, number: u64) -> Option<&T> {
        let (at, generation) = parts(number);
        self.places.get(at).filter(|place| place.generation == generation)?.thing.as_ref()
    }

    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        let (at, generation) = parts(number);
        self.places.get_mut(at).filter(|place| place.generation == generation)?.thing.as_mut()
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<T> {
        let (at, generation) = parts(number);
        let place = self.places.get_mut(at).filter(|place| place.generation == generation)?;
        let thing = place.thing.take()?;
        // After 2^32 lives of one place a number could come again; the place is then left empty.
        if let Some(next) = generation.checked_add(1) {
            place.generation = next;
            self.vacant.push(u32::try_from(at).unwrap_or(u32::MAX));
        }
        Some(thing)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &T> {
        self.places.iter().filter_map(|place| place.thing.as_ref())
    }

    /// Cost: O(places).
    pub(super) fn len(&self) -> usize {
        self.values().count()
    }
}

fn parts(number: u64) -> (usize, u32) {
    let at = number & u64::from(u32::MAX);
    let generation = number >> 32;
    (usize::try_from(at).unwrap_or(usize::MAX), u32::try_from(generation).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_something_gone_names_nothing_that_came_after() {
        let mut slots = Slots::default();
        let first = slots.insert('a');
        assert_ne!(first, 0);
        assert_eq!(slots.remove(first), Some('a'));
        let second = slots.insert('b');
        assert_ne!(first, second);
        assert_eq!((slots.get(first), slots.get(second)), (None, Some(&'b')));
        assert_eq!((slots.remove(first), slots.len()), (None, 1));
        assert_eq!(slots.get(0), None);
        assert_eq!(slots.get(u64::MAX), None);
        *slots.get_mut(second).expect("there") = 'c';
        assert_eq!(slots.values().collect::<Vec<_>>(), [&'c']);
    }
}
