//! The header of a file: made for writing, and checked when read.
//!
//! The safetensors crate parses it and proves that shapes, formats and offsets agree without gaps or overlaps. Its
//! reader and writer are not used: they want the whole file, or all of a tensor, in memory.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::Value as Json;

use super::pieces::DIGEST;
use super::{Dtype, FORMAT_VERSION, Fingerprint, clip};
use crate::{Error, Result};

/// Bytes of the number that gives the header's length.
pub(super) const LENGTH: usize = 8;

/// The longest header. A few tensors and facts take a few KiB; what a bad file can make us allocate is bounded by this.
pub(super) const MAX_HEADER: usize = 1 << 20;

const METADATA: &str = "__metadata__";
const CHECKSUM: &str = "checksum";
const FORMAT: &str = "kvcore";
const FINGERPRINT: &str = "fingerprint.";
/// Blocks are raw memory, so a file tells whose.
const BYTE_ORDER: &str = if cfg!(target_endian = "little") { "little" } else { "big" };

/// Name, format and shape of a tensor that is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Unique in its file; not empty, `checksum` or `__metadata__`.
    pub name: String,
    /// Format of its values.
    pub dtype: Dtype,
    /// Outermost dimension first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// As the fields.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), dtype, shape: shape.into() }
    }

    /// Bytes of the tensor, or `None` if they are too many to count or not whole.
    pub(super) fn bytes(&self) -> Option<usize> {
        let bits = self.shape.iter().try_fold(self.dtype.bitsize(), |n, &size| n.checked_mul(size))?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

/// Where a tensor lies within a file, checked against its length.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// From the start of the file.
    pub start: u64,
    pub bytes: usize,
}

/// The header's bytes, with the length in front, for a file of these tensors and a checksum.
pub(super) fn encode(kind: &str, fingerprint: &Fingerprint, tensors: &[TensorSpec]) -> Result<Vec<u8>> {
    let wrong = |message: String| Error::InvalidArgument(message);
    let mut entries = serde_json::Map::new();
    let fixed = [("byte_order", BYTE_ORDER), ("format", FORMAT), ("format_version", FORMAT_VERSION), ("kind", kind)];
    let fixed = fixed.map(|(key, value)| (key.to_owned(), Json::from(value)));
    let facts = fingerprint.iter().map(|(field, value)| (format!("{FINGERPRINT}{field}"), Json::from(value)));
    entries.insert(METADATA.to_owned(), Json::Object(fixed.into_iter().chain(facts).collect()));

    let checksum = TensorSpec::new(CHECKSUM, Dtype::U8, [DIGEST]);
    let mut end = 0usize;
    for tensor in tensors.iter().chain([&checksum]) {
        let name = &tensor.name;
        let too_large = || wrong(format!("tensor {name:?} of shape {:?} is too large", tensor.shape));
        let start = end;
        end = tensor.bytes().and_then(|n| n.checked_add(start)).ok_or_else(too_large)?;
        let info = TensorInfo { dtype: tensor.dtype, shape: tensor.shape.clone(), data_offsets: (start, end) };
        let info = serde_json::to_value(info).map_err(|e| wrong(format!("tensor {name:?}: {e}")))?;
        if name.is_empty() || entries.insert(name.clone(), info).is_some() {
            return Err(wrong(format!("tensor name {name:?}: expected one that is not empty, reserved or used twice")));
        }
    }
    let mut text = Json::Object(entries).to_string().into_bytes();
    // Tensors start at a multiple of 8 bytes; the format pads with spaces.
    text.resize(text.len().next_multiple_of(LENGTH), b' ');
    if text.len() > MAX_HEADER {
        return Err(wrong(format!("header: expected at most {MAX_HEADER} bytes, got {}", text.len())));
    }
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut text);
    Ok(bytes)
}

/// Where the tensors of a file lie, or why it is refused. `text` is the header without its length, `file_len` the length
/// of the whole file.
pub(super) fn decode(
    text: &[u8],
    file_len: u64,
    kind: &str,
    fingerprint: &Fingerprint,
) -> Result<BTreeMap<String, Place>, String> {
    let header: Metadata = serde_json::from_slice(text).map_err(|e| format!("bad header: {}", clip(&e.to_string())))?;
    let data = (LENGTH + text.len()) as u64;
    let expected = (header.data_len() as u64).checked_add(data).ok_or("bad header: the tensors end beyond 2^64")?;
    if file_len != expected {
        let what = if file_len < expected { "cut short" } else { "too long" };
        return Err(format!("{what}: {file_len} bytes, the header tells of {expected}"));
    }
    let empty = Default::default();
    let metadata = header.metadata().as_ref().unwrap_or(&empty);
    let fixed = [("format", FORMAT), ("format_version", FORMAT_VERSION), ("kind", kind), ("byte_order", BYTE_ORDER)];
    for (key, expected) in fixed {
        match metadata.get(key) {
            Some(found) if found == expected => {}
            Some(found) => return Err(format!("{key}: expected {expected}, the file has {}", clip(found))),
            None => return Err(format!("{key}: expected {expected}, the file has nothing (not a file of kvcore?)")),
        }
    }
    let theirs: Fingerprint = metadata
        .iter()
        .filter_map(|(key, value)| Some((key.strip_prefix(FINGERPRINT)?.to_owned(), value.clone())))
        .collect();
    if let Some(difference) = fingerprint.difference(&theirs) {
        return Err(difference);
    }
    let mut places: BTreeMap<String, Place> = header
        .tensors()
        .into_iter()
        .map(|(name, info)| {
            let (start, end) = info.data_offsets;
            let place =
                Place { dtype: info.dtype, shape: info.shape.clone(), start: data + start as u64, bytes: end - start };
            (name, place)
        })
        .collect();
    match places.remove(CHECKSUM) {
        Some(place)
            if place.dtype == Dtype::U8 && place.shape == [DIGEST] && place.start + DIGEST as u64 == file_len =>
        {
            Ok(places)
        }
        _ => Err(format!("bad header: no tensor {CHECKSUM:?} of {DIGEST} bytes at the end")),
    }
}
