//! Reading a file: nothing of it is handed out before all of it was checked.
//!
//! ```text
//! open: header -> pieces 0, 1, ...: read, digest kept -> digest of digests = checksum?
//! read: the pieces that hold the range, each compared with its digest -> copied out
//! ```
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::header::{self, LENGTH, MAX_HEADER, Place};
use super::pieces::{DIGEST, Digests, PIECE};
use super::{Dtype, Fingerprint, Value, refuse};
use crate::storage::positioned::read_exact_at;
use crate::threads::ShouldStop;
use crate::{Error, Result};

/// How a text file begins that stands for the real one in a repository.
const LFS: &[u8] = b"version ";

/// A file that was found whole, unaltered and of the right kind.
pub struct Reader<'a> {
    bytes: Bytes<'a>,
    tensors: BTreeMap<String, Place>,
}

impl<'a> Reader<'a> {
    /// Open a file and check every byte of it.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] that names the file and the reason, if it cannot be read, is cut or altered, or is of
    /// another kind, version or fingerprint; [`Error::Interrupted`].
    pub fn open(path: &Path, kind: &str, fingerprint: &Fingerprint, should_stop: ShouldStop<'a>) -> Result<Self> {
        let cannot_read = |e: std::io::Error| refuse(path, format_args!("cannot read: {e}"));
        // To open a pipe would wait for its other end.
        let regular = |there: fs::Metadata| match there {
            there if there.is_dir() => Err(refuse(path, "cannot read: a folder")),
            there if !there.is_file() => Err(refuse(path, "cannot read: not a regular file")),
            there => Ok(there.len()),
        };
        regular(fs::metadata(path).map_err(cannot_read)?)?;
        let file = File::open(path).map_err(cannot_read)?;
        let len = regular(file.metadata().map_err(cannot_read)?)?;

        if len < LENGTH as u64 {
            return Err(refuse(path, format_args!("cut short: {len} bytes, no file has fewer than {LENGTH}")));
        }
        let mut header = vec![0; LENGTH];
        read_exact_at(&file, &mut header, 0).map_err(cannot_read)?;
        if header == LFS {
            return Err(refuse(path, "not the file itself, but a text that stands for it (a Git LFS pointer?)"));
        }
        let length = header.iter().rev().fold(0, |n: u64, &byte| n << 8 | u64::from(byte));
        if length > MAX_HEADER as u64 {
            return Err(refuse(path, format_args!("bad header: {length} bytes long, at most {MAX_HEADER} expected")));
        }
        if length > len - LENGTH as u64 {
            return Err(refuse(path, format_args!("cut short: {len} bytes, the header alone has {length}")));
        }
        header.resize(LENGTH + length as usize, 0);
        read_exact_at(&file, &mut header[LENGTH..], LENGTH as u64).map_err(cannot_read)?;
        let tensors =
            header::decode(&header[LENGTH..], len, kind, fingerprint).map_err(|reason| refuse(path, reason))?;

        let mut bytes = Bytes {
            path: path.to_owned(),
            file,
            header,
            end: len - DIGEST as u64,
            should_stop,
            digests: Digests::default(),
            buffer: Vec::with_capacity(PIECE.min(len as usize)),
            in_buffer: None,
        };
        bytes.verify()?;
        Ok(Self { bytes, tensors })
    }

    /// Names of the tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Shape of a tensor.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if there is no such tensor.
    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        self.place(name).map(|place| place.shape.as_slice())
    }

    /// Read a tensor from its start; `shape` says what is expected, `None` fits any size.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if there is no such tensor, or it has another format or shape.
    pub fn tensor(&mut self, name: &str, dtype: Dtype, shape: &[Option<usize>]) -> Result<TensorReader<'_, 'a>> {
        let place = self.place(name)?;
        let fits = place.shape.len() == shape.len()
            && place.shape.iter().zip(shape).all(|(&size, expected)| expected.is_none_or(|expected| expected == size));
        if place.dtype != dtype || !fits {
            let expected: Vec<String> = shape.iter().map(|n| n.map_or("any".to_owned(), |n| n.to_string())).collect();
            return Err(self.error(format_args!(
                "tensor {name:?}: expected {dtype} [{}], the file has {} {:?}",
                expected.join(", "),
                place.dtype,
                place.shape
            )));
        }
        let (at, left) = (place.start, place.bytes);
        let Self { bytes, tensors } = self;
        let shape = tensors.get(name).map_or(&[][..], |place| &place.shape);
        Ok(TensorReader { bytes, shape, at, left })
    }

    /// All values of a tensor; `shape` as for [`Self::tensor`].
    ///
    /// # Errors
    /// As [`Self::tensor`] and [`TensorReader::read`]; [`Error::OutOfMemory`].
    pub fn values<T: Value>(&mut self, name: &str, shape: &[Option<usize>]) -> Result<Vec<T>> {
        let mut tensor = self.tensor(name, T::DTYPE, shape)?;
        let total = tensor.remaining();
        let mut values = Vec::new();
        values.try_reserve_exact(total / size_of::<T>()).map_err(|e| Error::OutOfMemory {
            bytes: total,
            what: "a saved tensor",
            reason: e.to_string(),
        })?;
        let mut part = [0; 4096]; // a multiple of every value's size
        while tensor.remaining() > 0 {
            let part = &mut part[..tensor.left.min(4096)];
            tensor.read(part)?;
            values.extend(part.chunks_exact(size_of::<T>()).map(T::from_bytes));
        }
        Ok(values)
    }

    /// An [`Error::Checkpoint`] that names this file: for what its contents mean, which only the caller can judge.
    pub fn error(&self, reason: impl std::fmt::Display) -> Error {
        refuse(&self.bytes.path, reason)
    }

    fn place(&self, name: &str) -> Result<&Place> {
        self.tensors.get(name).ok_or_else(|| self.error(format_args!("tensor {name:?}: expected one, there is none")))
    }
}

