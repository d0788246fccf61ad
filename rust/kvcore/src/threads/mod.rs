//! One persistent worker pool: sized by affinity and CPU quota, safe after fork, interruptible.
//!
//! ```text
//! for_each(items): the caller takes items from the front, up to n - 1 workers from the back,
//!                  until none is left                                                         [`pool`]
//! expect(bytes):   what the next call will probably read: workers ask for it while they wait  [`ahead`]
//! scratch(n):      memory of calls that are over                                              [`memory`]
//! ```
//! The caller works too, so one thread means no hand-over at all. Which thread takes which item is chance; results
//! never depend on it, because items write disjoint outputs and sums run inside an item.

mod ahead;
mod memory;
mod pool;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use self::ahead::Ahead;
pub use self::memory::{Memory, Scratch};
use self::pool::Pool;
use crate::{Error, Result};

/// Asked between items, on the calling thread only: `true` stops the call with [`Error::Interrupted`].
pub type ShouldStop<'a> = &'a dyn Fn() -> bool;

/// Never stop early.
pub const NEVER: ShouldStop<'static> = &|| false;

/// The most threads that a pool may be asked for.
pub const MAX_THREADS: usize = 1024;

/// How often a call on several threads asks whether to stop: besides, it must ask the system whether this is still the
/// process that has the workers, which takes longer than many an item.
const PACE: Duration = Duration::from_millis(1);

/// A pool of `num_threads - 1` workers that start with the first parallel call and sleep when idle.
pub struct Threads {
    num_threads: usize,
    workers: Workers,
    ahead: Arc<Ahead>,
    memory: Memory,
}

/// Workers do not survive a fork, and the lock of their pool may be held by a thread that did not either. So each process
/// has a lock of its own.
struct Workers {
    process: u32,
    pool: Mutex<Option<Arc<Pool>>>,
    /// Those of a forked child.
    child: OnceLock<Box<Workers>>,
}

impl Workers {
    fn new() -> Self {
        Self { process: std::process::id(), pool: Mutex::new(None), child: OnceLock::new() }
    }

    /// Those of this process.
    fn here(&self) -> &Self {
        let process = std::process::id();
        let mut workers = self;
        while workers.process != process {
            workers = workers.child.get_or_init(|| Box::new(Self::new()));
        }
        workers
    }
}

impl Threads {
    /// A pool for `num_threads` threads, the calling one among them; `None`: as many as [`available`] says.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 or more than [`MAX_THREADS`].
    pub fn new(num_threads: Option<usize>) -> Result<Self> {
        let num_threads = num_threads.unwrap_or_else(available);
        if !(1..=MAX_THREADS).contains(&num_threads) {
            return Err(Error::InvalidArgument(format!(
                "num_threads: expected 1 to {MAX_THREADS} (or none, for all that are available), got {num_threads}"
            )));
        }
        Ok(Self { num_threads, workers: Workers::new(), ahead: Arc::default(), memory: Memory::default() })
    }

    /// Threads that a call may use, the calling one among them.
    pub fn num_threads(&self) -> usize {
        self.num_threads
    }

    /// Addresses that a call after this one will probably read, the last of them for its last items: workers that wait ask
    /// for them into their caches. A hint without effect on any value; nothing need be there.
    pub fn expect(&self, addresses: Range<usize>) {
        self.ahead.set(addresses);
    }

    /// Call `work` once for each item, on up to [`Self::num_threads`] threads, and wait for all.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if `should_stop` said so; some items were then not worked on.
    /// [`Error::InvalidState`] if the system refuses to start threads, or in a child that `should_stop` has forked.
    pub fn for_each<T: Send>(&self, items: Vec<T>, should_stop: ShouldStop<'_>, work: impl Fn(T) + Sync) -> Result<()> {
        self.for_each_with(items, should_stop, || (), |(), item| work(item))
    }

