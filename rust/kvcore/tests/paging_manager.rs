//! What each call of the manager promises, case by case.

mod paging_store;

use kvcore::Error;
use kvcore::paging::{BlockManager, ManagerConfig, SeqId};
use paging_store::{OneGroup, Store, run};

fn manager(num_blocks: usize, block_size: usize) -> (BlockManager, Store) {
    (BlockManager::new(ManagerConfig::new(num_blocks, block_size)).unwrap(), Store::new(num_blocks, block_size))
}

fn prompt(manager: &mut BlockManager, store: &mut Store, tokens: &[u32]) -> SeqId {
    let seq = manager.admit(tokens, None, true).unwrap();
    let cached = manager.num_cached_tokens(seq).unwrap();
    run(manager, store, seq, tokens.len() - cached).unwrap();
    seq
}

fn range(from: u32, len: usize) -> Vec<u32> {
    (from..from + len as u32).collect()
}

#[test]
fn sizes_out_of_range_are_errors() {
    for (num_blocks, block_size) in [(0, 16), (16, 0), (u32::MAX as usize, 16), (usize::MAX, 1), (8, usize::MAX)] {
        let result = BlockManager::new(ManagerConfig::new(num_blocks, block_size));
        assert!(matches!(result, Err(Error::InvalidArgument(_))), "{num_blocks} blocks of {block_size}");
    }
}

#[test]
fn bad_arguments_change_nothing() {
    let (mut manager, mut store) = manager(8, 4);
    assert!(matches!(manager.admit(&[], None, true), Err(Error::InvalidArgument(_))));
    let seq = prompt(&mut manager, &mut store, &range(0, 6));
    manager.append(seq, &[7, 8]).unwrap();
    let valid = manager.plan(&[(seq, 2)], &mut Vec::new()).unwrap();
    let stats = manager.stats();
    for items in [&[][..], &[(seq, 0)], &[(seq, 3)], &[(seq, usize::MAX)], &[(seq, 1), (seq, 1)]] {
        assert!(matches!(manager.plan(items, &mut Vec::new()), Err(Error::InvalidArgument(_))), "{items:?}");
    }
    for len in [0, 9] {
        assert!(matches!(manager.truncate(seq, len), Err(Error::InvalidArgument(_))));
    }
    manager.validate(&valid).unwrap();
    manager.check().unwrap();
    assert_eq!(manager.stats(), stats);
    manager.commit(&valid).unwrap();
    assert_eq!(manager.num_computed_tokens(seq).unwrap(), 8);
}

#[test]
fn handles_of_freed_sequences_and_other_managers_are_errors() {
    let (mut manager, mut store) = manager(8, 4);
    let (mut other, mut other_store) = self::manager(8, 4);
    let freed = prompt(&mut manager, &mut store, &[1]);
    manager.free(freed).unwrap();
    let foreign = prompt(&mut other, &mut other_store, &[1]);
    for seq in [freed, foreign] {
        assert!(matches!(manager.append(seq, &[1]), Err(Error::InvalidHandle(_))));
        assert!(matches!(manager.plan(&[(seq, 1)], &mut Vec::new()), Err(Error::InvalidHandle(_))));
        assert!(matches!(manager.fork(seq), Err(Error::InvalidHandle(_))));
        assert!(matches!(manager.truncate(seq, 1), Err(Error::InvalidHandle(_))));
        assert!(matches!(manager.free(seq), Err(Error::InvalidHandle(_))));
        assert!(matches!(manager.table(seq), Err(Error::InvalidHandle(_))));
        assert!(matches!(manager.token_ids(seq), Err(Error::InvalidHandle(_))));
        assert!(matches!(manager.num_tokens(seq), Err(Error::InvalidHandle(_))));
        assert!(matches!(manager.num_computed_tokens(seq), Err(Error::InvalidHandle(_))));
        assert!(matches!(manager.num_cached_tokens(seq), Err(Error::InvalidHandle(_))));
    }
    other.append(foreign, &[2]).unwrap();
    let batch = other.plan(&[(foreign, 1)], &mut Vec::new()).unwrap();
    assert!(matches!(manager.commit(&batch), Err(Error::InvalidHandle(_))));
    assert!(!manager.is_committed(&batch));
    manager.check().unwrap();
}

