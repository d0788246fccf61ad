//! Faults that users of paged caches met elsewhere, as small cases with exact values.

mod paging_store;

use kvcore::Error;
use kvcore::paging::{AddOptions, BlockId, BlockManager, BlockPool, Key, ManagerConfig, SeqId};
use paging_store::{OneGroup, Store, run};

fn manager(num_blocks: usize, block_size: usize) -> (BlockManager, Store) {
    (BlockManager::new(ManagerConfig::new(num_blocks, block_size)).unwrap(), Store::new(num_blocks, block_size))
}

/// Adds a prompt and computes all of it; how many tokens were cached.
fn prompt(manager: &mut BlockManager, store: &mut Store, tokens: &[u32]) -> (SeqId, usize) {
    let seq = manager.admit(tokens, None, true).unwrap();
    let cached = manager.num_cached_tokens(seq).unwrap();
    run(manager, store, seq, tokens.len() - cached).unwrap();
    (seq, cached)
}

fn range(from: u32, len: usize) -> Vec<u32> {
    (from..from + len as u32).collect()
}

#[test]
fn equal_hashes_for_everything_share_nothing_that_differs() {
    let config = ManagerConfig { hash: |_, _| 42, ..ManagerConfig::new(64, 16) };
    let (mut manager, mut store) = (BlockManager::new(config).unwrap(), Store::new(64, 16));
    let first = range(0, 48);
    let (a, _) = prompt(&mut manager, &mut store, &first);
    // Another first block; another first block before an equal second; an equal first block before another second.
    let mut second = first.clone();
    second[3] = 999;
    let mut third = first.clone();
    third[20] = 999;
    let mut same_block_twice = range(0, 16);
    same_block_twice.extend(range(0, 17));
    let mut seqs = vec![a];
    for (tokens, cached) in [(range(1000, 48), 0), (second, 3), (third, 20), (same_block_twice, 16), (first, 47)] {
        let (seq, hit) = prompt(&mut manager, &mut store, &tokens);
        assert_eq!(hit, cached);
        seqs.push(seq);
    }
    for &seq in &seqs {
        store.assert_reads(&manager, seq, None, 0);
    }
    for seq in seqs {
        manager.free(seq).unwrap();
    }
    manager.check().unwrap();
    assert_eq!(manager.num_free_blocks(), 64);
}

#[test]
fn a_full_hit_leaves_a_token_to_compute() {
    for len in [1, 2, 15, 16, 17, 31, 32, 33] {
        let cached = len - 1;
        let (mut manager, mut store) = manager(8, 16);
        assert_eq!(prompt(&mut manager, &mut store, &range(0, len)).1, 0);
        assert_eq!(prompt(&mut manager, &mut store, &range(0, len)).1, cached, "prompt of {len}");
        let stats = manager.stats();
        assert_eq!((stats.hit_tokens, stats.query_tokens), (cached as u64, 2 * len as u64));
    }
}

#[test]
fn other_keys_share_nothing() {
    let (mut manager, _) = manager(256, 4);
    let parts: [Option<&[u8]>; 4] = [None, Some(b""), Some(b"X"), Some(b"\0")];
    let keys = |part| {
        let none = Key::default();
        [Key { salt: part, ..none }, Key { adapter: part, ..none }, Key { extra: part, ..none }]
    };
    let mut keys: Vec<Key<'_>> = parts[1..].iter().flat_map(|&part| keys(part)).collect();
    keys.extend([Key::default(), Key { salt: Some(b"X"), adapter: Some(b"X"), extra: None }]);
    let tokens = range(0, 9);
    for round in 0..2 {
        for &key in &keys {
            let seq = manager.add(&tokens, &AddOptions { key, ..AddOptions::default() }, &mut Vec::new()).unwrap();
            let cached = manager.num_cached_tokens(seq).unwrap();
            assert_eq!(cached, 8 * round, "{key:?}");
            let batch = manager.plan(&[(seq, 9 - cached)], &mut Vec::new()).unwrap();
            manager.commit(&batch).unwrap();
            manager.free(seq).unwrap();
            manager.check().unwrap();
        }
    }
}

#[test]
fn two_equal_prompts_in_one_step_keep_their_own_blocks() {
    let (mut manager, mut store) = manager(8, 16);
    let tokens = range(0, 32);
    let [a, b] = [(); 2].map(|()| manager.admit(&tokens, None, true).unwrap());
    let batch = manager.plan(&[(a, 32), (b, 32)], &mut Vec::new()).unwrap();
    // Nothing can be found before it is there.
    assert_eq!(manager.found(&range(0, 33), None), []);
    let early = manager.admit(&range(0, 33), None, true).unwrap();
    assert_eq!(manager.num_cached_tokens(early).unwrap(), 0);
    store.write(&manager, &batch, None, 0);
    manager.commit(&batch).unwrap();
    manager.check().unwrap();
    assert!(manager.table(a).unwrap().iter().all(|block| !manager.table(b).unwrap().contains(block)));
    assert_eq!(manager.found(&range(0, 33), None), manager.table(a).unwrap());
    for seq in [a, b] {
        store.assert_reads(&manager, seq, None, 0);
    }
    for seq in [a, b, early] {
        manager.free(seq).unwrap();
        manager.check().unwrap();
    }
    let stats = manager.stats();
    assert_eq!((stats.free, stats.cached, stats.used, stats.tokens), (6, 2, 0, 0));
}

