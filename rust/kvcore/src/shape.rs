//! Checks of the shapes that callers give as lengths of slices.
#![forbid(unsafe_code)]

use crate::{Error, Result};

/// `Err(InvalidArgument)` unless `got == expected`.
pub(crate) fn expect_len(what: &str, shape: &str, expected: usize, got: usize) -> Result<()> {
    if expected == got {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!("{what}: expected {expected} values ({shape}), got {got}")))
}

/// The rows in `len` values of `width` each.
pub(crate) fn rows_of(what: &str, len: usize, width: usize) -> Result<usize> {
    if width == 0 || !len.is_multiple_of(width) {
        return Err(Error::InvalidArgument(format!(
            "{what}: expected whole rows of {width} values (at least 1), got {len} values"
        )));
    }
    Ok(len / width)
}