#[test]
fn a_batch_ends_with_what_changes_its_sequences() {
    let (mut manager, mut store) = manager(32, 4);
    let seq = prompt(&mut manager, &mut store, &range(0, 6));
    let bystander = prompt(&mut manager, &mut store, &range(50, 6));
    let both = |manager: &mut BlockManager| {
        for seq in [seq, bystander] {
            manager.append(seq, &[1, 2]).unwrap();
        }
        manager.plan(&[(seq, 1), (bystander, 1)], &mut Vec::new()).unwrap()
    };
    let stale = |manager: &mut BlockManager, batch| {
        manager.check().unwrap();
        assert!(matches!(manager.validate(batch), Err(Error::StaleBatch(_))));
        assert!(matches!(manager.commit(batch), Err(Error::StaleBatch(_))));
    };

    let batch = both(&mut manager);
    assert_eq!(batch.num_tokens(), 2);
    manager.append(seq, &[3]).unwrap();
    manager.validate(&batch).unwrap();
    assert!(!manager.is_committed(&batch));
    manager.commit(&batch).unwrap();
    manager.validate(&batch).unwrap();
    assert!(manager.is_committed(&batch) && manager.is_committed(&batch.clone()));
    assert!(matches!(manager.commit(&batch), Err(Error::InvalidState(_))));

    let newer = both(&mut manager);
    stale(&mut manager, &batch);
    let fork = manager.fork(bystander).unwrap();
    stale(&mut manager, &newer);
    let batch = both(&mut manager);
    manager.truncate(seq, 3).unwrap();
    stale(&mut manager, &batch);
    let batch = both(&mut manager);
    manager.free(fork).unwrap();
    manager.validate(&batch).unwrap();
    manager.free(bystander).unwrap();
    stale(&mut manager, &batch);
    assert!(matches!(manager.fork(bystander), Err(Error::InvalidHandle(_))));
}

#[test]
fn an_altered_batch_is_refused() {
    let (mut manager, _) = manager(8, 4);
    let seq = manager.admit(&range(0, 9), None, true).unwrap();
    let batch = manager.plan(&[(seq, 5)], &mut Vec::new()).unwrap();
    let mut altered = batch.clone();
    altered.rows[0].len = 9;
    assert!(matches!(manager.commit(&altered), Err(Error::InvalidArgument(_))));
    let mut doubled = batch.clone();
    doubled.rows.push(batch.rows[0].clone());
    manager.commit(&doubled).unwrap();
    manager.check().unwrap();
    assert_eq!(manager.num_computed_tokens(seq).unwrap(), 5);
}

#[test]
fn a_batch_names_positions_and_blocks() {
    let (mut manager, mut store) = manager(8, 4);
    let seq = prompt(&mut manager, &mut store, &range(0, 6));
    manager.append(seq, &range(6, 5)).unwrap();
    let batch = manager.plan(&[(seq, 4)], &mut Vec::new()).unwrap();
    let row = &batch.rows[0];
    assert_eq!((row.seq, row.start, row.len, row.tables[0].len()), (seq, 6, 4, 3));
    assert_eq!(row.tables[0], manager.table(seq).unwrap());
    assert_eq!((manager.num_tokens(seq).unwrap(), manager.num_computed_tokens(seq).unwrap()), (11, 6));
}

#[test]
fn all_holders_in_one_plan_make_one_copy_less_than_they_are() {
    let (mut manager, mut store) = manager(5, 4);
    let first = prompt(&mut manager, &mut store, &range(0, 6));
    let mut seqs = vec![first];
    seqs.extend((0..3).map(|_| manager.fork(first).unwrap()));
    for (token, &seq) in seqs.iter().enumerate() {
        manager.append(seq, &[token as u32]).unwrap();
    }
    // Three copies for four holders are exactly what is left.
    let items: Vec<_> = seqs.iter().map(|&seq| (seq, 1)).collect();
    let mut copies = Vec::new();
    let batch = manager.plan(&items, &mut copies).unwrap();
    assert_eq!((copies.len(), manager.num_free_blocks()), (3, 0));
    store.carry_out(&copies);
    store.write(&manager, &batch, None, 0);
    manager.commit(&batch).unwrap();
    manager.check().unwrap();
    for &seq in &seqs {
        store.assert_reads(&manager, seq, None, 0);
    }
}

#[test]
fn copies_are_counted_before_anything_is_taken() {
    let (mut manager, mut store) = manager(4, 4);
    let a = prompt(&mut manager, &mut store, &range(0, 6));
    let b = manager.fork(a).unwrap();
    manager.append(a, &range(6, 7)).unwrap();
    // 13 tokens: two blocks more, and a copy of the second, which b holds.
    let error = manager.plan(&[(a, 7)], &mut Vec::new()).unwrap_err();
    assert_eq!(error, Error::OutOfBlocks { needed: 3, available: 2, total: 4 });
    assert_eq!(manager.table(a).unwrap(), manager.table(b).unwrap());
    manager.check().unwrap();
    run(&mut manager, &mut store, a, 6).unwrap();
    store.assert_reads(&manager, b, None, 0);
}

