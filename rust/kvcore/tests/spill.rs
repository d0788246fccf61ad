//! The spill file: slots give back what they were given, and leave nothing behind.

mod cases;

use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use cases::cases;
use kvcore::Error;
use kvcore::storage::spill::SpillFile;
use proptest::prelude::*;
use tempfile::tempdir;

fn kind(result: kvcore::Result<()>) -> ErrorKind {
    match result {
        Err(Error::Spill { kind, .. }) => kind,
        other => panic!("expected an error of the spill file, got {other:?}"),
    }
}

fn files(folder: &Path) -> usize {
    fs::read_dir(folder).unwrap().count()
}

#[test]
fn a_slot_gives_back_what_it_was_given() {
    let folder = tempdir().unwrap();
    let mut spill = SpillFile::create(folder.path(), &[5000, 1, 4096], 3).unwrap();
    assert_eq!(spill.slots(), 3);
    for (group, bytes) in [(0, 5000), (1, 1), (2, 4096)] {
        for slot in 0..3 {
            spill.write(group, slot, &vec![(group * 3 + slot) as u8; bytes]).unwrap();
        }
    }
    for (group, bytes) in [(2, 4096), (0, 5000), (1, 1)] {
        for slot in 0..3 {
            let mut out = vec![99; bytes];
            spill.read(group, slot, &mut out).unwrap();
            assert_eq!(out, vec![(group * 3 + slot) as u8; bytes]);
        }
    }
}

#[test]
fn what_was_not_written_is_not_read() {
    let folder = tempdir().unwrap();
    let mut spill = SpillFile::create(folder.path(), &[16], 2).unwrap();
    spill.write(0, 1, &[0; 16]).unwrap();
    assert_eq!(kind(spill.read(0, 0, &mut [0; 16])), ErrorKind::NotFound);
    assert_eq!(spill.read(0, 1, &mut [1; 16]), Ok(()));
}

#[test]
fn bad_groups_slots_and_lengths_are_errors() {
    let folder = tempdir().unwrap();
    let mut spill = SpillFile::create(folder.path(), &[16, 32], 2).unwrap();
    for (group, slot, bytes) in
        [(2, 0, 16), (usize::MAX, 0, 16), (0, 2, 16), (0, usize::MAX, 16), (0, 0, 15), (0, 0, 32), (1, 1, 0)]
    {
        assert!(matches!(spill.write(group, slot, &vec![0; bytes]), Err(Error::InvalidArgument(_))));
        assert!(matches!(spill.read(group, slot, &mut vec![0; bytes]), Err(Error::InvalidArgument(_))));
    }
}

#[test]
fn bad_sizes_are_errors() {
    let folder = tempdir().unwrap();
    let create = |slot_bytes: &[usize], slots| SpillFile::create(folder.path(), slot_bytes, slots).err();
    assert!(matches!(create(&[16], 0), Some(Error::InvalidArgument(_))));
    for (slot_bytes, slots) in [(&[usize::MAX][..], 1), (&[1 << 40], 1 << 40), (&[1 << 62, 1 << 62], 1)] {
        assert!(matches!(create(slot_bytes, slots), Some(Error::InvalidArgument(_))), "{slot_bytes:?} x {slots}");
    }
    // As large as an offset can be, but no disk: the system's or the memory's error.
    assert!(matches!(create(&[1], 1 << 50), Some(Error::OutOfMemory { .. } | Error::Spill { .. })));
    assert_eq!(files(folder.path()), 0);
}

#[test]
fn a_folder_that_takes_no_file_is_an_error() {
    let folder = tempdir().unwrap();
    let create = |dir: &Path| match SpillFile::create(dir, &[16], 1) {
        Err(Error::Spill { kind, message }) => {
            assert!(message.contains(&dir.display().to_string()), "{message}");
            kind
        }
        _ => panic!("expected an error"),
    };
    assert_eq!(create(&folder.path().join("missing")), ErrorKind::NotFound);
    fs::write(folder.path().join("text"), "text").unwrap();
    assert_eq!(create(&folder.path().join("text")), ErrorKind::NotADirectory);
    assert_eq!(files(folder.path()), 1);
}

#[test]
fn nothing_is_left_in_the_folder() {
    let folder = tempdir().unwrap();
    let mut spill = SpillFile::create(folder.path(), &[16], 2).unwrap();
    #[cfg(unix)]
    assert_eq!(files(folder.path()), 0, "nor seen while it is in use");
    spill.write(0, 0, &[1; 16]).unwrap();
    drop(spill);
    assert_eq!(files(folder.path()), 0);
}

