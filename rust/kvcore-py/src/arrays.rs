//! numpy arrays to slices: dtype, shape and contiguity, with a clear `TypeError` or `InvalidArgument` otherwise.
#![forbid(unsafe_code)]

use kvcore::linear::Blocks;
use numpy::{
    Element, PyArrayDyn, PyArrayMethods, PyReadonlyArrayDyn, PyReadwriteArrayDyn, PyUntypedArray, PyUntypedArrayMethods,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::IntoPyDict;

use crate::arguments::wrong_type;
use crate::error::invalid;

/// A float32 array `[d0, d1, ..]`, contiguous. float16 and, of ml_dtypes, bfloat16 and fp8 are widened, which is exact; other
/// dtypes are a `TypeError`. `None` in `shape` takes any extent.
pub fn floats<'py>(
    name: &str,
    value: &Bound<'py, PyAny>,
    shape: &[Option<usize>],
) -> PyResult<PyReadonlyArrayDyn<'py, f32>> {
    // What every call of a decode step is: looked at before anything that asks Python for names.
    if let Ok(array) = value.cast::<PyArrayDyn<f32>>()
        && array.is_c_contiguous()
        && array.is_aligned()
    {
        check_shape(name, array.shape(), shape)?;
        return Ok(array.try_readonly()?);
    }
    let array = as_array(name, value, "float32")?;
    check_shape(name, array.shape(), shape)?;
    let kind = dtype_name(&array)?;
    let array = match kind.as_str() {
        "float32" => array.into_any(),
        "float16" | "bfloat16" | "float8_e4m3fn" | "float8_e5m2" => array.call_method1("astype", ("float32",))?,
        _ => return Err(PyTypeError::new_err(format!("{name}: expected a float32 array, got {kind}"))),
    };
    contiguous(&array)
}

/// A float32 array that is written in place: it must be contiguous and writable.
pub fn floats_in_place<'py>(
    name: &str,
    value: &Bound<'py, PyAny>,
    shape: &[Option<usize>],
) -> PyResult<PyReadwriteArrayDyn<'py, f32>> {
    let array = as_array(name, value, "float32")?;
    check_shape(name, array.shape(), shape)?;
    let array = match array.cast_into::<PyArrayDyn<f32>>() {
        Ok(array) => array,
        Err(other) => {
            let kind = dtype_name(other.into_inner().cast()?)?;
            return Err(PyTypeError::new_err(format!("{name}: expected a float32 array, got {kind}")));
        }
    };
    let writable = array.try_readwrite().ok().filter(|a| a.is_c_contiguous() && a.is_aligned());
    writable.ok_or_else(|| {
        invalid(format!(
            "{name}: expected a writable, aligned, C-contiguous array that shares no memory with the other arguments \
             (it is changed in place)"
        ))
    })
}

/// An integer argument whose faults are told with its name: negative, too large, or no integer at all.
pub struct Size<'py>(Bound<'py, PyAny>);

impl<'a, 'py> FromPyObject<'a, 'py> for Size<'py> {
    type Error = std::convert::Infallible;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> Result<Self, Self::Error> {
        Ok(Self(value.to_owned()))
    }
}

impl Size<'_> {
    /// The value.
    ///
    /// # Errors
    /// `InvalidArgument` for a negative or too large one, `TypeError` for what is no integer (True is none).
    pub fn get(&self, name: &str) -> PyResult<usize> {
        let (value, py) = (&self.0, self.0.py());
        let no_integer = || wrong_type(name, "an integer", value);
        if value.is_instance_of::<pyo3::types::PyBool>() {
            return Err(no_integer());
        }
        value.extract::<usize>().map_err(|e| {
            if e.is_instance_of::<pyo3::exceptions::PyOverflowError>(py) {
                let got = value.repr().map_or_else(|_| "another".into(), |r| r.to_string());
                invalid(format!("{name}: expected an integer from 0 to {}, got {got}", usize::MAX))
            } else if e.is_instance_of::<PyTypeError>(py) {
                no_integer()
            } else {
                e
            }
        })
    }
}