#[test]
fn a_lone_sequence_rewrites_in_place_and_what_it_cut_is_no_longer_found() {
    let (mut manager, mut store) = manager(3, 4);
    let seq = prompt(&mut manager, &mut store, &range(0, 12));
    manager.truncate(seq, 6).unwrap();
    // Until it writes, the whole old prefix is still there.
    assert_eq!(manager.found(&range(0, 13), None).len(), 3);
    assert_eq!(manager.num_free_blocks(), 1);
    manager.append(seq, &range(100, 6)).unwrap();
    run(&mut manager, &mut store, seq, 6).unwrap();
    store.assert_reads(&manager, seq, None, 0);
    assert_eq!(manager.known(&range(0, 13), None), 6);
    let mut new = range(0, 6);
    new.extend(range(100, 7));
    assert_eq!(manager.found(&new, None).len(), 3);
    assert_eq!((manager.stats().copies, manager.stats().evictions), (0, 0));
}

#[test]
fn a_cut_published_block_that_others_hold_is_copied() {
    let (mut manager, mut store) = manager(8, 4);
    let seq = prompt(&mut manager, &mut store, &range(0, 8));
    manager.truncate(seq, 6).unwrap();
    let reader = prompt(&mut manager, &mut store, &range(0, 9));
    assert_eq!(manager.num_cached_tokens(reader).unwrap(), 8);
    manager.append(seq, &[100]).unwrap();
    run(&mut manager, &mut store, seq, 1).unwrap();
    store.assert_reads(&manager, seq, None, 0);
    store.assert_reads(&manager, reader, None, 0);
    assert_eq!((manager.stats().copies, manager.found(&range(0, 9), None).len()), (1, 2));
}

#[test]
fn a_forgotten_plan_gives_its_blocks_back() {
    let (mut manager, mut store) = manager(8, 4);
    let seq = manager.admit(&range(0, 32), None, true).unwrap();
    manager.plan(&[(seq, 32)], &mut Vec::new()).unwrap();
    assert_eq!(manager.num_free_blocks(), 0);
    // The blocks that it no longer needs serve the other sequence of the same plan.
    let other = manager.admit(&range(50, 20), None, true).unwrap();
    manager.plan(&[(other, 20), (seq, 12)], &mut Vec::new()).unwrap();
    assert_eq!((manager.table(seq).unwrap().len(), manager.num_free_blocks()), (3, 0));
    manager.check().unwrap();
    run(&mut manager, &mut store, seq, 3).unwrap();
    assert_eq!((manager.table(seq).unwrap().len(), manager.num_free_blocks()), (1, 2));
    let child = manager.fork(other).unwrap();
    assert_eq!((manager.table(other).unwrap().len(), manager.table(child).unwrap().len()), (0, 0));
    assert_eq!((manager.num_tokens(child).unwrap(), manager.num_free_blocks()), (20, 7));
    manager.check().unwrap();
}

#[test]
fn without_use_prefix_nothing_is_read_or_published() {
    let (mut manager, mut store) = manager(8, 4);
    let private = manager.admit(&range(0, 9), None, false).unwrap();
    run(&mut manager, &mut store, private, 9).unwrap();
    assert!(manager.found(&range(0, 9), None).is_empty());
    let public = prompt(&mut manager, &mut store, &range(0, 9));
    assert_eq!(manager.found(&range(0, 9), None).len(), 2);
    let private = manager.admit(&range(0, 9), None, false).unwrap();
    assert_eq!(manager.num_cached_tokens(private).unwrap(), 0);
    manager.free(public).unwrap();
    assert_eq!((manager.stats().query_tokens, manager.stats().cached), (9, 3));

    let config = ManagerConfig { enable_prefix_caching: false, ..ManagerConfig::new(8, 4) };
    let mut off = BlockManager::new(config).unwrap();
    let seq = prompt(&mut off, &mut store, &range(0, 8));
    off.free(seq).unwrap();
    assert_eq!((off.stats().cached, off.found(&range(0, 9), None).len()), (0, 0));
}

#[test]
fn after_a_reset_nothing_old_is_found_or_published() {
    let (mut manager, mut store) = manager(16, 4);
    let old = prompt(&mut manager, &mut store, &range(0, 9));
    let gone = prompt(&mut manager, &mut store, &range(50, 9));
    manager.free(gone).unwrap();
    let waiting = manager.admit(&range(0, 9), Some(b"waiting"), true).unwrap();
    let planned = manager.admit(&range(0, 9), Some(b"planned"), true).unwrap();
    let batch = manager.plan(&[(planned, 9)], &mut Vec::new()).unwrap();
    manager.reset_prefix_cache().unwrap();
    manager.check().unwrap();
    assert_eq!(manager.stats().cached, 0);
    manager.append(old, &range(9, 8)).unwrap();
    run(&mut manager, &mut store, old, 8).unwrap();
    manager.commit(&batch).unwrap();
    store.assert_reads(&manager, old, None, 0);
    let batch = manager.plan(&[(waiting, 9)], &mut Vec::new()).unwrap();
    manager.commit(&batch).unwrap();
    manager.check().unwrap();
    assert_eq!(manager.found(&range(0, 17), None).len(), 0);
    assert_eq!(manager.found(&range(0, 17), Some(b"planned")).len(), 0);
    assert_eq!(manager.known(&range(0, 17), Some(b"waiting")), 9);
    prompt(&mut manager, &mut store, &range(0, 9));
    assert_eq!(manager.known(&range(0, 17), None), 9);
}

