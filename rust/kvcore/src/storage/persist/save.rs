//! Writing a file: all of it, or nothing.
//!
//! ```text
//! save(path, tensors, fill): temporary file; header; fill(writer) gives the bytes in order; checksum; sync; rename
//! any error, panic or interruption: the temporary file is removed, and what was at the path is still there
//! ```
#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use super::header::{self, TensorSpec};
use super::pieces::{Digests, PIECE};
use super::{Fingerprint, Value, refuse};
use crate::threads::ShouldStop;
use crate::{Error, Result};

/// Write a file of these tensors to `path`, in place of what is there; `fill` gives their bytes to the [`Writer`], in
/// the order of `tensors`. Wide formats first keep every tensor aligned for those who map the file.
///
/// Memory does not grow with the tensors. When it returns, the bytes have reached the disk. A link at `path` is
/// replaced, not followed.
///
/// # Errors
/// [`Error::Checkpoint`] with the system's words if the file cannot be written, [`Error::InvalidArgument`] for bad names
/// or shapes, or bytes that do not fit them, [`Error::Interrupted`], and whatever `fill` returns. What was at `path` is
/// then untouched, and no temporary file is left.
pub fn save(
    path: &Path,
    kind: &str,
    fingerprint: &Fingerprint,
    tensors: &[TensorSpec],
    should_stop: ShouldStop<'_>,
    fill: impl FnOnce(&mut Writer<'_>) -> Result<()>,
) -> Result<()> {
    let header = header::encode(kind, fingerprint, tensors)?;
    let cannot_write = |e: io::Error| refuse(path, format_args!("cannot write: {e}"));
    let folder = match path.parent() {
        Some(folder) if path.file_name().is_some() => folder,
        _ => return Err(refuse(path, "cannot write: not the name of a file")),
    };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    // A rename would replace a device or a pipe as well, and fail on a folder only after all was written.
    match fs::metadata(path) {
        Ok(there) if there.is_dir() => return Err(refuse(path, "cannot write: a folder is there")),
        Ok(there) if !there.is_file() => return Err(refuse(path, "cannot write: not a regular file is there")),
        _ => {}
    }
    let mut builder = tempfile::Builder::new();
    builder.prefix(".kvcore-").suffix(".tmp").rand_bytes(16);
    // Readable for whom the umask lets, as any new file, not for the owner alone.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut temporary = builder.tempfile_in(folder).map_err(cannot_write)?;

    let mut writer = Writer {
        path,
        file: temporary.as_file_mut(),
        tensors,
        should_stop,
        current: 0,
        written: 0,
        piece: Vec::with_capacity(PIECE),
        digests: Digests::default(),
        failed: None,
    };
    writer.put(&header)?;
    fill(&mut writer)?;
    writer.finish()?;
    temporary.as_file().sync_all().map_err(cannot_write)?;
    temporary.persist(path).map_err(|e| cannot_write(e.error))?;
    // The file is whole either way; this makes its name outlast a power cut, where the system can do it.
    if cfg!(unix) {
        let _ = File::open(folder).and_then(|folder| folder.sync_all());
    }
    Ok(())
}

/// Takes the bytes of the tensors, in order, in pieces of any size.
pub struct Writer<'a> {
    path: &'a Path,
    file: &'a mut File,
    tensors: &'a [TensorSpec],
    should_stop: ShouldStop<'a>,
    /// The tensor that is being written, and how much of it has come.
    current: usize,
    written: usize,
    /// What is not in the file yet: less than a piece.
    piece: Vec<u8>,
    digests: Digests,
    /// Why a piece is missing in the file: there is no going on, even if `fill` does.
    failed: Option<Error>,
}

impl Writer<'_> {
    /// The next bytes of tensor `name`, which is the one of the last call, or the next one if that is complete.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another tensor, or more bytes than it has; [`Error::Checkpoint`] with the system's
    /// words; [`Error::Interrupted`].
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.take(name, bytes.len())?;
        self.put(bytes)
    }

    /// The next values of tensor `name`, as [`Self::write`].
    ///
    /// # Errors
    /// As [`Self::write`]; [`Error::InvalidArgument`] if the tensor has another format.
    pub fn values<T: Value>(&mut self, name: &str, values: &[T]) -> Result<()> {
        if let Some(tensor) = self.tensors.iter().find(|tensor| tensor.name == name && tensor.dtype != T::DTYPE) {
            return Err(Error::InvalidArgument(format!(
                "tensor {name:?}: expected values of {}, got {}",
                tensor.dtype,
                T::DTYPE
            )));
        }
        self.take(name, size_of_val(values))?;
        values.iter().try_for_each(|value| self.put(value.to_bytes().as_ref()))
    }

    /// Make `name` the current tensor, and count `bytes` more of it.
    fn take(&mut self, name: &str, bytes: usize) -> Result<()> {
        self.skip_complete(|tensor| tensor.name == name);
        let Some(tensor) = self.tensors.get(self.current) else {
            return Err(Error::InvalidArgument(format!("tensor {name:?}: expected no more bytes, all are complete")));
        };
        let missing = size(tensor) - self.written;
        if tensor.name != name {
            return Err(Error::InvalidArgument(format!(
                "tensor {name:?}: expected {missing} more bytes of tensor {:?} first",
                tensor.name
            )));
        }
        if bytes > missing {
            return Err(Error::InvalidArgument(format!("tensor {name:?}: expected {missing} more bytes, got {bytes}")));
        }
        self.written += bytes;
        Ok(())
    }

    fn skip_complete(&mut self, until: impl Fn(&TensorSpec) -> bool) {
        while let Some(tensor) = self.tensors.get(self.current)
            && self.written == size(tensor)
            && !until(tensor)
        {
            (self.current, self.written) = (self.current + 1, 0);
        }
    }

    fn put(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(PIECE - self.piece.len()));
            self.piece.extend_from_slice(now);
            bytes = later;
            if self.piece.len() == PIECE {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let written = self.append_piece();
        self.piece.clear();
        if let Err(error) = &written {
            self.failed.get_or_insert_with(|| error.clone());
        }
        written
    }

    fn append_piece(&mut self) -> Result<()> {
        if (self.should_stop)() {
            return Err(Error::Interrupted);
        }
        self.digests.push(&self.piece);
        let written = self.file.write_all(&self.piece);
        self.cannot_write(written)
    }

    fn finish(mut self) -> Result<()> {
        if !self.piece.is_empty() {
            // An error is kept in `failed`.
            let _ = self.flush();
        }
        if let Some(error) = self.failed {
            return Err(error);
        }
        self.skip_complete(|_| false);
        if let Some(tensor) = self.tensors.get(self.current) {
            return Err(Error::InvalidArgument(format!(
                "tensor {:?}: expected {} more bytes, got none",
                tensor.name,
                size(tensor) - self.written
            )));
        }
        let written = self.file.write_all(&self.digests.root());
        self.cannot_write(written)
    }

    fn cannot_write(&self, written: io::Result<()>) -> Result<()> {
        written.map_err(|e| refuse(self.path, format_args!("cannot write: {e}")))
    }
}

/// Bytes of a tensor whose size was checked when the header was made.
fn size(tensor: &TensorSpec) -> usize {
    tensor.bytes().unwrap_or_default()
}
