//! Reading and writing at an offset of a file: one system call where the system has it.
//!
//! Elsewhere the file's cursor moves, so whoever calls these must have the file to itself.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io;

/// Fill `out` with the bytes at `offset`.
///
/// # Errors
/// The system's; `UnexpectedEof` if the file ends before.
#[cfg(unix)]
pub(super) fn read_exact_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

/// Write all of `bytes` at `offset`.
///
/// # Errors
/// The system's; some of the bytes may have been written then.
#[cfg(unix)]
pub(super) fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

/// Fill `out` with the bytes at `offset`.
///
/// # Errors
/// The system's; `UnexpectedEof` if the file ends before.
#[cfg(not(unix))]
pub(super) fn read_exact_at(mut file: &File, out: &mut [u8], offset: u64) -> io::Result<()> {
    use io::{Read, Seek};
    file.seek(io::SeekFrom::Start(offset))?;
    file.read_exact(out)
}

/// Write all of `bytes` at `offset`.
///
/// # Errors
/// The system's; some of the bytes may have been written then.
#[cfg(not(unix))]
pub(super) fn write_all_at(mut file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    use io::{Seek, Write};
    file.seek(io::SeekFrom::Start(offset))?;
    file.write_all(bytes)
}