/// Weights in the dtype they are stored in, contiguous.
pub enum Weights<'py> {
    /// float32.
    F32(PyReadonlyArrayDyn<'py, f32>),
    /// float16, as bits.
    F16(PyReadonlyArrayDyn<'py, u16>),
    /// bfloat16 of ml_dtypes, as bits.
    Bf16(PyReadonlyArrayDyn<'py, u16>),
    /// Blocks of GGUF.
    Blocks(Blocks, PyReadonlyArrayDyn<'py, u8>),
}

/// A two-dimensional array of bytes, rows of blocks, and the shape of what they stand for.
pub fn block_weights<'py>(
    name: &str,
    value: &Bound<'py, PyAny>,
    blocks: &str,
) -> PyResult<(Weights<'py>, usize, usize)> {
    let kind = Blocks::ALL.into_iter().find(|kind| kind.name() == blocks).ok_or_else(|| {
        let names = Blocks::ALL.map(Blocks::name).join(", ");
        invalid(format!("blocks: expected one of {names}, got {blocks:?}"))
    })?;
    let array = as_array(name, value, "uint8")?;
    check_shape(name, array.shape(), &[None, None])?;
    if dtype_name(&array)? != "uint8" {
        return Err(PyTypeError::new_err(format!("{name}: expected uint8, got {}", dtype_name(&array)?)));
    }
    let (outputs, row) = (array.shape()[0], array.shape()[1]);
    if !row.is_multiple_of(kind.bytes()) {
        let bytes = kind.bytes();
        return Err(invalid(format!("{name}: expected rows of whole blocks of {bytes} bytes, got {row} bytes")));
    }
    let array = array.py().import("numpy")?.call_method1("ascontiguousarray", (array,))?;
    Ok((Weights::Blocks(kind, contiguous(&array)?), outputs, row / kind.bytes() * kind.weights()))
}

/// A two-dimensional array of float32, float16 or bfloat16, and its shape.
pub fn weights<'py>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<(Weights<'py>, usize, usize)> {
    let array = as_array(name, value, "float32, float16 or bfloat16")?;
    check_shape(name, array.shape(), &[None, None])?;
    let (outputs, inputs) = (array.shape()[0], array.shape()[1]);
    let bits = |array: &Bound<'py, PyUntypedArray>| {
        let array = array.py().import("numpy")?.call_method1("ascontiguousarray", (array,))?;
        contiguous::<u16>(&array.call_method1("view", ("uint16",))?)
    };
    let weights = match dtype_name(&array)?.as_str() {
        "float32" => Weights::F32(contiguous(array.as_any())?),
        "float16" => Weights::F16(bits(&array)?),
        "bfloat16" => Weights::Bf16(bits(&array)?),
        other => {
            return Err(PyTypeError::new_err(format!("{name}: expected float32, float16 or bfloat16, got {other}")));
        }
    };
    Ok((weights, outputs, inputs))
}

fn as_array<'py>(name: &str, value: &Bound<'py, PyAny>, what: &str) -> PyResult<Bound<'py, PyUntypedArray>> {
    value.cast::<PyUntypedArray>().cloned().map_err(|_| wrong_type(name, &format!("a numpy array of {what}"), value))
}

fn dtype_name(array: &Bound<'_, PyUntypedArray>) -> PyResult<String> {
    let dtype = array.dtype();
    // A byte-swapped array has the same name as a native one.
    if !dtype.getattr("isnative")?.is_truthy()? {
        return Ok(format!("{} in foreign byte order", dtype.getattr("name")?));
    }
    dtype.getattr("name")?.extract()
}

/// Whether the shape is the expected one; `None` takes any extent.
pub fn check_shape(name: &str, got: &[usize], expected: &[Option<usize>]) -> PyResult<()> {
    let fits = got.len() == expected.len() && got.iter().zip(expected).all(|(g, e)| e.is_none_or(|e| e == *g));
    if fits {
        return Ok(());
    }
    let expected: Vec<String> = expected.iter().map(|e| e.map_or_else(|| "any".into(), |e| e.to_string())).collect();
    Err(invalid(format!("{name}: expected shape [{}], got {got:?}", expected.join(", "))))
}

fn contiguous<'py, T: Element>(array: &Bound<'py, PyAny>) -> PyResult<PyReadonlyArrayDyn<'py, T>> {
    let array = match array.cast::<PyArrayDyn<T>>() {
        Ok(typed) if typed.is_c_contiguous() && typed.is_aligned() => typed.clone(),
        _ => {
            // Always a copy: ascontiguousarray leaves an array as it is that is contiguous but not aligned.
            let order = [("order", "C")].into_py_dict(array.py())?;
            let copy = array.py().import("numpy")?.call_method("array", (array,), Some(&order))?;
            copy.cast_into::<PyArrayDyn<T>>()?
        }
    };
    Ok(array.try_readonly()?)
}