#[test]
fn a_reused_block_is_not_found_under_its_old_prefix() {
    let (mut manager, mut store) = manager(3, 4);
    let (a, _) = prompt(&mut manager, &mut store, &range(0, 9));
    manager.free(a).unwrap();
    assert_eq!(manager.known(&range(0, 10), None), 9);
    // Two blocks: the leaf, then the one before it; the first stays.
    let (b, _) = prompt(&mut manager, &mut store, &range(100, 5));
    assert_eq!(manager.known(&range(0, 10), None), 4);
    assert_eq!(manager.stats().evictions, 2);
    manager.free(b).unwrap();
    let (_, cached) = prompt(&mut manager, &mut store, &range(200, 12));
    assert_eq!((cached, manager.known(&range(0, 10), None)), (0, 0));
    assert_eq!(manager.known(&range(100, 6), None), 0);
}

#[test]
fn branches_copy_the_partly_filled_last_block() {
    let (mut manager, mut store) = manager(8, 16);
    let (parent, _) = prompt(&mut manager, &mut store, &range(0, 19));
    let child = manager.fork(parent).unwrap();
    assert_eq!(manager.table(parent).unwrap(), manager.table(child).unwrap());
    manager.append(parent, &[100]).unwrap();
    manager.append(child, &[200]).unwrap();
    run(&mut manager, &mut store, child, 1).unwrap();
    let last = |manager: &BlockManager, seq| *manager.table(seq).unwrap().last().unwrap();
    assert_ne!(last(&manager, parent), last(&manager, child));
    store.assert_reads(&manager, parent, None, 0);
    let before = last(&manager, parent);
    run(&mut manager, &mut store, parent, 1).unwrap();
    assert_eq!(last(&manager, parent), before, "the last holder writes in place");
    for seq in [parent, child] {
        store.assert_reads(&manager, seq, None, 0);
    }
    assert_eq!(manager.table(parent).unwrap()[0], manager.table(child).unwrap()[0]);
    let stats = manager.stats();
    assert_eq!((stats.copies, stats.used, stats.tokens), (1, 3, 16 + 4 + 4));
}

#[test]
fn decode_takes_a_block_when_the_last_is_full() {
    let (mut manager, mut store) = manager(8, 16);
    let (seq, _) = prompt(&mut manager, &mut store, &range(0, 16));
    let mut counts = vec![manager.table(seq).unwrap().len()];
    for step in 0..18 {
        manager.append(seq, &[step]).unwrap();
        run(&mut manager, &mut store, seq, 1).unwrap();
        counts.push(manager.table(seq).unwrap().len());
        assert_eq!(manager.stats().used, manager.num_computed_tokens(seq).unwrap().div_ceil(16));
    }
    let mut expected = vec![1];
    expected.extend([2; 16]);
    expected.extend([3, 3]);
    assert_eq!(counts, expected);
}

#[test]
fn nothing_leaks_when_an_allocation_fails_after_a_hit() {
    let (mut manager, mut store) = manager(4, 4);
    let (seq, _) = prompt(&mut manager, &mut store, &range(0, 8));
    manager.free(seq).unwrap();
    for _ in 0..1000 {
        let seq = manager.admit(&range(0, 20), None, true).unwrap();
        assert_eq!(manager.num_cached_tokens(seq).unwrap(), 8);
        let mut copies = Vec::new();
        let error = manager.plan(&[(seq, 12)], &mut copies).unwrap_err();
        assert_eq!(error, Error::OutOfBlocks { needed: 3, available: 2, total: 4 });
        assert!(copies.is_empty());
        // It is as it was: a smaller plan works, is left half done, and the sequence ends.
        manager.plan(&[(seq, 8)], &mut copies).unwrap();
        manager.free(seq).unwrap();
        manager.check().unwrap();
        let stats = manager.stats();
        assert_eq!((stats.free, stats.cached, stats.num_sequences), (2, 2, 0));
    }
}

#[test]
fn releasing_twice_is_an_error_and_counts_stay_right() {
    let mut pool = BlockPool::new(4).unwrap();
    let [a, b] = [(); 2].map(|()| pool.allocate().unwrap());
    assert!(matches!(pool.release_all(&[b, a, b]), Err(Error::InvalidState(_))));
    assert!(matches!(pool.release_all(&[a, BlockId::new(9), b]), Err(Error::InvalidArgument(_))));
    assert_eq!((pool.ref_count(a), pool.ref_count(b), pool.num_free()), (1, 1, 2));
    pool.check().unwrap();
    pool.release(a).unwrap();
    assert!(matches!(pool.release(a), Err(Error::InvalidState(_))));
    assert!(matches!(pool.retain(a), Err(Error::InvalidState(_))));
    assert_eq!(pool.num_free(), 3);
    pool.check().unwrap();

    let (mut manager, mut store) = manager(4, 4);
    let (seq, _) = prompt(&mut manager, &mut store, &range(0, 9));
    manager.free(seq).unwrap();
    assert!(matches!(manager.free(seq), Err(Error::InvalidHandle(_))));
    // Not even when another sequence has taken the place.
    let (other, _) = prompt(&mut manager, &mut store, &range(50, 9));
    assert!(matches!(manager.free(seq), Err(Error::InvalidHandle(_))));
    manager.check().unwrap();
    store.assert_reads(&manager, other, None, 0);
    manager.free(other).unwrap();
    assert_eq!(manager.num_free_blocks(), 4);
}

#[test]
fn a_prompt_that_never_fits_is_told_the_numbers() {
    let (mut manager, mut store) = manager(49, 16);
    let seq = manager.admit(&range(0, 1002), None, true).unwrap();
    let error = manager.plan(&[(seq, 1002)], &mut Vec::new()).unwrap_err();
    assert_eq!(error, Error::OutOfBlocks { needed: 63, available: 49, total: 49 });
    assert!(error.to_string().contains("63 needed, 49 available"));
    manager.free(seq).unwrap();
    prompt(&mut manager, &mut store, &range(0, 5));
}
