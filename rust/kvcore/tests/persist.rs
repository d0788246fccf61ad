//! Saved files: what was written comes back, and nothing else does.

mod cases;

use std::cell::Cell;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use cases::cases;
use kvcore::Error;
use kvcore::storage::persist::{Dtype, Fingerprint, Reader, TensorSpec, Value, Writer, save};
use kvcore::threads::NEVER;
use proptest::prelude::*;
use tempfile::{TempDir, tempdir};
use xxhash_rust::xxh3::xxh3_128;

/// As the format's description has it.
const PIECE: usize = 256 << 10;

const TOKENS: [u32; 5] = [1, 2, 3, u32::MAX, 0x0102_0304];

fn facts() -> Fingerprint {
    Fingerprint::new().with("model", "a model").with("dtype", "bfloat16").with("block_size", "16")
}

fn specs() -> Vec<TensorSpec> {
    vec![TensorSpec::new("tokens", Dtype::U32, [5]), TensorSpec::new("blocks", Dtype::U8, [2, 300])]
}

fn block(index: u8) -> Vec<u8> {
    (0..300u32).map(|i| (i * 7) as u8 ^ index).collect()
}

fn fill(writer: &mut Writer<'_>) -> kvcore::Result<()> {
    writer.values("tokens", &TOKENS)?;
    (0..2).try_for_each(|index| writer.write("blocks", &block(index)))
}

fn save_small(path: &Path) -> kvcore::Result<()> {
    save(path, "sequence", &facts(), &specs(), NEVER, fill)
}

/// Opens `path` and reads all that [`save_small`] wrote.
fn load_small(path: &Path) -> kvcore::Result<()> {
    let mut reader = Reader::open(path, "sequence", &facts(), NEVER)?;
    assert_eq!(reader.values::<u32>("tokens", &[None])?, TOKENS);
    let mut blocks = reader.tensor("blocks", Dtype::U8, &[None, Some(300)])?;
    assert_eq!(blocks.shape(), [2, 300]);
    for index in 0..2 {
        let mut out = vec![0; 300];
        blocks.read(&mut out)?;
        assert_eq!(out, block(index));
    }
    assert_eq!(blocks.remaining(), 0);
    Ok(())
}

fn refusal(path: &Path) -> String {
    match load_small(path) {
        Err(Error::Checkpoint(message)) => {
            assert!(message.starts_with(&path.display().to_string()), "{message}");
            message
        }
        other => panic!("expected a refusal, got {other:?}"),
    }
}

fn listing(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A folder with the small file in it, and the file's path and bytes.
fn small_file() -> (TempDir, std::path::PathBuf, Vec<u8>) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("sequence.safetensors");
    save_small(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    (folder, path, bytes)
}

/// A file written after the format's description, not by the code under test: its checksum is right whatever is in it.
fn forge(path: &Path, header: &str, data: &[u8]) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    let digests: Vec<u8> = bytes.chunks(PIECE).flat_map(|piece| xxh3_128(piece).to_be_bytes()).collect();
    bytes.extend_from_slice(&xxh3_128(&digests).to_be_bytes());
    fs::write(path, bytes).unwrap();
}

/// Metadata that the small file needs, then `rest` of the header.
fn header(rest: &str) -> String {
    let order = if cfg!(target_endian = "little") { "little" } else { "big" };
    format!(
        r#"{{"__metadata__":{{"format":"kvcore","format_version":"2","kind":"sequence","byte_order":"{order}",
            "fingerprint.model":"a model","fingerprint.dtype":"bfloat16","fingerprint.block_size":"16"}}{rest}}}"#
    )
}

const GOOD: &str = r#","tokens":{"dtype":"U32","shape":[5],"data_offsets":[0,20]}
    ,"blocks":{"dtype":"U8","shape":[2,300],"data_offsets":[20,620]}
    ,"checksum":{"dtype":"U8","shape":[16],"data_offsets":[620,636]}"#;

fn good_data() -> Vec<u8> {
    TOKENS.iter().flat_map(|token| token.to_le_bytes()).chain(block(0)).chain(block(1)).collect()
}

#[test]
fn a_file_comes_back() {
    let (folder, path, bytes) = small_file();
    load_small(&path).unwrap();
    assert_eq!(listing(folder.path()), ["sequence.safetensors"]);
    // Equal contents give equal bytes, and a later save replaces the file.
    save_small(&path).unwrap();
    assert_eq!(fs::read(&path).unwrap(), bytes);
    assert_eq!(listing(folder.path()), ["sequence.safetensors"]);
}

