//! Workers that help with one job at a time, and wait for the next one without sleeping at once.
//!
//! ```text
//! caller    lend the job, work on it; then take it back, and wait for those who are still at it
//! worker    watch for a job for a tenth of a millisecond, asking for what it will read (ahead.rs); then sleep until one
//!           wakes it; take part, watch again
//! ```
//! A decode step is some hundred short jobs, one after the other. To wake a sleeping thread takes longer than many of
//! them, so a worker watches for a little while first; when nothing comes it sleeps, and an idle pool costs nothing. A
//! worker that comes too late finds the job taken back: nobody waits for it.
//!
//! A job is a borrowed closure. Its lifetime is erased for the workers, which is sound because [`Pool::run`] does not
//! return, not even by a panic, before the job is taken back and the last worker has left it.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::ahead::Ahead;
use crate::{Error, Result};

/// How long a worker watches for a job before it sleeps.
const WATCH: Duration = Duration::from_micros(100);

/// Looks between two looks at the clock.
const LOOKS: usize = 50;

/// Some workers, of the process that made them: a forked child has none, and any lock may be held by one of them.
pub struct Pool {
    shared: Arc<Shared>,
    process: u32,
}

struct Shared {
    state: Mutex<State>,
    /// Wakes sleeping workers.
    wake: Condvar,
    /// Grows with each job, for those who watch.
    jobs: AtomicUsize,
    /// Workers within the job.
    working: AtomicUsize,
    ahead: Arc<Ahead>,
}

#[derive(Default)]
struct State {
    job: Option<Job>,
    /// Workers that may still join.
    wanted: usize,
    sleeping: usize,
    closed: bool,
    panic: Option<Payload>,
}

/// What a thread panics with.
type Payload = Box<dyn std::any::Any + Send>;

/// A borrowed closure without its lifetime.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn() + Sync));

// SAFETY: the closure is `Sync`, so a reference to it may be used on any thread; that it is there, is the promise of
// `Pool::run`.
#[allow(unsafe_code)]
unsafe impl Send for Job {}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pool {
    /// Start `count` workers, which watch for jobs before they sleep if `watch`, and go `ahead` meanwhile.
    ///
    /// # Errors
    /// [`Error::InvalidState`] if the system refuses to start threads.
    pub fn new(count: usize, watch: bool, ahead: Arc<Ahead>) -> Result<Self> {
        let pool = Self {
            process: std::process::id(),
            shared: Arc::new(Shared {
                state: Mutex::default(),
                wake: Condvar::new(),
                jobs: AtomicUsize::new(0),
                working: AtomicUsize::new(0),
                ahead,
            }),
        };
        for i in 0..count {
            let shared = Arc::clone(&pool.shared);
            std::thread::Builder::new()
                .name(format!("kvcore-{i}"))
                .spawn(move || shared.serve(if watch { WATCH } else { Duration::ZERO }))
                .map_err(|e| Error::InvalidState(format!("cannot start {count} threads: {e}")))?;
        }
        Ok(pool)
    }

    /// Whether this is the process that has the workers.
    pub fn is_here(&self) -> bool {
        self.process == std::process::id()
    }

    /// Call `here` on this thread and meanwhile `job` on up to `helpers` workers; `here` alone, if the workers are at
    /// another caller's. `here` says whether the process is still that of the workers; so does the result.
    ///
    /// # Panics
    /// If either does.
    pub fn run(&self, helpers: usize, job: &(dyn Fn() + Sync), here: impl FnOnce() -> bool) -> bool {
        let shared = &*self.shared;
        {
            let mut state = shared.lock();
            if state.job.is_some() {
                drop(state);
                return here();
            }
            // SAFETY: only the lifetime changes. The borrow ends after `take_back`, and then no worker has
            // the pointer: it is taken from `state.job` under the lock alone, by workers that count themselves in
            // `working` before they release it.
            #[allow(unsafe_code)]
            let erased = unsafe { std::mem::transmute::<&(dyn Fn() + Sync), &'static (dyn Fn() + Sync)>(job) };
            (state.job, state.wanted) = (Some(Job(erased)), helpers);
            shared.jobs.fetch_add(1, Ordering::Release);
            if state.sleeping > 0 {
                shared.wake.notify_all();
            }
        }
        let lent = Lent(self);
        let is_here = here();
        let panic = if is_here { lent.take_back() } else { None };
        std::mem::forget(lent);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
        is_here
    }
}

/// The workers have the job.
struct Lent<'a>(&'a Pool);

