//! Tensors in a file that is whole or not there, and believed only after every byte of it was checked.
//!
//! ```text
//! file   [header length: u64][header: JSON][tensors, in the header's order, no gaps]          safetensors, little-endian
//! header {"__metadata__": {"format": "kvcore", "format_version", "kind", "byte_order", "fingerprint.FIELD"...},
//!         NAME: {"dtype", "shape", "data_offsets"}..., "checksum": U8 [16]}                   checksum comes last
//! checksum = H(H(piece 0) | H(piece 1) | ...)     H = XXH3-128; a piece is 256 KiB of the file, from its first byte to
//!                                                 the last one before the checksum
//!
//! save   write to a temporary file in the same folder; sync; rename over the path; sync the folder
//! open   pass 1: header, offsets, fingerprint, then the checksum over all pieces, whose digests are kept
//! read   pass 2: a piece at a time, compared with its digest before a byte of it is handed out
//! ```
//!
//! The file is read, not mapped: a mapped file that somebody cuts or changes meanwhile kills the process or changes
//! under the reader's eyes, and cannot be had without `unsafe`. With two passes nothing needs to be undone for a file
//! that is bad from the start, memory does not grow with the file (but for 64 bytes a MiB), and a file that changes
//! between the passes is found out by the digests. The second pass mostly comes from the page cache.
//!
//! The checksum finds accidents, not forgeries: who can write the file can compute it, too.
#![forbid(unsafe_code)]

mod fingerprint;
mod header;
mod pieces;
mod reader;
mod save;
mod value;

use std::fmt::Display;
use std::path::Path;

pub use fingerprint::Fingerprint;
pub use header::TensorSpec;
pub use reader::{Reader, TensorReader};
pub use safetensors::Dtype;
pub use save::{Writer, save};
pub use value::Value;

use crate::Error;

/// Version of the file format; files of another one are refused.
pub const FORMAT_VERSION: &str = "2";

/// An error that names the file.
fn refuse(path: &Path, reason: impl Display) -> Error {
    Error::Checkpoint(format!("{}: {reason}", path.display()))
}

/// Text of a file as part of a message: printable, and not longer than a line.
fn clip(text: &str) -> String {
    const MOST: usize = 120;
    let mut clipped: String = text.chars().take(MOST).flat_map(char::escape_debug).collect();
    if text.chars().nth(MOST).is_some() {
        clipped.push_str("...");
    }
    clipped
}
