//! Waiting for a lock, except where that could never end.
#![forbid(unsafe_code)]

use std::sync::{LockResult, PoisonError, TryLockError, TryLockResult};

use kvcore::{Error, Result};

use crate::error::in_signal_handler;

/// Waits for a lock; in a signal handler, which runs in the middle of a call that may hold it, only tries.
pub fn locked_or_busy<G>(
    wait: impl FnOnce() -> LockResult<G>,
    attempt: impl FnOnce() -> TryLockResult<G>,
) -> Result<G> {
    if !in_signal_handler() {
        return Ok(wait().unwrap_or_else(PoisonError::into_inner));
    }
    match attempt() {
        Ok(guard) => Ok(guard),
        Err(TryLockError::Poisoned(guard)) => Ok(guard.into_inner()),
        Err(TryLockError::WouldBlock) => {
            Err(Error::InvalidState("in use by the call that this signal handler interrupts".into()))
        }
    }
}
