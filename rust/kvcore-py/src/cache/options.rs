//! Arguments that mean more than a number: times, priorities, keys, scales.
#![forbid(unsafe_code)]

use std::time::Duration;

use kvcore::cache::{CacheConfig, GroupKind};
use kvcore::paging::Retention;
use kvcore::storage::{BLOCK_SIZES, Scales, check_scale};
use numpy::PyUntypedArray;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyString};

use crate::arguments::{number, text, wrong_type};
use crate::arrays::{Size, floats};
use crate::error::{invalid, to_python};
use crate::ids::room;

/// A time to live: the cache's own, none, or seconds.
pub enum Ttl<'py> {
    /// Nothing was said.
    Default,
    /// Said: None or seconds.
    Said(Bound<'py, PyAny>),
}

impl<'a, 'py> FromPyObject<'a, 'py> for Ttl<'py> {
    type Error = std::convert::Infallible;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> Result<Self, Self::Error> {
        Ok(if value.is(value.py().Ellipsis()) { Self::Default } else { Self::Said(value.to_owned()) })
    }
}

impl Ttl<'_> {
    fn get(&self, name: &str) -> PyResult<Option<Option<Duration>>> {
        match self {
            Self::Default => Ok(None),
            Self::Said(value) if value.is_none() => Ok(Some(None)),
            Self::Said(value) => Ok(Some(Some(seconds(name, value)?))),
        }
    }
}

/// Seconds, as a number of at least 0.
pub fn seconds(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Duration> {
    let number = number(name, "seconds (a number)", value)?;
    // The largest Duration, which has 64 bits of seconds.
    Duration::try_from_secs_f64(number)
        .map_err(|_| invalid(format!("{name}: expected a finite number of seconds from 0 to 1.8e19, got {number:?}")))
}

/// The argument `block_size`, which the core checks, unless it is no size at all.
pub fn block_size(value: &Bound<'_, PyAny>) -> PyResult<usize> {
    if value.is_instance_of::<PyBool>() {
        return Err(wrong_type("block_size", "an integer", value));
    }
    value.extract().map_err(|e: PyErr| {
        if e.is_instance_of::<PyTypeError>(value.py()) {
            wrong_type("block_size", "an integer", value)
        } else if e.is_instance_of::<PyOverflowError>(value.py()) {
            let got = value.repr().map_or_else(|_| "another".into(), |repr| repr.to_string());
            invalid(format!("block_size: expected {BLOCK_SIZES}, got {got}"))
        } else {
            e
        }
    })
}

/// What was said of a prefix' retention, completed by the cache's defaults; `None` if nothing was said.
pub fn retention(
    name: &str,
    ttl: &Ttl<'_>,
    priority: Option<Size<'_>>,
    default: Retention,
) -> PyResult<Option<Retention>> {
    let ttl = ttl.get(name)?;
    let priority = priority.map(|priority| self::priority(&priority)).transpose()?;
    if ttl.is_none() && priority.is_none() {
        return Ok(None);
    }
    Ok(Some(Retention { ttl: ttl.unwrap_or(default.ttl), priority: priority.unwrap_or(default.priority) }))
}

fn priority(value: &Size<'_>) -> PyResult<u8> {
    let number = value.get("priority")?;
    u8::try_from(number)
        .ok()
        .filter(|&p| p <= 100)
        .ok_or_else(|| invalid(format!("priority: expected 0 to 100, got {number}")))
}

/// A part of a key: text or bytes.
pub fn key(name: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<u8>>> {
    let Some(value) = value else { return Ok(None) };
    if value.is_instance_of::<PyString>() {
        return Ok(Some(text(name, value)?.as_bytes().to_vec()));
    }
    if let Ok(bytes) = value.cast::<PyBytes>() {
        return Ok(Some(bytes.as_bytes().to_vec()));
    }
    Err(wrong_type(name, "str, bytes or None", value))
}

/// A number, or one for each layer and head.
enum Scale {
    One(f32),
    Each { values: Vec<f32>, heads: usize },
}

impl Scale {
    fn get(name: &str, value: Option<&Bound<'_, PyAny>>, num_layers: usize) -> PyResult<Self> {
        let Some(value) = value else { return Ok(Self::One(1.0)) };
        if value.cast::<PyUntypedArray>().is_ok_and(|array| numpy::PyUntypedArrayMethods::ndim(array) > 0) {
            let array = floats(name, value, &[Some(num_layers), None])?;
            let heads = numpy::PyUntypedArrayMethods::shape(&*array)[1];
            return Ok(Self::Each { values: array.as_slice()?.to_vec(), heads });
        }
        let number = number(name, "a number or an array [num_layers, num_kv_heads]", value)?;
        check_scale(name, number).map(Self::One).map_err(to_python)
    }

    /// The scales of some layers. `most` heads is what the array has where layers have different numbers: rows of those
    /// that have fewer are filled up.
    fn of(&self, name: &str, layers: &[usize], num_kv_heads: usize, most: usize) -> PyResult<Vec<f32>> {
        match self {
            Self::One(scale) => {
                // The core looks at the sizes later: they may be absurd.
                let len = layers.len().saturating_mul(num_kv_heads);
                let mut scales = room(len, "the scales").map_err(to_python)?;
                scales.resize(len, *scale);
                Ok(scales)
            }
            Self::Each { values, heads } if *heads == most => {
                Ok(layers.iter().flat_map(|&layer| &values[layer * heads..][..num_kv_heads]).copied().collect())
            }
            Self::Each { heads, .. } => {
                Err(invalid(format!("{name}: expected a scale for each of a layer's {most} KV heads, got {heads}")))
            }
        }
    }
}

/// Sets the static scales of every group.
pub fn set_scales(
    config: &mut CacheConfig,
    k_scale: Option<&Bound<'_, PyAny>>,
    v_scale: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    if k_scale.is_none() && v_scale.is_none() {
        return Ok(());
    }
    let num_layers = config.num_layers();
    let (k, v) = (Scale::get("k_scale", k_scale, num_layers)?, Scale::get("v_scale", v_scale, num_layers)?);
    let most = config.groups.iter().map(|spec| spec.num_kv_heads).max().unwrap_or(0);
    for spec in config.groups.iter_mut().filter(|spec| spec.kind != GroupKind::None) {
        if let Some(layer) = spec.layers.iter().find(|&&layer| layer >= num_layers) {
            return Err(invalid(format!("groups: layer {layer} of {num_layers}")));
        }
        spec.scales = Some(Scales {
            k: k.of("k_scale", &spec.layers, spec.num_kv_heads, most)?,
            v: v.of("v_scale", &spec.layers, spec.num_kv_heads, most)?,
        });
    }
    Ok(())
}