#[test]
fn the_format_is_what_its_description_says() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("forged");
    forge(&path, &header(GOOD), &good_data());
    load_small(&path).unwrap();
}

#[test]
fn a_file_is_safetensors_to_others() {
    let (_folder, _, bytes) = small_file();
    let others = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tokens: Vec<u8> = TOKENS.iter().flat_map(|token| token.to_le_bytes()).collect();
    assert_eq!(others.tensor("tokens").unwrap().data(), tokens);
    assert_eq!(others.tensor("blocks").unwrap().shape(), [2, 300]);
    assert_eq!(others.tensor("blocks").unwrap().data(), [block(0), block(1)].concat());
    assert_eq!(bytes.len() % 8, 636 % 8, "tensors start at a multiple of 8 bytes");
}

#[test]
fn every_cut_and_every_byte_too_many_is_refused() {
    let (_folder, path, bytes) = small_file();
    for len in 0..bytes.len() {
        fs::write(&path, &bytes[..len]).unwrap();
        let message = refusal(&path);
        assert!(message.contains("cut short"), "{message}");
    }
    for more in [1, 8, 16, 1000] {
        fs::write(&path, [bytes.clone(), vec![0; more]].concat()).unwrap();
        assert!(refusal(&path).contains("too long"));
    }
}

#[test]
fn every_flipped_bit_is_refused() {
    let (_folder, path, bytes) = small_file();
    let mut file = File::options().write(true).open(&path).unwrap();
    let mut put = |at: usize, byte: u8| {
        file.seek(SeekFrom::Start(at as u64)).unwrap();
        file.write_all(&[byte]).unwrap();
    };
    for (at, byte) in bytes.into_iter().enumerate() {
        for bit in 0..8 {
            put(at, byte ^ 1 << bit);
            refusal(&path);
        }
        put(at, byte);
    }
    load_small(&path).unwrap();
}

#[test]
fn every_piece_of_a_large_file_is_checked() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("large");
    let len = 3 * PIECE + 77;
    let specs = [TensorSpec::new("blocks", Dtype::U8, [len])];
    save(&path, "k", &facts(), &specs, NEVER, |writer| {
        writer.write("blocks", &(0..len).map(|i| (i / 1000) as u8).collect::<Vec<u8>>())
    })
    .unwrap();
    let bytes = fs::read(&path).unwrap();
    Reader::open(&path, "k", &facts(), NEVER).unwrap();
    for at in (0..bytes.len()).step_by(10_007).chain([PIECE - 1, PIECE, 3 * PIECE, bytes.len() - 17, bytes.len() - 16])
    {
        let mut file = File::options().write(true).open(&path).unwrap();
        file.seek(SeekFrom::Start(at as u64)).unwrap();
        file.write_all(&[bytes[at] ^ 0x10]).unwrap();
        assert!(matches!(Reader::open(&path, "k", &facts(), NEVER), Err(Error::Checkpoint(_))), "{at}");
        file.seek(SeekFrom::Start(at as u64)).unwrap();
        file.write_all(&[bytes[at]]).unwrap();
    }
    // Whole pieces that changed places.
    let mut swapped = bytes;
    let (first, second) = swapped[PIECE..3 * PIECE].split_at_mut(PIECE);
    first.swap_with_slice(second);
    fs::write(&path, swapped).unwrap();
    assert!(matches!(Reader::open(&path, "k", &facts(), NEVER), Err(Error::Checkpoint(_))));
}

