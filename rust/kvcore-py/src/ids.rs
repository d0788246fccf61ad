//! Token ids and other whole numbers, many at once: from arrays, sequences, and iterators that may never end.
#![forbid(unsafe_code)]

use kvcore::Error;
use numpy::{Element, PyArray, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PySlice, PyString};

use crate::arguments::type_name;
use crate::arrays::check_shape;
use crate::error::{invalid, to_python};

/// The most token ids of one call: beyond any model's context, within any machine's memory.
pub const MAX_IDS: usize = 1 << 27;

/// Items of an iterator between two looks for Ctrl-C, and of an array that are converted at once.
const PIECE: usize = 1 << 16;

/// Token ids: integers from 0 to 2^32 - 2.
pub fn token_ids(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    Ids { name, what: "ids", end: u32::MAX, most: MAX_IDS }.read(value)
}

/// At most `most` positions in a list of `len`.
pub fn indices(name: &str, value: &Bound<'_, PyAny>, len: usize, most: usize) -> PyResult<Vec<u32>> {
    Ids { name, what: "indices", end: u32::try_from(len).unwrap_or(u32::MAX), most }.read(value)
}

/// Room for some values, or the error that the system has none.
pub fn room<T>(len: usize, what: &'static str) -> kvcore::Result<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|e| refused(len.saturating_mul(size_of::<T>()), what, &e))?;
    Ok(values)
}

fn refused(bytes: usize, what: &'static str, e: &std::collections::TryReserveError) -> Error {
    Error::OutOfMemory { bytes, what, reason: e.to_string() }
}

/// What is expected.
struct Ids<'a> {
    name: &'a str,
    what: &'a str,
    end: u32,
    most: usize,
}

impl Ids<'_> {
    fn read(&self, value: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        if value.is_instance_of::<PyString>() || value.is_instance_of::<PyBytes>() {
            return Err(self.no_sequence(value));
        }
        match value.cast::<PyUntypedArray>() {
            Ok(array) => self.array(array),
            Err(_) => self.items(value),
        }
    }

    fn array(&self, array: &Bound<'_, PyUntypedArray>) -> PyResult<Vec<u32>> {
        check_shape(self.name, array.shape(), &[None])?;
        let len = array.len();
        self.check_len(len)?;
        let mut ids = room(len, "token ids").map_err(to_python)?;
        if self.native::<u32>(array, &mut ids)?
            || self.native::<i32>(array, &mut ids)?
            || self.native::<i64>(array, &mut ids)?
            || self.native::<u64>(array, &mut ids)?
        {
            return Ok(ids);
        }
        let kind: String = array.dtype().getattr("kind")?.extract()?;
        let wide = match kind.as_str() {
            "i" => "int64",
            "u" => "uint64",
            _ => return Err(PyTypeError::new_err(format!("{}: expected integers, got {}", self.name, array.dtype()))),
        };
        for start in (0..len).step_by(PIECE) {
            array.py().check_signals()?;
            let piece = PySlice::new(array.py(), start as isize, len.min(start + PIECE) as isize, 1);
            let piece = array.as_any().get_item(piece)?.call_method1("astype", (wide,))?;
            let piece = piece.cast::<PyUntypedArray>()?;
            let _ = self.native::<i64>(piece, &mut ids)? || self.native::<u64>(piece, &mut ids)?;
        }
        Ok(ids)
    }

    /// Takes all of an array of this type; whether it is one.
    fn native<T: Element + Copy + Into<i128>>(
        &self,
        array: &Bound<'_, PyUntypedArray>,
        ids: &mut Vec<u32>,
    ) -> PyResult<bool> {
        let Ok(typed) = array.cast::<PyArray<T, numpy::Ix1>>() else { return Ok(false) };
        for &id in typed.try_readonly()?.as_array() {
            let id: i128 = id.into();
            ids.push(self.checked(id).ok_or_else(|| self.out_of_range(&id.to_string()))?);
        }
        Ok(true)
    }

    fn items(&self, value: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        // Only a hint: an object may claim any length, or none.
        let hint = value.len().unwrap_or(0);
        self.check_len(hint)?;
        let mut ids: Vec<u32> = Vec::with_capacity(hint.min(PIECE));
        for item in value.try_iter().map_err(|_| self.no_sequence(value))? {
            let item = item?;
            if ids.len() == self.most {
                return Err(self.too_many("more"));
            }
            if ids.len() % PIECE == PIECE - 1 {
                // An iterator in C gives Python no occasion to do so.
                value.py().check_signals()?;
            }
            if ids.len() == ids.capacity() {
                let more = ids.len().clamp(16, self.most - ids.len());
                ids.try_reserve(more)
                    .map_err(|e| to_python(refused((ids.len() + more) * size_of::<u32>(), "token ids", &e)))?;
            }
            ids.push(self.item(&item)?);
        }
        Ok(ids)
    }

    fn item(&self, item: &Bound<'_, PyAny>) -> PyResult<u32> {
        let no_integer = || {
            let got = item.repr().map_or_else(|_| "something else".into(), |r| r.to_string());
            PyTypeError::new_err(format!("{}: expected integers, got {got}", self.name))
        };
        if item.is_instance_of::<PyBool>() {
            return Err(no_integer());
        }
        match item.extract::<i64>() {
            Ok(id) => self.checked(id.into()).ok_or_else(|| self.out_of_range(&id.to_string())),
            Err(e) if e.is_instance_of::<PyOverflowError>(item.py()) => Err(self.out_of_range("one beyond 64 bits")),
            Err(e) if e.is_instance_of::<PyTypeError>(item.py()) => Err(no_integer()),
            Err(e) => Err(e),
        }
    }

    fn checked(&self, id: i128) -> Option<u32> {
        u32::try_from(id).ok().filter(|&id| id < self.end)
    }

    fn check_len(&self, len: usize) -> PyResult<()> {
        if len > self.most { Err(self.too_many(&len.to_string())) } else { Ok(()) }
    }

    #[cold]
    fn too_many(&self, got: &str) -> PyErr {
        invalid(format!("{}: expected at most {} {}, got {got}", self.name, self.most, self.what))
    }

    #[cold]
    fn out_of_range(&self, got: &str) -> PyErr {
        let Self { name, what, end, .. } = self;
        match end.checked_sub(1) {
            Some(last) => invalid(format!("{name}: expected {what} from 0 to {last}, got {got}")),
            None => invalid(format!("{name}: expected none, as there is nothing to point at, got {got}")),
        }
    }

    #[cold]
    fn no_sequence(&self, value: &Bound<'_, PyAny>) -> PyErr {
        PyTypeError::new_err(format!("{}: expected a sequence of integers, got {}", self.name, type_name(value)))
    }
}