/// One tensor's bytes, from first to last.
pub struct TensorReader<'r, 'a> {
    bytes: &'r mut Bytes<'a>,
    shape: &'r [usize],
    at: u64,
    left: usize,
}

impl TensorReader<'_, '_> {
    /// The tensor's shape.
    pub fn shape(&self) -> &[usize] {
        self.shape
    }

    /// Bytes that are neither read nor skipped.
    pub fn remaining(&self) -> usize {
        self.left
    }

    /// Fill `out` with the next bytes. Reading in order touches every piece of the file once.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for more than [`Self::remaining`], [`Error::Checkpoint`] if the file has changed since
    /// it was opened, [`Error::Interrupted`]; `out` then holds nothing of use.
    pub fn read(&mut self, out: &mut [u8]) -> Result<()> {
        self.bytes.read(self.at, out, self.left)?;
        self.skip(out.len())
    }

    /// Leave out the next bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for more than [`Self::remaining`].
    pub fn skip(&mut self, bytes: usize) -> Result<()> {
        self.left = self.left.checked_sub(bytes).ok_or_else(|| past_the_end(bytes, self.left))?;
        self.at += bytes as u64;
        Ok(())
    }
}

fn past_the_end(asked: usize, left: usize) -> Error {
    Error::InvalidArgument(format!("a saved tensor has {left} bytes left, {asked} were asked for"))
}

/// The bytes that the checksum covers, piece by piece.
struct Bytes<'a> {
    path: PathBuf,
    file: File,
    /// The start of the file as it was parsed: what is checked is what was believed.
    header: Vec<u8>,
    /// Where the checksum begins.
    end: u64,
    should_stop: ShouldStop<'a>,
    digests: Digests,
    buffer: Vec<u8>,
    /// Which piece the buffer holds.
    in_buffer: Option<u64>,
}

impl Bytes<'_> {
    /// Pass 1: keep the digest of every piece; their digest must be the checksum.
    fn verify(&mut self) -> Result<()> {
        for index in 0..self.end.div_ceil(PIECE as u64) {
            self.load(index)?;
            self.digests.push(&self.buffer);
            self.in_buffer = Some(index);
        }
        let mut checksum = [0; DIGEST];
        self.cannot_read(read_exact_at(&self.file, &mut checksum, self.end))?;
        if checksum != self.digests.root() {
            return Err(refuse(&self.path, "altered: the checksum does not fit the contents"));
        }
        Ok(())
    }

    /// Pass 2: bytes from `at` on, of which there are `left`.
    fn read(&mut self, at: u64, out: &mut [u8], left: usize) -> Result<()> {
        if out.len() > left {
            return Err(past_the_end(out.len(), left));
        }
        let mut done = 0;
        while done < out.len() {
            let at = at + done as u64;
            let index = at / PIECE as u64;
            if self.in_buffer != Some(index) {
                self.load(index)?;
                if !self.digests.matches(index as usize, &self.buffer) {
                    return Err(refuse(&self.path, "altered while it was being read"));
                }
                self.in_buffer = Some(index);
            }
            let there = &self.buffer[(at % PIECE as u64) as usize..];
            let bytes = there.len().min(out.len() - done);
            out[done..done + bytes].copy_from_slice(&there[..bytes]);
            done += bytes;
        }
        Ok(())
    }

    /// Read a piece into the buffer, unchecked.
    fn load(&mut self, index: u64) -> Result<()> {
        if (self.should_stop)() {
            return Err(Error::Interrupted);
        }
        self.in_buffer = None;
        let start = index * PIECE as u64;
        self.buffer.resize((self.end - start).min(PIECE as u64) as usize, 0);
        let known = self.header.get(start.min(self.header.len() as u64) as usize..).unwrap_or_default();
        let known = &known[..known.len().min(self.buffer.len())];
        let (head, tail) = self.buffer.split_at_mut(known.len());
        head.copy_from_slice(known);
        let read = read_exact_at(&self.file, tail, start + head.len() as u64);
        self.cannot_read(read)
    }

    fn cannot_read(&self, read: std::io::Result<()>) -> Result<()> {
        read.map_err(|e| refuse(&self.path, format_args!("cannot read: {e}")))
    }
}