#[test]
fn hostile_headers_are_refused() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("forged");
    let tensor = |name: &str, dtype: &str, shape: &str, start: u64, end: u64| {
        format!(r#","{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}"#)
    };
    let checksum = |start: u64| tensor("checksum", "U8", "[16]", start, start + 16);
    let data = good_data();
    let cases = [
        ("no tensors at all", header(""), vec![]),
        ("no checksum", header(&tensor("tokens", "U32", "[9]", 0, 36)), vec![0; 20]),
        ("the checksum is not last", header(&(checksum(0) + &tensor("z", "U8", "[16]", 16, 32))), vec![0; 16]),
        ("a checksum of another format", header(&tensor("checksum", "U32", "[4]", 0, 16)), vec![]),
        ("a checksum of another shape", header(&tensor("checksum", "U8", "[4, 4]", 0, 16)), vec![]),
        ("a gap", header(&(tensor("tokens", "U8", "[4]", 4, 8) + &checksum(8))), vec![0; 8]),
        (
            "an overlap",
            header(&(tensor("a", "U8", "[8]", 0, 8) + &tensor("b", "U8", "[8]", 4, 12) + &checksum(12))),
            vec![0; 12],
        ),
        ("a shape that does not fit", header(&(tensor("a", "U32", "[5]", 0, 8) + &checksum(8))), vec![0; 8]),
        ("an end before the start", header(&(tensor("a", "U8", "[0]", 8, 0) + &checksum(8))), vec![0; 8]),
        (
            "a huge tensor",
            header(&(tensor("a", "U8", "[9223372036854775807]", 0, i64::MAX as u64) + &checksum(8))),
            data.clone(),
        ),
        ("offsets up to 2^64", header(&tensor("checksum", "U8", "[18446744073709551615]", 0, u64::MAX)), data.clone()),
        (
            "a product that overflows",
            header(&(tensor("a", "U8", "[4294967296, 4294967296]", 0, 0) + &checksum(0))),
            vec![],
        ),
        ("a number beyond 2^64", header(&tensor("a", "U8", "[99999999999999999999]", 0, 8)), vec![0; 8]),
        ("a negative size", header(&tensor("a", "U8", "[-1]", 0, 8)), vec![0; 8]),
        ("a format that does not exist", header(&tensor("a", "U9", "[8]", 0, 8)), vec![0; 8]),
        ("one name twice", header(&(tensor("a", "U8", "[8]", 0, 8) + &tensor("a", "U8", "[8]", 8, 16))), vec![0; 16]),
        ("metadata that is not text", GOOD.replacen(',', r#"{"__metadata__":{"format":1},"#, 1) + "}", data.clone()),
        ("a list", "[]".to_owned(), data.clone()),
        ("nothing", String::new(), data.clone()),
        ("not UTF-8 when unescaped", r#"{"\ud800":1}"#.to_owned(), data.clone()),
        ("deep nesting", "[".repeat(100_000), vec![]),
        ("deep nesting of a tensor", format!(r#"{{"a":{}"#, r#"{"a":"#.repeat(100_000)), vec![]),
        ("no metadata", format!("{{{}}}", &GOOD[1..]), data.clone()),
        ("another program's file", header(GOOD).replace(r#""format":"kvcore""#, r#""format":"pt""#), data.clone()),
        ("another version", header(GOOD).replace(r#""format_version":"2""#, r#""format_version":"1""#), data.clone()),
        ("another kind", header(GOOD).replace("sequence", "prefixes"), data.clone()),
        ("another byte order", header(GOOD).replace("little", "middle").replace("big", "middle"), data.clone()),
        ("another model", header(GOOD).replace("a model", "b model"), data.clone()),
        ("one fact less", header(GOOD).replace(r#""fingerprint.dtype":"bfloat16","#, ""), data.clone()),
        (
            "one fact more",
            header(GOOD).replace(r#""fingerprint.dtype""#, r#""fingerprint.x":"y","fingerprint.dtype""#),
            data,
        ),
    ];
    for (what, header, data) in cases {
        forge(&path, &header, &data);
        let message = refusal(&path);
        assert!(!message.contains("altered") && message.len() < 800, "{what}: {message}");
    }
}

#[test]
fn what_differs_is_told() {
    let (_folder, path, _) = small_file();
    let open = |kind: &str, facts: &Fingerprint| match Reader::open(&path, kind, facts, NEVER) {
        Err(Error::Checkpoint(message)) => message,
        _ => panic!("expected a refusal"),
    };
    let message = open("sequence", &facts().with("dtype", "fp8_e4m3"));
    assert!(message.ends_with(": dtype: expected fp8_e4m3, the file has bfloat16"), "{message}");
    let message = open("sequence", &facts().with("scales", "xyz"));
    assert!(message.ends_with(": scales: expected xyz, the file has nothing"), "{message}");
    let message = open("prefixes", &facts());
    assert!(message.ends_with(": kind: expected prefixes, the file has sequence"), "{message}");
}

#[test]
fn tensors_are_checked_against_what_is_expected() {
    let (_folder, path, _) = small_file();
    let mut reader = Reader::open(&path, "sequence", &facts(), NEVER).unwrap();
    assert_eq!(reader.names().collect::<Vec<_>>(), ["blocks", "tokens"]);
    assert_eq!(reader.shape("blocks").unwrap(), [2, 300]);
    for (name, dtype, shape) in [
        ("block", Dtype::U8, &[None, None][..]),
        ("checksum", Dtype::U8, &[None]),
        ("blocks", Dtype::I8, &[None, None]),
        ("blocks", Dtype::U8, &[None]),
        ("blocks", Dtype::U8, &[None, Some(299)]),
        ("blocks", Dtype::U8, &[Some(3), Some(300)]),
    ] {
        assert!(matches!(reader.tensor(name, dtype, shape), Err(Error::Checkpoint(_))), "{name} {dtype} {shape:?}");
    }
    assert!(matches!(reader.values::<i32>("tokens", &[None]), Err(Error::Checkpoint(_))));
    assert!(matches!(reader.shape("block"), Err(Error::Checkpoint(_))));
    let mut blocks = reader.tensor("blocks", Dtype::U8, &[Some(2), None]).unwrap();
    assert!(matches!(blocks.read(&mut [0; 601]), Err(Error::InvalidArgument(_))));
    assert!(matches!(blocks.skip(601), Err(Error::InvalidArgument(_))));
    blocks.skip(300).unwrap();
    let mut out = [0; 300];
    blocks.read(&mut out).unwrap();
    assert_eq!(out[..], block(1));
    assert!(matches!(blocks.read(&mut [0]), Err(Error::InvalidArgument(_))));
}

#[test]
fn what_is_no_file_is_refused() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("file");
    assert!(refusal(&path).contains("cannot read"));
    assert!(refusal(folder.path()).contains("folder"));
    fs::write(&path, "").unwrap();
    assert!(refusal(&path).contains("cut short"));
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n";
    fs::write(&path, pointer).unwrap();
    assert!(refusal(&path).contains("LFS"));
    for length in [1 << 63, u64::MAX, u64::MAX - 7, 1 << 40, (1 << 20) + 1] {
        // A sparse file that could have such a header.
        let mut file = File::create(&path).unwrap();
        file.write_all(&length.to_le_bytes()).unwrap();
        file.set_len(1 << 32).unwrap();
        assert!(refusal(&path).contains("header"), "{length}");
    }
    #[cfg(unix)]
    {
        assert!(refusal(Path::new("/dev/zero")).contains("regular"));
        std::os::unix::fs::symlink(&path, folder.path().join("loop")).unwrap();
        fs::remove_file(&path).unwrap();
        fs::rename(folder.path().join("loop"), &path).unwrap();
        assert!(refusal(&path).contains("cannot read"));
    }
}

#[test]
fn a_failed_save_leaves_everything_as_it_was() {
    let (folder, path, bytes) = small_file();
    let big = [TensorSpec::new("a", Dtype::U8, [3 * PIECE])];
    let part = vec![1; PIECE];
    let stop_at = |at: usize| {
        let asked = Cell::new(0);
        move || asked.replace(asked.get() + 1) == at
    };
    let err = |result: kvcore::Result<()>| result.unwrap_err();

    let own = Error::InvalidState("the caller's".to_owned());
    let failed = save(&path, "k", &facts(), &big, NEVER, |writer| {
        writer.write("a", &part)?;
        Err(own.clone())
    });
    assert_eq!(err(failed), own);
    let missing = save(&path, "k", &facts(), &big, NEVER, |writer| writer.write("a", &part));
    assert!(matches!(err(missing), Error::InvalidArgument(_)));
    for at in 0..4 {
        let stopped = save(&path, "k", &facts(), &big, &stop_at(at), |writer| writer.write("a", &part.repeat(3)));
        assert_eq!(err(stopped), Error::Interrupted);
        // Neither can the caller go on as if nothing had happened.
        let ignored = save(&path, "k", &facts(), &big, &stop_at(at), |writer| {
            (0..3).for_each(|_| drop(writer.write("a", &part)));
            Ok(())
        });
        assert_eq!(err(ignored), Error::Interrupted);
    }
    let panicked = std::panic::catch_unwind(|| save(&path, "k", &facts(), &big, NEVER, |_| panic!("on purpose")));
    assert!(panicked.is_err());
    assert_eq!(fs::read(&path).unwrap(), bytes);
    assert_eq!(listing(folder.path()), ["sequence.safetensors"]);
}

#[test]
fn where_no_file_can_be_nothing_is_written() {
    let folder = tempdir().unwrap();
    let inner = folder.path().join("inner");
    fs::create_dir(&inner).unwrap();
    fs::write(folder.path().join("text"), "text").unwrap();
    let refused =
        |path: &Path| match save(path, "k", &facts(), &specs(), NEVER, |_| panic!("nothing was to be written")) {
            Err(Error::Checkpoint(message)) => assert!(message.contains("cannot write"), "{message}"),
            other => panic!("expected a refusal, got {other:?}"),
        };
    refused(&inner);
    refused(&folder.path().join("missing").join("file"));
    refused(&folder.path().join("text").join("file"));
    refused(Path::new(""));
    refused(&inner.join(".."));
    #[cfg(target_os = "linux")]
    {
        refused(Path::new("/proc/file"));
        refused(Path::new("/dev/null"));
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(&inner, fs::Permissions::from_mode(0o555)).unwrap();
        // Root may write everywhere.
        if File::create(inner.join("probe")).is_err() {
            refused(&inner.join("file"));
        }
        fs::set_permissions(&inner, fs::Permissions::from_mode(0o755)).unwrap();
    }
    assert_eq!(listing(folder.path()), ["inner", "text"]);
    assert_eq!(fs::read(folder.path().join("text")).unwrap(), b"text");
}

#[test]
fn bad_tensors_are_errors() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("file");
    let refused = |specs: &[TensorSpec], fill: &dyn Fn(&mut Writer<'_>) -> kvcore::Result<()>| {
        let result = save(&path, "k", &facts(), specs, NEVER, fill);
        assert!(matches!(result, Err(Error::InvalidArgument(_))), "{result:?}");
        assert_eq!(listing(folder.path()), [""; 0]);
    };
    let one = |name: &str, dtype, shape: &[usize]| vec![TensorSpec::new(name, dtype, shape)];
    for name in ["", "__metadata__", "checksum"] {
        refused(&one(name, Dtype::U8, &[0]), &|_| Ok(()));
    }
    refused(&[specs(), specs()].concat(), &|_| Ok(()));
    refused(&one("a", Dtype::U64, &[usize::MAX / 2]), &|_| Ok(()));
    refused(&one("a", Dtype::U8, &[usize::MAX - 8]), &|_| Ok(()));
    refused(&one("a", Dtype::F4, &[1]), &|_| Ok(()));
    refused(&one(&"a".repeat(1 << 20), Dtype::U8, &[0]), &|_| Ok(()));
    refused(&specs(), &|writer| writer.write("blocks", &[0]));
    refused(&specs(), &|writer| writer.write("other", &[0]));
    refused(&specs(), &|writer| writer.write("tokens", &[0; 21]));
    refused(&specs(), &|writer| writer.values("tokens", &[0u8; 20]));
    refused(&specs(), &|writer| fill(writer).and_then(|()| writer.write("blocks", &[0])));
    refused(&specs(), &|writer| fill(writer).and_then(|()| writer.write("tokens", &[0])));
    // An error that the caller does not pass on is one at the end.
    refused(&specs(), &|writer| {
        let _ = writer.values("tokens", &[0u8; 20]);
        (0..2).try_for_each(|index| writer.write("blocks", &block(index)))
    });
}

#[test]
fn a_bare_name_is_one_in_the_current_folder() {
    let name = format!("kvcore-test-{}.safetensors", std::process::id());
    save_small(Path::new(&name)).unwrap();
    let loaded = load_small(Path::new(&name));
    fs::remove_file(&name).unwrap();
    loaded.unwrap();
}

#[cfg(unix)]
#[test]
fn a_new_file_is_readable_for_whom_any_new_file_is() {
    use std::os::unix::fs::PermissionsExt;
    let (folder, path, _) = small_file();
    let any = folder.path().join("any");
    File::create(&any).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&path), mode(&any));
}

#[test]
fn saves_at_the_same_time_leave_one_whole_file() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("file");
    let specs = [TensorSpec::new("a", Dtype::U8, [PIECE + 5])];
    std::thread::scope(|scope| {
        for writer in 0..4u8 {
            let (path, specs) = (&path, &specs);
            scope.spawn(move || {
                for _ in 0..5 {
                    let bytes = vec![writer; PIECE + 5];
                    save(path, "k", &facts(), specs, NEVER, |w| w.write("a", &bytes)).unwrap();
                    let all = Reader::open(path, "k", &facts(), NEVER).unwrap().values::<u8>("a", &[None]).unwrap();
                    assert!(all.iter().all(|&byte| byte == all[0]));
                }
            });
        }
    });
    assert_eq!(listing(folder.path()), ["file"]);
}

/// Saves three pieces of data, opens them, lets `change` at the file, and reads.
fn read_after(change: impl FnOnce(&Path)) -> kvcore::Result<Vec<u8>> {
    let folder = tempdir().unwrap();
    let path = folder.path().join("file");
    let specs = [TensorSpec::new("a", Dtype::U8, [3 * PIECE])];
    save(&path, "k", &facts(), &specs, NEVER, |writer| writer.write("a", &vec![5; 3 * PIECE])).unwrap();
    let mut reader = Reader::open(&path, "k", &facts(), NEVER).unwrap();
    change(&path);
    reader.values::<u8>("a", &[None])
}

#[test]
fn a_file_that_changes_while_it_is_read_is_found_out() {
    assert_eq!(read_after(|_| ()), Ok(vec![5; 3 * PIECE]));
    let open = |path: &Path| File::options().read(true).write(true).open(path).unwrap();
    let altered = read_after(|path| {
        let mut file = open(path);
        file.seek(SeekFrom::Start(2 * PIECE as u64)).unwrap();
        file.write_all(&[6]).unwrap();
    });
    assert!(matches!(&altered, Err(Error::Checkpoint(message)) if message.contains("altered while")), "{altered:?}");
    let cut = read_after(|path| open(path).set_len(PIECE as u64).unwrap());
    assert!(matches!(&cut, Err(Error::Checkpoint(message)) if message.contains("cannot read")), "{cut:?}");
    // Whoever has opened a file keeps it when another is saved in its place.
    let replaced = read_after(|path| save_small(path).unwrap());
    assert_eq!(replaced, Ok(vec![5; 3 * PIECE]));
}

#[test]
fn reading_can_be_interrupted() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("file");
    let specs = [TensorSpec::new("a", Dtype::U8, [5 * PIECE])];
    save(&path, "k", &facts(), &specs, NEVER, |writer| writer.write("a", &vec![5; 5 * PIECE])).unwrap();
    for at in 0..11 {
        let asked = Cell::new(0);
        let should_stop = || asked.replace(asked.get() + 1) == at;
        let read = Reader::open(&path, "k", &facts(), &should_stop).and_then(|mut r| r.values::<u8>("a", &[None]));
        assert!(matches!(read, Err(Error::Interrupted)), "{at}");
    }
}

#[test]
fn values_are_little_endian() {
    fn there_and_back<T: Value + PartialEq + std::fmt::Debug>(values: &[T], bytes: &[u8]) {
        let folder = tempdir().unwrap();
        let path = folder.path().join("file");
        let specs = [TensorSpec::new("a", T::DTYPE, [values.len()])];
        save(&path, "k", &facts(), &specs, NEVER, |writer| writer.values("a", values)).unwrap();
        let mut all = Vec::new();
        File::open(&path).unwrap().read_to_end(&mut all).unwrap();
        assert_eq!(&all[all.len() - 16 - bytes.len()..all.len() - 16], bytes);
        assert_eq!(Reader::open(&path, "k", &facts(), NEVER).unwrap().values::<T>("a", &[None]).unwrap(), values);
    }
    there_and_back(&[1u8, 255], &[1, 255]);
    there_and_back(&[0x0102u16], &[2, 1]);
    there_and_back(&[0x0102_0304u32], &[4, 3, 2, 1]);
    there_and_back(&[-2i32], &[254, 255, 255, 255]);
    there_and_back(&[u64::MAX - 1, 3], &[254, 255, 255, 255, 255, 255, 255, 255, 3, 0, 0, 0, 0, 0, 0, 0]);
    there_and_back(&[i64::MIN], &[0, 0, 0, 0, 0, 0, 0, 128]);
    there_and_back(&[1f32], &[0, 0, 128, 63]);
    there_and_back(&[1f64], &[0, 0, 0, 0, 0, 0, 240, 63]);
    there_and_back::<u64>(&[], &[]);
}

#[derive(Debug, Clone)]
struct Case {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    seed: u64,
}

impl Case {
    fn bytes(&self) -> Vec<u8> {
        let len = self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8;
        let mut state = self.seed | 1;
        let next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        std::iter::repeat_with(next).take(len).collect()
    }
}

fn case() -> impl Strategy<Value = Case> {
    let dtype = prop::sample::select(vec![Dtype::U8, Dtype::U32, Dtype::U64, Dtype::F32, Dtype::BF16, Dtype::I8]);
    let shape = prop_oneof![
        8 => prop::collection::vec(0..7usize, 0..4),
        1 => (1..4usize, 1..200_000usize).prop_map(|(n, m)| vec![n, m]),
    ];
    ("[ -~]{1,12}|\\PC{1,4}", dtype, shape, any::<u64>()).prop_map(|(name, dtype, shape, seed)| Case {
        name,
        dtype,
        shape,
        seed,
    })
}

proptest! {
    #![proptest_config(cases(100))]

    #[test]
    fn anything_comes_back(
        tensors in prop::collection::vec(case(), 0..6),
        facts in prop::collection::btree_map("\\PC{0,8}", "\\PC{0,20}", 0..5),
        kind in "\\PC{0,10}",
        pieces in prop::collection::vec(1..100_000usize, 1..4),
    ) {
        let mut tensors = tensors;
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        tensors.dedup_by(|a, b| a.name == b.name);
        tensors.retain(|t| t.name != "checksum");
        tensors.sort_by_key(|t| t.seed);
        let facts: Fingerprint = facts.into_iter().collect();
        let specs: Vec<TensorSpec> =
            tensors.iter().map(|t| TensorSpec::new(t.name.as_str(), t.dtype, t.shape.as_slice())).collect();
        let folder = tempdir().unwrap();
        let path = folder.path().join("file");
        save(&path, &kind, &facts, &specs, NEVER, |writer| {
            for tensor in &tensors {
                let (bytes, mut at) = (tensor.bytes(), 0);
                for &piece in pieces.iter().cycle() {
                    if at == bytes.len() {
                        break;
                    }
                    let end = bytes.len().min(at + piece);
                    writer.write(&tensor.name, &bytes[at..end])?;
                    at = end;
                }
            }
            Ok(())
        }).unwrap();
        safetensors::SafeTensors::deserialize(&fs::read(&path).unwrap()).unwrap();

        let mut reader = Reader::open(&path, &kind, &facts, NEVER).unwrap();
        prop_assert_eq!(reader.names().count(), tensors.len());
        // From the last to the first: no order of reading is special.
        for tensor in tensors.iter().rev() {
            let shape: Vec<Option<usize>> = tensor.shape.iter().copied().map(Some).collect();
            let mut part = reader.tensor(&tensor.name, tensor.dtype, &shape).unwrap();
            let (bytes, mut at) = (tensor.bytes(), 0);
            prop_assert_eq!(part.remaining(), bytes.len());
            for (i, &piece) in pieces.iter().cycle().enumerate() {
                let end = bytes.len().min(at + piece);
                if i % 3 == 2 {
                    part.skip(end - at).unwrap();
                } else {
                    let mut out = vec![0; end - at];
                    part.read(&mut out).unwrap();
                    prop_assert_eq!(&out, &bytes[at..end]);
                }
                at = end;
                if at == bytes.len() {
                    break;
                }
            }
            prop_assert_eq!(part.remaining(), 0);
        }
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), length in 0..200u64, honest in any::<bool>()) {
        let folder = tempdir().unwrap();
        let path = folder.path().join("file");
        let mut all = if honest { length.to_le_bytes().to_vec() } else { Vec::new() };
        all.extend(bytes);
        fs::write(&path, all).unwrap();
        prop_assert!(matches!(Reader::open(&path, "k", &Fingerprint::new(), NEVER), Err(Error::Checkpoint(_))));
    }

    /// Damage in the header that the checksum does not tell of: the header alone must be judged rightly.
    #[test]
    fn a_forged_header_gives_an_error_or_a_file(at in any::<prop::sample::Index>(), with in "[ -~]{0,3}", cut in 0..4usize) {
        let folder = tempdir().unwrap();
        let path = folder.path().join("file");
        let mut header = header(GOOD);
        let start = at.index(header.len());
        let end = header.len().min(start + cut);
        header.replace_range(start..end, &with);
        forge(&path, &header, &good_data());
        if let Ok(mut reader) = Reader::open(&path, "sequence", &facts(), NEVER) {
            let _ = reader.values::<u32>("tokens", &[None]);
            let _ = reader.values::<u8>("blocks", &[None, None]);
        }
    }
}