#[test]
fn the_second_of_two_equal_prompts_publishes_its_own_once_the_first_is_evicted() {
    let (mut manager, mut store) = manager(8, 4);
    let [a, b] = [(); 2].map(|()| manager.admit(&range(0, 8), None, true).unwrap());
    let batch = manager.plan(&[(a, 8), (b, 8)], &mut Vec::new()).unwrap();
    store.write(&manager, &batch, None, 0);
    manager.commit(&batch).unwrap();
    // The third block of b hangs below the first two of a.
    manager.append(b, &range(8, 4)).unwrap();
    run(&mut manager, &mut store, b, 4).unwrap();
    let table = manager.table(a).unwrap().to_vec();
    assert_eq!(manager.found(&range(0, 13), None), [table[0], table[1], manager.table(b).unwrap()[2]]);
    // a ends and its blocks are reused: what hung below them cannot be found either.
    manager.free(a).unwrap();
    let filler = prompt(&mut manager, &mut store, &range(100, 20));
    assert_eq!(manager.found(&range(0, 13), None).len(), 0);
    assert_eq!(manager.stats().evictions, 3);
    store.assert_reads(&manager, b, None, 0);
    // With its next full block all of b is found.
    manager.free(filler).unwrap();
    manager.append(b, &range(12, 4)).unwrap();
    run(&mut manager, &mut store, b, 4).unwrap();
    assert_eq!(manager.found(&range(0, 17), None), manager.table(b).unwrap());
}

#[test]
fn a_hit_renews_a_prefix() {
    let (mut manager, mut store) = manager(5, 4);
    for start in [0, 50] {
        let seq = prompt(&mut manager, &mut store, &range(start, 8));
        manager.free(seq).unwrap();
    }
    let seq = manager.admit(&range(0, 9), None, true).unwrap();
    assert_eq!(manager.num_cached_tokens(seq).unwrap(), 8);
    manager.free(seq).unwrap();
    prompt(&mut manager, &mut store, &range(100, 12));
    assert_eq!(manager.found(&range(0, 9), None).len(), 2);
    assert_eq!(manager.found(&range(50, 9), None).len(), 0);
}

#[test]
fn stored_tokens_follow_what_sequences_hold() {
    let (mut manager, mut store) = manager(8, 4);
    let tokens = |manager: &BlockManager| manager.stats().tokens;
    let seq = prompt(&mut manager, &mut store, &range(0, 7));
    let child = manager.fork(seq).unwrap();
    assert_eq!(tokens(&manager), 7);
    // The other branch still reads them.
    manager.truncate(seq, 5).unwrap();
    assert_eq!(tokens(&manager), 7);
    manager.free(child).unwrap();
    // A cut block stays whole while it is published.
    assert_eq!(tokens(&manager), 7);
    manager.truncate(seq, 3).unwrap();
    assert_eq!(tokens(&manager), 4);
    manager.append(seq, &[100]).unwrap();
    run(&mut manager, &mut store, seq, 1).unwrap();
    assert_eq!(tokens(&manager), 4);
    manager.free(seq).unwrap();
    assert_eq!(tokens(&manager), 0);
}

#[test]
fn a_chain_of_100_000_blocks_is_evicted_without_recursion() {
    let (mut manager, _) = manager(100_001, 1);
    let [a, b] = [(); 2].map(|()| manager.admit(&range(0, 100_000), None, true).unwrap());
    for seq in [a, b] {
        let batch = manager.plan(&[(seq, 1)], &mut Vec::new()).unwrap();
        manager.commit(&batch).unwrap();
    }
    // b hangs all its blocks below the one block of a.
    let batch = manager.plan(&[(b, 99_999)], &mut Vec::new()).unwrap();
    manager.commit(&batch).unwrap();
    manager.free(a).unwrap();
    let other = manager.admit(&[7], None, true).unwrap();
    manager.plan(&[(other, 1)], &mut Vec::new()).unwrap();
    manager.check().unwrap();
    assert_eq!((manager.stats().evictions, manager.num_free_blocks()), (100_000, 0));
}

#[test]
fn a_manager_can_go_to_another_thread() {
    fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<BlockManager>();
    is_send_and_sync::<kvcore::paging::Batch>();
}
