//! How long a prefix stays after its last use.
//!
//! ```text
//! class = (time to live, priority)           few of them, each shared by any number of nodes, counted
//! join(a, b) = (longer time, higher priority)      what a block gets when two wishes meet
//! ```
//!
//! Blocks of one class are released in the order in which they expire, which is also the order in which they were used:
//! one list per class suffices for both.
#![forbid(unsafe_code)]

use std::time::Duration;

use crate::{Error, Result};

/// What a prefix is worth once nobody holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Retention {
    /// It is forgotten so long after its last holder released it, each hit counting anew; None: never.
    pub ttl: Option<Duration>,
    /// 0 to 100. When space is needed lower ones go first, among equals the least recently used.
    pub priority: u8,
}

impl Default for Retention {
    /// 300 seconds, priority 50.
    fn default() -> Self {
        Self { ttl: Some(Duration::from_secs(300)), priority: 50 }
    }
}

impl Retention {
    pub(super) fn validate(&self) -> Result<()> {
        if self.priority > 100 {
            return Err(Error::InvalidArgument(format!("priority: expected 0 to 100, got {}", self.priority)));
        }
        Ok(())
    }
}

/// Time in nanoseconds: 584 years.
pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Number of a class.
pub(super) type ClassId = u16;

/// Classes that may live at once, the last one included: it takes in what finds no room, and keeps it for the longest
/// time and with the highest priority that any of it asks for.
const MAX_CLASSES: usize = 256;
const LAST: ClassId = MAX_CLASSES as ClassId - 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Class {
    /// Nanoseconds; `u64::MAX`: for ever.
    pub ttl: u64,
    pub priority: u8,
    /// Nodes, sequences and marks that use it.
    uses: usize,
}

impl Class {
    pub fn retention(&self) -> Retention {
        let ttl = (self.ttl != u64::MAX).then(|| Duration::from_nanos(self.ttl));
        Retention { ttl, priority: self.priority }
    }

    pub fn expires(&self, released: u64) -> u64 {
        released.saturating_add(self.ttl)
    }
}

/// The table of classes.
#[derive(Debug)]
pub(super) struct Classes {
    entries: Vec<Class>,
    live: usize,
}

impl Classes {
    pub fn new() -> Self {
        Self { entries: Vec::new(), live: 0 }
    }

    pub fn get(&self, class: ClassId) -> Class {
        self.entries[usize::from(class)]
    }

    /// A use of the class of this retention. Errors: `InvalidArgument` for a priority above 100, and if there are too
    /// many kinds of retention at once.
    pub fn acquire(&mut self, retention: Retention) -> Result<ClassId> {
        retention.validate()?;
        let ttl = retention.ttl.map_or(u64::MAX, nanos);
        self.find_or_make(ttl, retention.priority).inspect(|&class| self.hold(class)).ok_or_else(|| {
            Error::InvalidArgument(format!(
                "there are {} kinds of (ttl, priority) in use: expected one of these, got another",
                self.live
            ))
        })
    }

    /// One use more.
    pub fn hold(&mut self, class: ClassId) {
        let entry = &mut self.entries[usize::from(class)];
        self.live += usize::from(entry.uses == 0);
        entry.uses += 1;
    }

    /// One use less.
    pub fn drop(&mut self, class: ClassId) {
        let entry = &mut self.entries[usize::from(class)];
        debug_assert!(entry.uses > 0);
        entry.uses -= 1;
        self.live -= usize::from(entry.uses == 0);
    }

    /// Whether what has class `a` lives at least as long as what has class `b`.
    pub fn covers(&self, a: ClassId, b: ClassId) -> bool {
        if a == b {
            return true;
        }
        let (a, b) = (self.get(a), self.get(b));
        a.ttl >= b.ttl && a.priority >= b.priority
    }

    /// The class that covers both (not yet a use of it).
    pub fn join(&mut self, a: ClassId, b: ClassId) -> ClassId {
        if self.covers(a, b) {
            return a;
        }
        if self.covers(b, a) {
            return b;
        }
        let (a, b) = (self.get(a), self.get(b));
        let (ttl, priority) = (a.ttl.max(b.ttl), a.priority.max(b.priority));
        self.find_or_make(ttl, priority).unwrap_or_else(|| {
            let unused = Class { ttl: 0, priority: 0, uses: 0 };
            self.entries.resize(MAX_CLASSES, unused);
            let last = &mut self.entries[usize::from(LAST)];
            if last.uses == 0 {
                *last = unused;
            }
            (last.ttl, last.priority) = (last.ttl.max(ttl), last.priority.max(priority));
            LAST
        })
    }

    fn find_or_make(&mut self, ttl: u64, priority: u8) -> Option<ClassId> {
        let mut unused = None;
        for (class, entry) in self.entries.iter().enumerate().take(usize::from(LAST)) {
            if entry.uses == 0 {
                unused = unused.or(Some(class));
            } else if (entry.ttl, entry.priority) == (ttl, priority) {
                return Some(class as ClassId);
            }
        }
        let entry = Class { ttl, priority, uses: 0 };
        let class = match unused {
            Some(class) => class,
            None if self.entries.len() < usize::from(LAST) => {
                self.entries.push(entry);
                self.entries.len() - 1
            }
            None => return None,
        };
        self.entries[class] = entry;
        Some(class as ClassId)
    }

    /// `uses[class]` as others count them.
    pub fn check(&self, uses: &[usize]) -> std::result::Result<(), String> {
        for (class, entry) in self.entries.iter().enumerate() {
            let counted = uses.get(class).copied().unwrap_or(0);
            if entry.uses != counted {
                return Err(format!("class {class} has {} uses, {counted} are counted", entry.uses));
            }
        }
        let live = self.entries.iter().filter(|entry| entry.uses > 0).count();
        if live != self.live {
            return Err(format!("{live} classes live, the counter says {}", self.live));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retention(seconds: u64, priority: u8) -> Retention {
        Retention { ttl: Some(Duration::from_secs(seconds)), priority }
    }

    #[test]
    fn classes_are_shared_joined_and_used_again() {
        let mut classes = Classes::new();
        let [short, high] =
            [(10, 50), (5, 90)].map(|(ttl, priority)| classes.acquire(retention(ttl, priority)).unwrap());
        assert_eq!(classes.acquire(retention(10, 50)).unwrap(), short);
        let both = classes.join(short, high);
        classes.hold(both);
        assert!(classes.covers(both, short) && classes.covers(both, high) && !classes.covers(short, high));
        assert_eq!(classes.join(both, short), both);
        classes.check(&[2, 1, 1]).unwrap();
        classes.drop(high);
        assert_eq!(classes.acquire(Retention { ttl: None, priority: 0 }).unwrap(), high);
        assert!(classes.acquire(retention(1, 101)).is_err());
        classes.check(&[2, 1, 1]).unwrap();
    }

    #[test]
    fn too_many_kinds_are_an_error_and_joins_still_cover() {
        let mut classes = Classes::new();
        let ids: Vec<_> = (0..255).map(|i| classes.acquire(retention(1000 - i, (i % 100) as u8)).unwrap()).collect();
        assert!(matches!(classes.acquire(retention(5000, 1)), Err(Error::InvalidArgument(_))));
        for pair in ids.windows(2) {
            let join = classes.join(pair[0], pair[1]);
            classes.hold(join);
            assert!(classes.covers(join, pair[0]) && classes.covers(join, pair[1]));
        }
    }
}
