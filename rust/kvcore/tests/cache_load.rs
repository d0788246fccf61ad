//! A load that fails changes nothing, wherever it fails.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvcore::Error;
use kvcore::cache::{CacheConfig, KvCache};
use kvcore::formats::KvDtype;
use kvcore::paging::{AddOptions, Key, SeqId};
use kvcore::simd::Level;
use kvcore::threads::{NEVER, Threads};
use tempfile::tempdir;
use xxhash_rust::xxh3::xxh3_128;

const WIDTH: usize = 4;

fn cache(num_blocks: usize) -> KvCache {
    let config = CacheConfig { max_events: 100, ..CacheConfig::new(1, 1, WIDTH, num_blocks, 16, KvDtype::F32) };
    let mut cache = KvCache::new(config, None, Level::best(), Arc::new(Threads::new(Some(1)).unwrap())).unwrap();
    cache.set_now(Duration::ZERO);
    cache
}

/// Computes a prompt whose K and V are its token ids.
fn computed(cache: &mut KvCache, tokens: &[u32]) -> SeqId {
    let seq = cache.add(tokens, &AddOptions::default()).unwrap();
    let start = cache.manager().num_computed_tokens(seq).unwrap();
    let mut batch = cache.plan(&[(seq, tokens.len() - start)]).unwrap();
    let x: Vec<f32> = tokens[start..].iter().flat_map(|&token| [token as f32; WIDTH]).collect();
    cache.write(0, &mut batch, &x, Some(&x)).unwrap();
    cache.commit(&batch).unwrap();
    seq
}

fn saved(folder: &Path, len: u32) -> PathBuf {
    let mut cache = cache(2500);
    let seq = computed(&mut cache, &(0..len).collect::<Vec<_>>());
    let path = folder.join("sequence");
    cache.save(seq, &path, NEVER).unwrap();
    path
}

fn assert_reads(cache: &KvCache, seq: SeqId, len: u32) {
    let dense = cache.read(0, seq).unwrap();
    let expected: Vec<f32> = (0..len).flat_map(|token| [token as f32; WIDTH]).collect();
    assert_eq!((dense.k, dense.v), (expected.clone(), expected));
}

#[test]
fn a_sealed_file_that_makes_no_sense_changes_nothing() {
    let folder = tempdir().unwrap();
    let path = saved(folder.path(), 40);
    let whole = fs::read(&path).unwrap();
    let mut cache = cache(8);
    let seq = computed(&mut cache, &(0..20).collect::<Vec<_>>());
    cache.free(seq).unwrap();
    cache.take_events();
    let before = cache.stats();
    let replaced = |old: &str, new: &str| {
        assert_eq!(old.len(), new.len());
        let at = whole.windows(old.len()).position(|part| part == old.as_bytes()).unwrap();
        let mut altered = whole.clone();
        altered[at..at + old.len()].copy_from_slice(new.as_bytes());
        altered
    };
    for (old, new) in [
        ("group.0.blocks", "group.0.blockz"),
        ("group.0.held", "group.0.hell"),
        ("computed", "computer"),
        ("token_ids", "tokens_id"),
        ("shared", "sharez"),
    ] {
        let mut altered = replaced(old, new);
        // The file is smaller than a piece: its checksum is that of one digest.
        let end = altered.len() - 16;
        let checksum = xxh3_128(&xxh3_128(&altered[..end]).to_be_bytes()).to_be_bytes();
        altered[end..].copy_from_slice(&checksum);
        fs::write(&path, &altered).unwrap();
        let error = cache.load(&path, NEVER).unwrap_err();
        assert!(matches!(&error, Error::Checkpoint(why) if !why.contains("checksum")), "{error}");
        assert_eq!(cache.stats(), before);
        assert!(cache.take_events().list.is_empty());
        cache.check().unwrap();
    }
    fs::write(&path, &whole).unwrap();
    let seq = cache.load(&path, NEVER).unwrap();
    assert_reads(&cache, seq, 40);
    assert_eq!(cache.manager().num_cached_tokens(seq).unwrap(), 16, "whole blocks are shared");
    let after = cache.stats();
    assert_eq!((after.hit_tokens, after.query_tokens), (before.hit_tokens, before.query_tokens));
}

#[test]
fn an_interrupted_load_leaves_no_sequence_and_nothing_to_find() {
    let folder = tempdir().unwrap();
    // Several pieces of 256 KiB.
    let len = 40_000;
    let path = saved(folder.path(), len);
    let calls = Cell::new(0);
    let mut cache = cache(2501);
    let first = computed(&mut cache, &[9; 16]);
    cache.free(first).unwrap();
    let before = cache.stats();
    for limit in 0.. {
        calls.set(0);
        let should_stop = || calls.replace(calls.get() + 1) == limit;
        match cache.load(&path, &should_stop) {
            Err(error) => assert_eq!(error, Error::Interrupted),
            Ok(seq) => {
                assert!(limit > 10);
                assert_reads(&cache, seq, len);
                assert_eq!(cache.stats().cached, 1);
                break;
            }
        }
        cache.check().unwrap();
        assert_eq!(cache.stats(), before);
        assert_eq!(cache.manager().find_prefix(&[0, 1, 2, 3], Key::default()).num_tokens, 0);
    }
}