impl Lent<'_> {
    /// Take the job back and wait for the workers within it; what one of them panicked with.
    fn take_back(&self) -> Option<Payload> {
        let shared = &*self.0.shared;
        let mut state = shared.lock();
        state.wanted = 0;
        drop(state);
        let mut looks = 0usize;
        while shared.working.load(Ordering::Acquire) > 0 {
            looks += 1;
            if looks.is_multiple_of(LOOKS) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        // Now another caller may come.
        state = shared.lock();
        state.job = None;
        state.panic.take()
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        // Only behind a panic of the caller's.
        if self.0.is_here() {
            self.take_back();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if !self.is_here() {
            return;
        }
        let mut state = self.shared.lock();
        state.closed = true;
        // Under the lock: a worker that has just looked, and not begun to sleep, would miss it.
        self.shared.jobs.fetch_add(1, Ordering::Release);
        self.shared.wake.notify_all();
    }
}

impl Shared {
    /// A worker's life.
    fn serve(&self, watch: Duration) {
        let mut seen = 0;
        loop {
            self.watch(seen, watch);
            let mut state = self.lock();
            while self.jobs.load(Ordering::Acquire) == seen {
                state.sleeping += 1;
                state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.sleeping -= 1;
            }
            seen = self.jobs.load(Ordering::Acquire);
            if state.closed {
                return;
            }
            let Some(job) = state.job.filter(|_| state.wanted > 0) else { continue };
            state.wanted -= 1;
            self.working.fetch_add(1, Ordering::Relaxed);
            drop(state);
            // SAFETY: `wanted` was above 0 under the lock, so `take_back` is still to come, and it waits until `working`
            // is counted down below. Until then the closure is borrowed.
            #[allow(unsafe_code)]
            let result = catch_unwind(AssertUnwindSafe(|| unsafe { &*job.0 }()));
            if let Err(panic) = result {
                self.lock().panic = Some(panic);
            }
            self.working.fetch_sub(1, Ordering::Release);
        }
    }

    /// Until there is a new job, but not for long.
    fn watch(&self, seen: usize, watch: Duration) {
        let start = Instant::now();
        while self.jobs.load(Ordering::Acquire) == seen {
            for _ in 0..LOOKS {
                self.ahead.step();
                std::hint::spin_loop();
                if self.jobs.load(Ordering::Acquire) != seen {
                    return;
                }
            }
            if start.elapsed() >= watch {
                return;
            }
            // Whoever else wants this CPU may have it.
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Jobs of a test, or few of them under an interpreter.
    const JOBS: usize = if cfg!(miri) { 20 } else { 200 };

    #[test]
    fn all_take_part_and_none_stays() {
        for watch in [false, true] {
            let pool = Pool::new(3, watch, Arc::default()).unwrap();
            for round in 0..JOBS {
                let (left, calls) = (AtomicUsize::new(100), AtomicUsize::new(0));
                let work = || {
                    calls.fetch_add(1, Ordering::Relaxed);
                    while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok() {}
                };
                assert!(pool.run(3, &work, || {
                    work();
                    true
                }));
                assert_eq!(left.into_inner(), 0);
                assert!((1..=4).contains(&calls.into_inner()));
                if round % 10 == 9 {
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
        }
    }

    #[test]
    fn callers_at_the_same_time_do_not_wait_for_each_other() {
        let pool = Pool::new(1, true, Arc::default()).unwrap();
        let (sum, calls) = (AtomicUsize::new(0), JOBS / 2);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..calls {
                        let work = || {
                            sum.fetch_add(1, Ordering::Relaxed);
                        };
                        pool.run(1, &work, || {
                            work();
                            true
                        });
                    }
                });
            }
        });
        assert!((4 * calls..=8 * calls).contains(&sum.into_inner()));
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(1, true, Arc::default()).unwrap();
        let met = AtomicUsize::new(0);
        let on_the_worker = catch_unwind(AssertUnwindSafe(|| {
            let job = || {
                met.store(1, Ordering::Relaxed);
                panic!("worker");
            };
            pool.run(1, &job, || {
                while met.load(Ordering::Relaxed) == 0 {
                    std::thread::yield_now();
                }
                true
            });
        }));
        assert!(on_the_worker.is_err());
        let here = catch_unwind(AssertUnwindSafe(|| pool.run(1, &|| {}, || panic!("caller"))));
        assert!(here.is_err());
        let calls = AtomicUsize::new(0);
        let work = || {
            calls.fetch_add(1, Ordering::Relaxed);
        };
        pool.run(1, &work, || {
            work();
            true
        });
        assert!((1..=2).contains(&calls.into_inner()));
    }
}
