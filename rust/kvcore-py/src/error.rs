//! Errors of the core as Python exceptions, and the one doorway through which calls leave the interpreter lock.
#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use kvcore::Error;
use kvcore::threads::ShouldStop;
use pyo3::prelude::*;

/// The classes of `kvcore.errors`, where they are defined: some are `ValueError` or `MemoryError` as well.
mod classes {
    #![allow(missing_docs)]
    pyo3::import_exception!(kvcore.errors, CheckpointError);
    pyo3::import_exception!(kvcore.errors, InvalidArgument);
    pyo3::import_exception!(kvcore.errors, InvalidHandle);
    pyo3::import_exception!(kvcore.errors, InvalidState);
    pyo3::import_exception!(kvcore.errors, KvcoreError);
    pyo3::import_exception!(kvcore.errors, OutOfBlocks);
    pyo3::import_exception!(kvcore.errors, OutOfMemory);
    pyo3::import_exception!(kvcore.errors, PinLimit);
    pyo3::import_exception!(kvcore.errors, StaleBatch);
    pyo3::import_exception!(kvcore.errors, UnsupportedSimd);
}

/// One exception class for each variant.
pub fn to_python(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::OutOfBlocks { .. } => classes::OutOfBlocks::new_err(message),
        Error::InvalidArgument(_) => classes::InvalidArgument::new_err(message),
        Error::InvalidHandle(_) => classes::InvalidHandle::new_err(message),
        Error::StaleBatch(_) => classes::StaleBatch::new_err(message),
        Error::InvalidState(_) => classes::InvalidState::new_err(message),
        Error::PinLimit { .. } => classes::PinLimit::new_err(message),
        Error::OutOfMemory { .. } => classes::OutOfMemory::new_err(message),
        Error::Checkpoint(_) | Error::Spill { .. } => classes::CheckpointError::new_err(message),
        Error::UnsupportedSimd(_) => classes::UnsupportedSimd::new_err(message),
        _ => classes::KvcoreError::new_err(message),
    }
}

/// An `InvalidArgument`.
pub fn invalid(message: String) -> PyErr {
    classes::InvalidArgument::new_err(message)
}

/// How often a long call looks for Ctrl-C.
const POLL: Duration = Duration::from_millis(50);

thread_local! {
    /// Whether this thread is in a signal handler that a long call of ours runs.
    static IN_HANDLER: Cell<bool> = const { Cell::new(false) };
}

/// Whether the caller is Python code (a signal handler) that runs in the middle of a call of ours on the same thread:
/// what that call has locked stays locked for as long as the handler runs, so it must not be waited for.
pub fn in_signal_handler() -> bool {
    IN_HANDLER.get()
}

/// Looks for pending signals, at most every [`POLL`].
struct Signals {
    next: Cell<Instant>,
    raised: RefCell<Option<PyErr>>,
}

impl Signals {
    fn poll(&self) -> bool {
        let now = Instant::now();
        if now < self.next.get() {
            return false;
        }
        self.next.set(now + POLL);
        // Python runs signal handlers on its main thread alone; on others this finds nothing.
        let outer = IN_HANDLER.replace(true);
        let handled = Python::attach(|py| py.check_signals());
        IN_HANDLER.set(outer);
        match handled {
            Ok(()) => false,
            Err(raised) => {
                *self.raised.borrow_mut() = Some(raised);
                true
            }
        }
    }
}

/// The doorway: run `work` without the interpreter lock, so that other Python threads run on; a signal handler that
/// raises (Ctrl-C) stops it.
///
/// # Errors
/// What `work` returns, or what the signal handler raised.
pub fn detached<T: Send>(py: Python<'_>, work: impl FnOnce(ShouldStop<'_>) -> kvcore::Result<T> + Send) -> PyResult<T> {
    let (result, raised) = py.detach(|| {
        let signals = Signals { next: Cell::new(Instant::now() + POLL), raised: RefCell::new(None) };
        let result = work(&|| signals.poll());
        (result, signals.raised.into_inner())
    });
    match (result, raised) {
        (Err(Error::Interrupted), Some(raised)) => Err(raised),
        (result, _) => result.map_err(to_python),
    }
}
