//! The second tier: blocks that had to leave memory, in one file of bounded size.
//!
//! ```text
//! file    [group 0: slot 0 | slot 1 | ...][group 1: ...]...      a slot holds one block; sparse until written
//! memory  the XXH3-128 digest of each slot's bytes, or none while it holds nothing
//!
//! write(slot): digest := none; write; digest := H(bytes)         a write that fails leaves nothing to be believed
//! read(slot):  read; H(bytes) = digest?                          torn, altered or stale bytes are an error
//! ```
//!
//! What a slot holds is known only in memory and the file has no name (it is unlinked as soon as it is made), so after a
//! crash there is nothing to trust and nothing to clean up. Where a file that is in use cannot be unlinked, it is removed
//! on drop, and what a killed process left behind by the next [`SpillFile::create`] in the folder; it is never read. A
//! forked child shares the file but not the digests: what one of both overwrites is an error for the other.
#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::num::NonZeroU128;
use std::path::Path;

use tempfile::TempPath;
use xxhash_rust::xxh3::xxh3_128;

use super::positioned::{read_exact_at, write_all_at};
use crate::{Error, Result};

const PREFIX: &str = "kvcore-spill-";
const SUFFIX: &str = ".tmp";
const RANDOM: usize = 16;

/// Slots start at multiples of this, so that writing one never makes the system read a page of its neighbour.
const PAGE: usize = 4096;

/// A file of slots, as many for each group of layers.
pub struct SpillFile {
    groups: Vec<Group>,
    slots: usize,
    bytes: u64,
    // The order matters: a file that could not be unlinked is closed before it is removed.
    file: File,
    _name: Option<TempPath>,
}

struct Group {
    slot_bytes: usize,
    /// Where slot 0 begins.
    start: u64,
    digests: Vec<Option<NonZeroU128>>,
}

impl SpillFile {
    /// Make a file in `dir` with `slots` slots for each group; a slot of group g holds `slot_bytes_per_group[g]` bytes.
    /// It takes room on the disk as slots are first written, [`Self::total_bytes`] at most.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no slots or more bytes than a file can have, [`Error::OutOfMemory`],
    /// [`Error::Spill`] if the system refuses the file.
    pub fn create(dir: &Path, slot_bytes_per_group: &[usize], slots: usize) -> Result<Self> {
        if slots == 0 {
            return Err(Error::InvalidArgument("spill slots: expected at least 1, got 0".to_owned()));
        }
        let (mut groups, mut bytes) = (Vec::with_capacity(slot_bytes_per_group.len()), 0u64);
        for &slot_bytes in slot_bytes_per_group {
            let end = stride(slot_bytes).and_then(|n| n.checked_mul(slots as u64)).and_then(|n| n.checked_add(bytes));
            let end = end.filter(|&end| i64::try_from(end).is_ok()).ok_or_else(|| {
                Error::InvalidArgument(format!("a spill file of {slots} slots x {slot_bytes_per_group:?} is too large"))
            })?;
            let mut digests = Vec::new();
            digests.try_reserve_exact(slots).map_err(|e| Error::OutOfMemory {
                bytes: slots.saturating_mul(size_of::<NonZeroU128>()),
                what: "the digests of spilled blocks",
                reason: e.to_string(),
            })?;
            digests.resize(slots, None);
            groups.push(Group { slot_bytes, start: bytes, digests });
            bytes = end;
        }
        let refused = |e| failed(e, format_args!("cannot make {bytes} bytes in {}", dir.display()));
        let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
        remove_leftovers(dir);
        let named = tempfile::Builder::new().prefix(PREFIX).suffix(SUFFIX).rand_bytes(RANDOM).tempfile_in(dir);
        let (file, name) = named.map_err(refused)?.into_parts();
        // Without a name nobody else can open it, and it is gone when the last handle is.
        let name = fs::remove_file(&name).is_err().then_some(name);
        file.set_len(bytes).map_err(refused)?;
        Ok(Self { groups, slots, bytes, file, _name: name })
    }

    /// How many slots a group can have if the file may take `bytes` on the disk.
    pub fn slots_within(bytes: u64, slot_bytes_per_group: &[usize]) -> usize {
        let mut strides = slot_bytes_per_group.iter().map(|&slot_bytes| stride(slot_bytes));
        let all = strides.try_fold(0u64, |all, stride| all.checked_add(stride?));
        let slots = all.and_then(|all| bytes.checked_div(all)).unwrap_or(0);
        usize::try_from(slots).unwrap_or(usize::MAX)
    }

    /// Slots of each group.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// The most that the file takes on the disk.
    pub fn total_bytes(&self) -> u64 {
        self.bytes
    }

    /// Put a block's bytes into a slot, in place of what it held.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a group, slot or length that does not exist; [`Error::Spill`] if the system does
    /// not take the bytes (`StorageFull`: no room on the disk): the slot then holds nothing.
    pub fn write(&mut self, group: usize, slot: usize, bytes: &[u8]) -> Result<()> {
        let offset = self.locate(group, slot, bytes.len())?;
        let digest = &mut self.groups[group].digests[slot];
        *digest = None;
        write_all_at(&self.file, bytes, offset)
            .map_err(|e| failed(e, format_args!("cannot write slot {slot} of group {group}")))?;
        *digest = Some(digest_of(bytes));
        Ok(())
    }