#[test]
fn leftovers_of_killed_processes_are_removed_and_nothing_else() {
    let folder = tempdir().unwrap();
    let leftover = "kvcore-spill-0123456789abcDEF.tmp";
    let kept = [
        "kvcore-spill-0123456789abcDE.tmp",
        "kvcore-spill-0123456789abcDEF.txt",
        "my-kvcore-spill-0123456789abcDEF.tmp",
        "kvcore-spill-0123456789abc-EF.tmp",
    ];
    for name in kept.iter().chain([&leftover]) {
        fs::write(folder.path().join(name), "x").unwrap();
    }
    fs::create_dir(folder.path().join("kvcore-spill-AAAAAAAAAAAAAAAA.tmp")).unwrap();
    let mut running = SpillFile::create(folder.path(), &[16], 1).unwrap();
    running.write(0, 0, &[3; 16]).unwrap();
    assert!(!folder.path().join(leftover).exists());
    assert_eq!(files(folder.path()), kept.len() + 1);
    // Another one in the same folder does not touch the first.
    let mut second = SpillFile::create(folder.path(), &[16], 1).unwrap();
    second.write(0, 0, &[4; 16]).unwrap();
    let mut out = [0; 16];
    running.read(0, 0, &mut out).unwrap();
    assert_eq!(out, [3; 16]);
}

#[test]
fn the_size_is_bounded() {
    let folder = tempdir().unwrap();
    for bytes in [0u64, 4095, 4096, 100_000, 1 << 30] {
        for slot_bytes in [&[1][..], &[4096], &[4097, 3], &[400 << 10, 100, 70_272]] {
            let slots = SpillFile::slots_within(bytes, slot_bytes);
            let needed: usize = slot_bytes.iter().map(|n| n.next_multiple_of(4096)).sum();
            assert!((slots * needed) as u64 <= bytes && ((slots + 1) * needed) as u64 > bytes);
            if slots > 0 {
                assert!(SpillFile::create(folder.path(), slot_bytes, slots).unwrap().total_bytes() <= bytes);
            }
        }
    }
    assert_eq!(SpillFile::slots_within(u64::MAX, &[]), 0);
    assert_eq!(SpillFile::slots_within(u64::MAX, &[usize::MAX, usize::MAX]), 0);
}

#[cfg(target_os = "linux")]
#[test]
fn a_slot_takes_room_once_it_is_written() {
    use std::os::linux::fs::MetadataExt;
    let folder = tempdir().unwrap();
    let mut spill = SpillFile::create(folder.path(), &[1 << 20], 1 << 14).unwrap();
    assert_eq!(spill.total_bytes(), 1 << 34);
    // The file has no name but that of its handle.
    let links = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let ours = |link: &std::path::PathBuf| fs::read_link(link).is_ok_and(|file| file.starts_with(folder.path()));
    let link = links.into_iter().find(ours).unwrap();
    assert_eq!(fs::metadata(&link).unwrap().st_size(), 1 << 34);
    assert_eq!(fs::metadata(&link).unwrap().st_blocks(), 0);
    spill.write(0, 1000, &vec![1; 1 << 20]).unwrap();
    assert!(fs::metadata(&link).unwrap().st_blocks() * 512 <= 2 << 20);
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn slots_are_independent(
        sizes in prop::collection::vec(prop_oneof![0..20usize, 4090..4100usize, 1..20_000usize], 1..4),
        slots in 1..5usize,
        ops in prop::collection::vec((any::<usize>(), any::<usize>(), any::<u8>(), any::<bool>()), 1..60),
    ) {
        let folder = tempdir().unwrap();
        let mut spill = SpillFile::create(folder.path(), &sizes, slots).unwrap();
        let mut model: HashMap<(usize, usize), u8> = HashMap::new();
        for (group, slot, byte, write) in ops {
            let (group, slot) = (group % sizes.len(), slot % slots);
            let mut bytes: Vec<u8> = (0..sizes[group]).map(|i| byte ^ i as u8).collect();
            if write {
                spill.write(group, slot, &bytes).unwrap();
                model.insert((group, slot), byte);
            } else if let Some(&byte) = model.get(&(group, slot)) {
                spill.read(group, slot, &mut bytes).unwrap();
                prop_assert!(bytes.iter().enumerate().all(|(i, &b)| b == byte ^ i as u8));
            } else {
                prop_assert_eq!(kind(spill.read(group, slot, &mut bytes)), ErrorKind::NotFound);
            }
        }
    }
}
