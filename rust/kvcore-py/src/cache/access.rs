//! The doors to a cache: looks and changes, each with the interpreter lock released and under the cache's own.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::time::Duration;

use kvcore::cache::KvCache;
use kvcore::threads::ShouldStop;
use kvcore::{Error, Result};
use pyo3::prelude::*;

use super::PyKvCache;
use super::options::seconds;
use crate::error::detached;

impl PyKvCache {
    /// What views have given up is free if that means no waiting; whoever takes blocks sees to it anyway.
    fn reclaim_views(&self) {
        if !self.ended_views.is_empty()
            && let Some(mut cache) = self.cache.try_change()
            && let Some(cache) = cache.as_mut()
        {
            cache.reclaim_views();
        }
    }

    /// A short read.
    pub(super) fn look<T: Send>(&self, py: Python<'_>, f: impl FnOnce(&KvCache) -> Result<T> + Send) -> PyResult<T> {
        detached(py, |should_stop| {
            self.reclaim_views();
            f(self.cache.look(should_stop)?.as_ref().ok_or_else(closed)?)
        })
    }

    /// A read that may take long.
    pub(super) fn look_long<T: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&KvCache, ShouldStop<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        detached(py, |should_stop| {
            self.reclaim_views();
            f(self.cache.look_long(should_stop)?.as_ref().ok_or_else(closed)?, should_stop)
        })
    }

    /// A short read that would rather be a change, and is one if that means no waiting: then it is told what time it is.
    pub(super) fn look_now<T: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&KvCache) -> Result<T> + Send,
    ) -> PyResult<T> {
        let now = self.now(py)?;
        detached(py, |should_stop| {
            if let Some(mut cache) = self.cache.try_change()
                && let Some(cache) = cache.as_mut()
            {
                tell(cache, now);
                return f(cache);
            }
            f(self.cache.look(should_stop)?.as_ref().ok_or_else(closed)?)
        })
    }

    /// A change that takes no time into account.
    pub(super) fn change<T: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&mut KvCache, ShouldStop<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        detached(py, |should_stop| f(self.cache.change(should_stop)?.as_mut().ok_or_else(closed)?, should_stop))
    }

    /// A change before which the cache is told what time it is.
    pub(super) fn change_now<T: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&mut KvCache, ShouldStop<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        let now = self.now(py)?;
        self.change(py, |cache, should_stop| {
            tell(cache, now);
            f(cache, should_stop)
        })
    }

    /// What the caller's clock says; None for the system's, and where the clock itself uses the cache.
    fn now(&self, py: Python<'_>) -> PyResult<Option<Duration>> {
        let Some(clock) = &self.clock else { return Ok(None) };
        if ASKING.replace(true) {
            return Ok(None);
        }
        let said = clock.call0(py);
        ASKING.set(false);
        seconds("clock()", said?.bind(py)).map(Some)
    }
}

thread_local! {
    /// Whether this thread is asking a caller's clock.
    static ASKING: Cell<bool> = const { Cell::new(false) };
}

fn tell(cache: &mut KvCache, now: Option<Duration>) {
    match now {
        Some(now) => cache.set_now(now),
        None => cache.tick(),
    }
}

pub(super) fn closed() -> Error {
    Error::InvalidState("the cache is closed".into())
}
