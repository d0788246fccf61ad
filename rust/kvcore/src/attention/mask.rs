//! Which tokens a query sees.
//!
//! ```text
//! causal         0 ..= p                      p: the query's position
//! window of W    max(0, p - W + 1) ..= p      W counts the query's own token
//! cross          0 .. tokens                  whatever p is
//! ```
//! Always one run of tokens, and neither end ever moves back as p grows: all that the kernels need to know.
#![forbid(unsafe_code)]

use std::ops::Range;

use crate::{Error, Result};

/// Which tokens the rows of one sequence see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// Each row sees its own position and all before it.
    Causal,
    /// Each row sees its own position and those before it, this many in all (at least 1).
    Window(usize),
    /// Each row sees the same tokens: those of another sequence, such as an encoder's output.
    Cross {
        /// Their number, at least 1.
        tokens: usize,
    },
}

impl Mask {
    /// The tokens that a query at `position` sees.
    #[inline(always)]
    pub fn sees(self, position: usize) -> Range<usize> {
        match self {
            Mask::Causal => 0..position + 1,
            Mask::Window(width) => (position + 1).saturating_sub(width)..position + 1,
            Mask::Cross { tokens } => 0..tokens,
        }
    }

    /// All tokens that any of the queries at `start..start + len` sees.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a mask that shows nothing to a row, or positions that are no numbers.
    pub(super) fn checked(self, start: usize, len: usize) -> Result<Range<usize>> {
        match self {
            Mask::Window(0) => Err(Error::InvalidArgument("window: expected at least 1 token, got 0".into())),
            Mask::Cross { tokens: 0 } => {
                Err(Error::InvalidArgument("cross: expected at least 1 token to attend to, got 0".into()))
            }
            _ if len == 0 => Ok(0..0),
            _ => match start.checked_add(len) {
                Some(end) => Ok(self.sees(start).start..self.sees(end - 1).end),
                None => Err(Error::InvalidArgument(format!("block table: {len} rows from position {start} overflow"))),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_counts_its_own_token() {
        assert_eq!(Mask::Window(4).sees(9), 6..10);
        assert_eq!(Mask::Window(4).sees(2), 0..3);
        assert_eq!(Mask::Window(usize::MAX).sees(9), Mask::Causal.sees(9));
        assert_eq!(Mask::Window(4).checked(9, 3), Ok(6..12));
        assert_eq!(Mask::Cross { tokens: 5 }.checked(9, 3), Ok(0..5));
    }

    #[test]
    fn masks_that_show_nothing_are_errors() {
        assert!(Mask::Window(0).checked(0, 1).is_err());
        assert!(Mask::Cross { tokens: 0 }.checked(0, 1).is_err());
        assert!(Mask::Causal.checked(usize::MAX, 2).is_err());
        assert_eq!(Mask::Causal.checked(7, 0), Ok(0..0));
    }
}
