//! The lock of a cache: reads run side by side, changes one at a time, and nobody waits where that could never end.
//!
//! ```text
//! look:      a read of microseconds: waits for the change that runs, never for one that waits
//! look_long: attend, read, save, check: waits for changes that have waited for PATIENCE, too, so that none starves
//! change:    waits for all that run; lets others go first that have waited for PATIENCE, until it has itself
//! ```
//! Who waits tries again and again instead of queueing in the lock itself. So it can look for Ctrl-C meanwhile, other
//! reads pass it, and a child process can tell that the thread which held the lock was left behind in its parent.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError, TryLockResult};
use std::thread;
use std::time::{Duration, Instant};

use kvcore::threads::ShouldStop;
use kvcore::{Error, Result};

use crate::error::in_signal_handler;

/// How long one waits before those who come later have to let it go first.
const PATIENCE: Duration = Duration::from_micros(500);

/// How long a child process waits for what somebody held at its fork. Its own threads hold it in passing only.
const SETTLING: Duration = Duration::from_millis(50);

/// Tries before the first sleep: most calls hold the lock for less time than it takes to fall asleep.
const YIELDS: u32 = 10;

/// The longest sleep between two tries: in PATIENCE, for which others hold back, there is one.
const SLICE: Duration = Duration::from_micros(400);

/// Forks of which this process is the child: one more than in its parent.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// To be called in the child after a fork.
pub fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A value that many may look at, or one change.
pub struct Shared<T> {
    value: RwLock<T>,
    /// [`FORKS`] when nobody held it who is not in this process.
    forks: AtomicU32,
    /// Changes, and reads, that have waited for [`PATIENCE`].
    changes: AtomicUsize,
    reads: AtomicUsize,
}

impl<T> Shared<T> {
    pub fn new(value: T) -> Self {
        Self {
            value: RwLock::new(value),
            forks: AtomicU32::new(FORKS.load(Ordering::Relaxed)),
            changes: AtomicUsize::new(0),
            reads: AtomicUsize::new(0),
        }
    }

    /// For a read that is short.
    ///
    /// # Errors
    /// [`Error::Interrupted`]; [`Error::InvalidState`] where waiting could never end: in a signal handler, and in a child
    /// process whose parent was changing the value at the fork.
    pub fn look(&self, should_stop: ShouldStop<'_>) -> Result<RwLockReadGuard<'_, T>> {
        self.get(should_stop, &self.reads, |_| free(self.value.try_read()))
    }

    /// For a read that may be long.
    ///
    /// # Errors
    /// As [`Self::look`].
    pub fn look_long(&self, should_stop: ShouldStop<'_>) -> Result<RwLockReadGuard<'_, T>> {
        self.get(should_stop, &self.reads, |_| {
            // Changes that waited at a fork wait in the parent only.
            let are_changes = self.changes.load(Ordering::Relaxed) != 0 && self.is_of(FORKS.load(Ordering::Relaxed));
            let is_its_turn = !are_changes || in_signal_handler();
            if is_its_turn { free(self.value.try_read()) } else { None }
        })
    }

    /// For a change.
    ///
    /// # Errors
    /// As [`Self::look`]; in a child process also if a thread of the parent was only reading.
    pub fn change(&self, should_stop: ShouldStop<'_>) -> Result<RwLockWriteGuard<'_, T>> {
        self.get(should_stop, &self.changes, |is_impatient| {
            let nobody_is = || self.changes.load(Ordering::Relaxed) == 0 && self.reads.load(Ordering::Relaxed) == 0;
            if is_impatient || nobody_is() || in_signal_handler() { self.try_change() } else { None }
        })
    }

    /// For a change that can as well be made another time.
    pub fn try_change(&self) -> Option<RwLockWriteGuard<'_, T>> {
        free(self.value.try_write())
    }

    /// The same for all: what is asked for, at once if it can be had.
    #[inline]
    fn get<G>(
        &self,
        should_stop: ShouldStop<'_>,
        impatient: &AtomicUsize,
        attempt: impl Fn(bool) -> Option<G>,
    ) -> Result<G> {
        if self.is_ours()
            && let Some(guard) = attempt(false)
        {
            return Ok(guard);
        }
        self.wait(should_stop, impatient, attempt)
    }

    #[cold]
    fn wait<G>(
        &self,
        should_stop: ShouldStop<'_>,
        impatient: &AtomicUsize,
        attempt: impl Fn(bool) -> Option<G>,
    ) -> Result<G> {
        let start = Instant::now();
        let mut impatience = None;
        for round in 0.. {
            let is_ours = self.is_ours();
            if let Some(guard) = attempt(impatience.is_some()) {
                return Ok(guard);
            }
            if in_signal_handler() {
                // It runs in the middle of a call of this thread, which may be the one that holds the lock.
                return Err(Error::InvalidState(
                    "in use by another call, for which a signal handler must not wait".into(),
                ));
            }
            let waited = start.elapsed();
            if !is_ours && waited > SETTLING {
                return Err(Error::InvalidState(
                    "this process was forked while another thread was in a call: in the child that call never ends. \
                     Make a new cache here, or fork when no other thread uses it"
                        .into(),
                ));
            }
            if impatience.is_none() && waited > PATIENCE {
                impatience = Some(Impatience::new(impatient));
            }
            if should_stop() {
                return Err(Error::Interrupted);
            }
            if round < YIELDS {
                thread::yield_now();
            } else {
                // Late by a small part of the time that it has taken anyway.
                thread::sleep((waited / 8).clamp(Duration::from_micros(20), SLICE));
            }
        }
        unreachable!("an endless loop")
    }

    /// Whether all that hold the lock are in this process: a fork copies the lock, but of the threads only one.
    #[inline]
    fn is_ours(&self) -> bool {
        let forks = FORKS.load(Ordering::Relaxed);
        self.is_of(forks) || self.is_free_after(forks)
    }

    #[inline]
    fn is_of(&self, forks: u32) -> bool {
        self.forks.load(Ordering::Acquire) == forks
    }

    /// After a fork: whether nobody was in the middle of a call. From then on the lock is this process's own.
    #[cold]
    fn is_free_after(&self, forks: u32) -> bool {
        let Some(_nobody_else) = self.try_change() else { return false };
        // Another thread may have been here just before, and others may wait since.
        if self.forks.load(Ordering::Relaxed) != forks {
            self.changes.store(0, Ordering::Relaxed);
            self.reads.store(0, Ordering::Relaxed);
            self.forks.store(forks, Ordering::Release);
        }
        true
    }
}

/// One that has waited for too long, until it has waited.
struct Impatience<'a>(&'a AtomicUsize);

impl<'a> Impatience<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Impatience<'_> {
    fn drop(&mut self) {
        // It is 0 already if a signal handler has forked this process while it waited.
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_sub(1));
    }
}

/// The guard, if it could be had. A panic in the middle of a change would have been a bug of the core; it is told by `check`.
fn free<G>(attempt: TryLockResult<G>) -> Option<G> {
    match attempt {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(guard)) => Some(guard.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}