    /// [`Self::for_each`] with buffers that `make` makes once for each thread of the call.
    ///
    /// # Errors
    /// As [`Self::for_each`].
    pub fn for_each_with<T: Send, B>(
        &self,
        items: Vec<T>,
        should_stop: ShouldStop<'_>,
        make: impl Fn() -> B + Sync,
        work: impl Fn(&mut B, T) + Sync,
    ) -> Result<()> {
        let helpers = self.num_threads.min(items.len()).saturating_sub(1);
        if helpers == 0 {
            let mut buffers = make();
            for item in items {
                if should_stop() {
                    return Err(Error::Interrupted);
                }
                work(&mut buffers, item);
            }
            return Ok(());
        }
        if should_stop() {
            return Err(Error::Interrupted);
        }
        let pool = self.workers()?;
        let (items, stop) = (Mutex::new(items.into_iter()), AtomicBool::new(false));
        let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
        let last = || items.lock().unwrap_or_else(PoisonError::into_inner).next_back();
        let job = || {
            let mut buffers = make();
            while !stop.load(Ordering::Relaxed) {
                let Some(item) = last() else { break };
                work(&mut buffers, item);
            }
        };
        let is_here = pool.run(helpers, &job, || {
            let (mut buffers, mut asked) = (make(), Instant::now());
            loop {
                if asked.elapsed() >= PACE {
                    if should_stop() {
                        stop.store(true, Ordering::Relaxed);
                    }
                    // Whoever was asked may have forked: what the workers had is not done then, and never will be.
                    if !pool.is_here() {
                        return false;
                    }
                    if stop.load(Ordering::Relaxed) {
                        return true;
                    }
                    asked = Instant::now();
                }
                let Some(item) = next() else { return true };
                work(&mut buffers, item);
            }
        });
        if !is_here {
            let text = "the process was forked in the middle of a call: its workers stayed in the parent";
            return Err(Error::InvalidState(text.into()));
        }
        if stop.into_inner() { Err(Error::Interrupted) } else { Ok(()) }
    }

    fn workers(&self) -> Result<Arc<Pool>> {
        let mut pool = self.workers.here().pool.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = &*pool {
            return Ok(Arc::clone(pool));
        }
        // Where threads share CPUs, one that watches takes the time of one that works.
        let watch = self.num_threads <= available();
        let made = Arc::new(Pool::new(self.num_threads - 1, watch, Arc::clone(&self.ahead))?);
        Ok(Arc::clone(pool.insert(made)))
    }
}

/// CPUs that this process may use, by affinity and (on Linux) cgroup quota; at least 1.
pub fn available() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn every_item_is_worked_on_once_for_any_number_of_threads() {
        for threads in [1, 2, 5] {
            let threads = Threads::new(Some(threads)).unwrap();
            for n in [0, 1, 2, 100] {
                let mut out = vec![0u32; n];
                let items: Vec<_> = out.iter_mut().enumerate().collect();
                threads.for_each(items, NEVER, |(i, x)| *x += i as u32 + 1).unwrap();
                assert_eq!(out, (1..=n as u32).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn a_call_can_be_interrupted_and_the_pool_used_again() {
        for threads in [1, 2] {
            let threads = Threads::new(Some(threads)).unwrap();
            let done = AtomicUsize::new(0);
            let result = threads.for_each(vec![(); 1000], &|| done.load(Ordering::Relaxed) >= 3, |()| {
                done.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(std::time::Duration::from_micros(100));
            });
            assert_eq!(result, Err(Error::Interrupted));
            assert!(done.load(Ordering::Relaxed) < 1000);
            assert_eq!(threads.for_each(vec![(); 10], NEVER, |()| {}), Ok(()));
        }
    }

    #[test]
    fn sizes_are_checked() {
        assert!(Threads::new(Some(0)).is_err());
        assert!(Threads::new(Some(MAX_THREADS + 1)).is_err());
        assert!(Threads::new(None).unwrap().num_threads() >= 1);
    }
}