    /// Get back what [`Self::write`] put into a slot.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a group, slot or length that does not exist; [`Error::Spill`] if the slot holds
    /// nothing (`NotFound`), other bytes than were written (`InvalidData`), or the system does not give them. `out` then
    /// holds nothing of use.
    pub fn read(&mut self, group: usize, slot: usize, out: &mut [u8]) -> Result<()> {
        let offset = self.locate(group, slot, out.len())?;
        let what = format_args!("cannot read slot {slot} of group {group}");
        let Some(digest) = self.groups[group].digests[slot] else {
            return Err(failed(io::Error::new(io::ErrorKind::NotFound, "it holds nothing"), what));
        };
        read_exact_at(&self.file, out, offset).map_err(|e| failed(e, what))?;
        if digest_of(out) != digest {
            return Err(failed(io::Error::new(io::ErrorKind::InvalidData, "not the bytes that were written"), what));
        }
        Ok(())
    }

    fn locate(&self, group: usize, slot: usize, bytes: usize) -> Result<u64> {
        let Some(g) = self.groups.get(group).filter(|_| slot < self.slots) else {
            return Err(Error::InvalidArgument(format!(
                "spill file: expected a group below {} and a slot below {}, got {group} and {slot}",
                self.groups.len(),
                self.slots
            )));
        };
        if bytes != g.slot_bytes {
            return Err(Error::InvalidArgument(format!(
                "spill file: expected {} bytes for group {group}, got {bytes}",
                g.slot_bytes
            )));
        }
        // `create` has checked that the end of the last slot can be counted.
        Ok(g.start + slot as u64 * stride(g.slot_bytes).unwrap_or_default())
    }
}

/// Bytes from one slot to the next.
fn stride(slot_bytes: usize) -> Option<u64> {
    slot_bytes.checked_next_multiple_of(PAGE).map(|bytes| bytes as u64)
}

/// Never zero, so that an unwritten slot takes no flag beside it.
fn digest_of(bytes: &[u8]) -> NonZeroU128 {
    NonZeroU128::new(xxh3_128(bytes)).unwrap_or(NonZeroU128::MIN)
}

fn failed(error: io::Error, what: std::fmt::Arguments<'_>) -> Error {
    Error::Spill { kind: error.kind(), message: format!("{what}: {error}") }
}

/// Remove the files of processes that were killed. One that is in use has lost its name already, or does not let itself
/// be removed; so whatever can be removed may be. Best effort: a folder that cannot be read shows at `create`.
fn remove_leftovers(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let random = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX));
        let ours = random.is_some_and(|r| r.len() == RANDOM && r.bytes().all(|byte| byte.is_ascii_alphanumeric()));
        if ours && entry.file_type().is_ok_and(|kind| kind.is_file()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two slots of two groups, all written.
    fn spill(folder: &Path) -> SpillFile {
        let mut spill = SpillFile::create(folder, &[300, 5000], 2).unwrap();
        for slot in 0..2 {
            spill.write(0, slot, &[slot as u8; 300]).unwrap();
            spill.write(1, slot, &[slot as u8; 5000]).unwrap();
        }
        spill
    }

    fn kind(result: Result<()>) -> Option<io::ErrorKind> {
        match result {
            Err(Error::Spill { kind, .. }) => Some(kind),
            _ => None,
        }
    }

    #[test]
    fn bytes_that_changed_on_the_disk_are_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let mut spill = spill(folder.path());
        let other = spill.file.try_clone().unwrap();
        for (group, bytes) in [(0, 300), (1, 5000)] {
            let offset = spill.locate(group, 1, bytes).unwrap();
            for at in [0, bytes as u64 / 2, bytes as u64 - 1] {
                write_all_at(&other, &[0x81], offset + at).unwrap();
                let mut out = vec![0; bytes];
                assert_eq!(kind(spill.read(group, 1, &mut out)), Some(io::ErrorKind::InvalidData));
                write_all_at(&other, &[1], offset + at).unwrap();
                assert_eq!(spill.read(group, 1, &mut out), Ok(()));
                assert_eq!(out, vec![1; bytes]);
            }
            // What the slot held before, as if the last write had never reached the disk.
            spill.write(group, 1, &vec![2; bytes]).unwrap();
            write_all_at(&other, &vec![1; bytes], offset).unwrap();
            assert_eq!(kind(spill.read(group, 1, &mut vec![0; bytes])), Some(io::ErrorKind::InvalidData));
            // Its neighbour is not concerned.
            assert_eq!(spill.read(group, 0, &mut vec![0; bytes]), Ok(()));
        }
        other.set_len(0).unwrap();
        assert_eq!(kind(spill.read(0, 0, &mut [0; 300])), Some(io::ErrorKind::UnexpectedEof));
    }

    #[test]
    fn a_slot_that_could_not_be_written_holds_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut spill = spill(folder.path());
        let name = folder.path().join("read only");
        File::create(&name).unwrap().set_len(spill.total_bytes()).unwrap();
        let writable = std::mem::replace(&mut spill.file, File::open(&name).unwrap());
        assert!(kind(spill.write(0, 0, &[7; 300])).is_some());
        spill.file = writable;
        assert_eq!(kind(spill.read(0, 0, &mut [0; 300])), Some(io::ErrorKind::NotFound));
        assert_eq!(spill.read(0, 1, &mut [0; 300]), Ok(()));
        spill.write(0, 0, &[7; 300]).unwrap();
        assert_eq!(spill.read(0, 0, &mut [0; 300]), Ok(()));
    }
}
