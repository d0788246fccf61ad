//! Arguments of drafts that branch: lists of rows, one for each sequence of a plan.
#![forbid(unsafe_code)]

use kvcore::attention::MAX_TREE_ROWS;
use kvcore::cache::MAX_ROWS_OF_TREES;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use super::handles::MAX_ITEMS;
use crate::arguments::wrong_type;
use crate::error::invalid;

/// For each row the one that it follows, none for the token before.
type Parents = Vec<Option<usize>>;

/// The argument `parents` of a plan: for each sequence a list, or None.
pub fn parents(value: &Bound<'_, PyAny>) -> PyResult<Vec<Option<Parents>>> {
    let mut left = MAX_ROWS_OF_TREES;
    lists("parents", value, |name, list| {
        integers(name, list, MAX_TREE_ROWS.min(left), |row| {
            left -= 1;
            match row {
                -1 => Some(None),
                row => usize::try_from(row).ok().map(Some),
            }
        })
    })
}

/// The argument `keep` of a commit of `num_tokens` rows: for each sequence a list, or None.
pub fn rows(value: &Bound<'_, PyAny>, num_tokens: usize) -> PyResult<Vec<Option<Vec<usize>>>> {
    let mut left = num_tokens;
    lists("keep", value, |name, list| {
        integers(name, list, left, |row| {
            left -= 1;
            usize::try_from(row).ok()
        })
    })
}

fn lists<T>(
    name: &str,
    value: &Bound<'_, PyAny>,
    mut get: impl FnMut(&str, &Bound<'_, PyAny>) -> PyResult<T>,
) -> PyResult<Vec<Option<T>>> {
    const EXPECTED: &str = "a list with a list of rows (or None) for each sequence";
    let mut all = Vec::new();
    for list in value.try_iter().map_err(|_| wrong_type(name, EXPECTED, value))? {
        let list = list?;
        if all.len() == MAX_ITEMS {
            return Err(invalid(format!("{name}: expected at most {MAX_ITEMS} lists, got more")));
        }
        all.push(match list.is_none() {
            true => None,
            false => Some(get(&format!("{name}[{}]", all.len()), &list)?),
        });
    }
    Ok(all)
}

/// At most `most` integers; `get` says what each means, or nothing of one that is out of range.
fn integers<T>(
    name: &str,
    value: &Bound<'_, PyAny>,
    most: usize,
    mut get: impl FnMut(i64) -> Option<T>,
) -> PyResult<Vec<T>> {
    let mut all = Vec::new();
    for item in value.try_iter().map_err(|_| wrong_type(name, "a list of rows or None", value))? {
        let item = item?;
        if all.len() == most {
            return Err(invalid(format!("{name}: expected at most {most} rows, got more")));
        }
        let wrong = || {
            let got = item.repr().map_or_else(|_| "another".into(), |repr| repr.to_string());
            invalid(format!("{name}: expected rows, got {got}"))
        };
        if item.is_instance_of::<PyBool>() {
            return Err(wrong_type(name, "integers", &item));
        }
        let row = item.extract::<i64>().map_err(|e| {
            if e.is_instance_of::<PyOverflowError>(item.py()) {
                wrong()
            } else if e.is_instance_of::<PyTypeError>(item.py()) {
                wrong_type(name, "integers", &item)
            } else {
                e
            }
        })?;
        all.push(get(row).ok_or_else(wrong)?);
    }
    Ok(all)
}
