//! Memory whose size callers decide: asked for before anything is changed, and an error where there is none.
#![forbid(unsafe_code)]

use std::collections::TryReserveError;

use crate::{Error, Result};

/// An empty list with room for `len` values.
pub(super) fn room<T>(len: usize, what: &'static str) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|e| refused::<T>(len, what, &e))?;
    Ok(values)
}

/// A copy.
pub(super) fn copied<T: Copy>(values: &[T], what: &'static str) -> Result<Vec<T>> {
    let mut copy = room(values.len(), what)?;
    copy.extend_from_slice(values);
    Ok(copy)
}

/// Room for `more` values behind those that are there; in the long run each is moved few times.
pub(super) fn make_room<T>(values: &mut Vec<T>, more: usize, what: &'static str) -> Result<()> {
    values.try_reserve(more).map_err(|e| refused::<T>(values.len().saturating_add(more), what, &e))
}

fn refused<T>(len: usize, what: &'static str, e: &TryReserveError) -> Error {
    Error::OutOfMemory { bytes: len.saturating_mul(size_of::<T>()), what, reason: e.to_string() }
}
