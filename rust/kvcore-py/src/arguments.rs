//! Single arguments whose faults are told with their name, what was expected, and what came.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use pyo3::exceptions::{PyOverflowError, PyTypeError, PyUnicodeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyString};

use crate::error::invalid;

/// What to call a value in a message.
pub fn type_name(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(|_| "something else".into(), |name| name.to_string())
}

/// A `TypeError` with all that it should say.
pub fn wrong_type(name: &str, expected: &str, got: &Bound<'_, PyAny>) -> PyErr {
    PyTypeError::new_err(format!("{name}: expected {expected}, got {}", type_name(got)))
}

/// A number as float64. True is none.
pub fn number(name: &str, expected: &str, value: &Bound<'_, PyAny>) -> PyResult<f64> {
    // numpy's own is no bool to Python, and is called bool_ before numpy 2.
    if value.is_instance_of::<PyBool>() || matches!(type_name(value).as_str(), "bool" | "bool_") {
        return Err(wrong_type(name, expected, value));
    }
    value.extract().map_err(|e: PyErr| {
        if e.is_instance_of::<PyOverflowError>(value.py()) {
            invalid(format!("{name}: expected {expected}, got an integer beyond float64"))
        } else if e.is_instance_of::<PyTypeError>(value.py()) {
            wrong_type(name, expected, value)
        } else {
            e
        }
    })
}

/// A number that float32 holds. Of others the digits that came are told, not what float32 makes of them.
pub fn float32(name: &str, kind: &str, expected: &str, value: &Bound<'_, PyAny>) -> PyResult<f32> {
    let number = number(name, kind, value)?;
    let narrow = number as f32;
    if narrow.is_finite() {
        return Ok(narrow);
    }
    Err(invalid(format!("{name}: expected {expected} in the range of float32 (up to 3.4e38), got {number:?}")))
}

/// True or False.
pub fn flag(name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
    value.extract().map_err(|_| wrong_type(name, "True or False", value))
}

/// Text that UTF-8 can hold.
pub fn text<'a>(name: &str, value: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
    let text = value.cast::<PyString>().map_err(|_| wrong_type(name, "a str", value))?;
    text.to_str().map_err(|_| no_text(name, value))
}

/// A path of the file system.
pub fn path(name: &str, value: &Bound<'_, PyAny>) -> PyResult<PathBuf> {
    let path: PathBuf = value.extract().map_err(|e: PyErr| {
        if e.is_instance_of::<PyTypeError>(value.py()) {
            wrong_type(name, "a path (str or os.PathLike)", value)
        } else if e.is_instance_of::<PyUnicodeError>(value.py()) {
            no_text(name, value)
        } else {
            e
        }
    })?;
    match path.as_os_str().as_encoded_bytes() {
        [] => Err(invalid(format!("{name}: expected a path, got an empty one"))),
        bytes if bytes.contains(&0) => Err(invalid(format!("{name}: expected a path without NUL, got {path:?}"))),
        _ => Ok(path),
    }
}

fn no_text(name: &str, value: &Bound<'_, PyAny>) -> PyErr {
    let got = value.repr().map_or_else(|_| "another".into(), |repr| repr.to_string());
    invalid(format!("{name}: expected text without lone surrogates, got {got}"))
}

/// Functions for `from_py_with`, which is given a value but not the name of its argument.
macro_rules! named {
    ($($argument:ident: $type:ty = $get:expr;)*) => {
        $(pub fn $argument(value: &Bound<'_, PyAny>) -> PyResult<$type> {
            $get(stringify!($argument), value)
        })*
    };
}

/// By the names of arguments: their values.
pub mod of {
    use super::*;

    named! {
        use_prefix: bool = flag;
        enable_prefix_caching: bool = flag;
        interleaved: bool = flag;
        joint_norm: bool = flag;
        gated: bool = flag;
        renormalize: bool = flag;
        max_pinned_fraction: f64 = |name: &str, value: &Bound<'_, PyAny>| number(name, "a number from 0 to 1", value);
        scale: Option<f32> = |name: &str, value: &Bound<'_, PyAny>| {
            if value.is_none() { Ok(None) } else { float32(name, "a number or None", "a finite number", value).map(Some) }
        };
        softcap: Option<f32> = |name: &str, value: &Bound<'_, PyAny>| {
            if value.is_none() { Ok(None) } else { float32(name, "a number or None", "a finite number above 0", value).map(Some) }
        };
        path: PathBuf = super::path;
        folder: PathBuf = super::path;
        spill_dir: Option<PathBuf> = |name: &str, value: &Bound<'_, PyAny>| {
            if value.is_none() { Ok(None) } else { super::path(name, value).map(Some) }
        };
    }

    pub fn norm<'a>(value: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
        text("norm", value)
    }

    pub fn activation<'a>(value: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
        text("activation", value)
    }

    pub fn scoring<'a>(value: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
        text("scoring", value)
    }

    pub fn dtype<'a>(value: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
        text("dtype", value)
    }

    pub fn fingerprint<'a>(value: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
        text("fingerprint", value)
    }

    pub fn kind<'a>(value: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
        text("kind", value)
    }

    pub fn scale_mode<'a>(value: &'a Bound<'_, PyAny>) -> PyResult<Option<&'a str>> {
        if value.is_none() { Ok(None) } else { text("scale_mode", value).map(Some) }
    }
}
