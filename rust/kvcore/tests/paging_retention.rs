//! How long prefixes stay: time to live, priorities, marks, pins, the second tier, and what is told of it.

mod paging_store;

use std::time::Duration;

use kvcore::Error;
use kvcore::paging::{
    AddOptions, BlockManager, Cause, Event, GroupConfig, ImportEntry, Key, ManagerConfig, Move, Occupancy, Place,
    Retention, SeqId,
};
use paging_store::{Disk, OneGroup, Store, run, token};

fn with(config: ManagerConfig) -> (BlockManager, Store) {
    let store = Store::of(&config);
    (BlockManager::new(config).unwrap(), store)
}

fn range(from: u32, len: usize) -> Vec<u32> {
    (from..from + len as u32).collect()
}

fn retention(seconds: u64, priority: u8) -> Retention {
    Retention { ttl: (seconds > 0).then(|| Duration::from_secs(seconds)), priority }
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Adds a prompt with a retention of its own and computes it.
fn prompt(manager: &mut BlockManager, store: &mut Store, tokens: &[u32], retention: Option<Retention>) -> SeqId {
    let mut moves = Vec::new();
    let seq = manager.add(tokens, &AddOptions { retention, ..AddOptions::default() }, &mut moves).unwrap();
    store.carry_out(&moves);
    let cached = manager.num_cached_tokens(seq).unwrap();
    run(manager, store, seq, tokens.len() - cached).unwrap();
    seq
}

/// The same, and ends it.
fn leave(manager: &mut BlockManager, store: &mut Store, tokens: &[u32], retention: Option<Retention>) {
    let seq = prompt(manager, store, tokens, retention);
    manager.free(seq).unwrap();
    manager.check().unwrap();
}

#[test]
fn a_prefix_expires_after_its_last_use_and_a_hit_renews_it() {
    let (mut manager, mut store) = with(ManagerConfig::new(32, 4));
    let known = |manager: &BlockManager| manager.known(&range(0, 13), None);
    let seq = prompt(&mut manager, &mut store, &range(0, 12), None);
    manager.set_now(seconds(1000));
    // What is held does not expire.
    assert_eq!(known(&manager), 12);
    manager.free(seq).unwrap();
    manager.set_now(seconds(1299));
    assert_eq!(known(&manager), 12);
    // A clock that goes back is ignored.
    manager.set_now(seconds(5));
    leave(&mut manager, &mut store, &range(0, 12), None);
    manager.set_now(seconds(1598));
    assert_eq!(known(&manager), 12);
    manager.set_now(seconds(1599));
    assert_eq!(known(&manager), 0);
    manager.check().unwrap();
    let stats = manager.stats();
    assert_eq!((stats.cached, stats.free), (0, 32));
    assert!(stats.evicted_expired >= 3 && stats.evicted_lru == 0);
}

#[test]
fn each_prefix_has_its_own_time_and_none_is_for_ever() {
    let (mut manager, mut store) = with(ManagerConfig::new(32, 4));
    for (start, ttl) in [(0, Some(retention(10, 50))), (100, Some(retention(0, 50))), (200, None)] {
        leave(&mut manager, &mut store, &range(start, 8), ttl);
    }
    let known = |manager: &BlockManager| [0, 100, 200].map(|start| manager.known(&range(start, 9), None));
    manager.set_now(seconds(9));
    assert_eq!(known(&manager), [8, 8, 8]);
    manager.set_now(seconds(10));
    assert_eq!(known(&manager), [0, 8, 8]);
    manager.set_now(seconds(1_000_000_000));
    assert_eq!(known(&manager), [0, 8, 0]);
    assert!(matches!(
        manager.add(&[1], &AddOptions { retention: Some(retention(1, 101)), ..AddOptions::default() }, &mut Vec::new()),
        Err(Error::InvalidArgument(_))
    ));
}

#[test]
fn a_mark_keeps_the_way_to_it_and_nothing_behind() {
    let (mut manager, mut store) = with(ManagerConfig::new(32, 4));
    // Set before anything is computed; it holds when the blocks are published.
    let early = manager.admit(&range(0, 16), None, true).unwrap();
    manager.mark(early, 8, retention(1000, 50)).unwrap();
    run(&mut manager, &mut store, early, 16).unwrap();
    let late = prompt(&mut manager, &mut store, &range(100, 16), None);
    manager.mark(late, 6, retention(1000, 50)).unwrap();
    manager.check().unwrap();
    manager.free(early).unwrap();
    manager.free(late).unwrap();
    manager.set_now(seconds(300));
    assert_eq!((manager.known(&range(0, 17), None), manager.known(&range(100, 17), None)), (8, 8));
    manager.set_now(seconds(1000));
    assert_eq!((manager.known(&range(0, 17), None), manager.known(&range(100, 17), None)), (0, 0));
    let seq = manager.admit(&[1, 2], None, true).unwrap();
    assert!(matches!(manager.mark(seq, 3, retention(1, 1)), Err(Error::InvalidArgument(_))));
    assert!(matches!(manager.mark(seq, 0, retention(1, 1)), Err(Error::InvalidArgument(_))));
}

#[test]
fn low_priorities_go_first_then_the_least_recently_used() {
    let (mut manager, mut store) = with(ManagerConfig::new(6, 4));
    for (start, priority) in [(0, 90), (100, 10), (200, 50)] {
        leave(&mut manager, &mut store, &range(start, 8), Some(retention(300, priority)));
    }
    let known = |manager: &BlockManager| [0, 100, 200].map(|start| manager.known(&range(start, 9), None));
    for expected in [[8, 4, 8], [8, 0, 8], [8, 0, 4], [8, 0, 0], [4, 0, 0]] {
        let seq = manager.admit(&[7], None, false).unwrap();
        run(&mut manager, &mut store, seq, 1).unwrap();
        assert_eq!(known(&manager), expected);
    }
    assert_eq!(manager.stats().evicted_lru, 5);
}

#[test]
fn pins_hold_against_space_time_and_resets_and_are_bounded() {
    let (mut manager, mut store) = with(ManagerConfig::new(8, 4));
    let seq = prompt(&mut manager, &mut store, &range(0, 10), None);
    let pin = manager.pin(seq, 10).unwrap();
    manager.free(seq).unwrap();
    let stats = manager.stats();
    assert_eq!((stats.free, stats.cached, stats.pinned, stats.used), (5, 3, 3, 0));
    assert_eq!(manager.num_free_blocks(), 5);
    let states: Vec<_> = manager.group_snapshot(0).iter().map(|info| info.state).collect();
    assert_eq!(states.iter().filter(|&&state| state == Occupancy::Pinned).count(), 3);
    // Neither time nor space nor a reset.
    manager.set_now(seconds(1_000_000));
    leave(&mut manager, &mut store, &range(100, 20), None);
    manager.reset_prefix_cache().unwrap();
    manager.check().unwrap();
    assert_eq!(manager.known(&range(0, 11), None), 10);
    assert_eq!(manager.known(&range(100, 20), None), 0);
    // Half of the pool may be pinned.
    let other = prompt(&mut manager, &mut store, &range(200, 8), None);
    let before = manager.stats();
    assert_eq!(manager.pin(other, 8).unwrap_err(), Error::PinLimit { needed: 2, pinned: 3, limit: 4, total: 8 });
    assert_eq!(manager.stats(), before);
    let second = manager.pin(other, 4).unwrap();
    assert!(matches!(manager.pin(other, 9), Err(Error::InvalidArgument(_))));
    manager.unpin(second).unwrap();
    assert!(matches!(manager.unpin(second), Err(Error::InvalidHandle(_))));
    let (mut foreign, _) = with(ManagerConfig::new(8, 4));
    assert!(matches!(foreign.unpin(pin), Err(Error::InvalidHandle(_))));
    // Its time starts anew.
    manager.unpin(pin).unwrap();
    manager.set_now(seconds(1_000_299));
    assert_eq!(manager.known(&range(0, 11), None), 10);
    manager.set_now(seconds(1_000_300));
    assert_eq!(manager.known(&range(0, 11), None), 0);
    manager.free(other).unwrap();
    manager.check().unwrap();
    assert_eq!(manager.stats().pinned, 0);
    let private = manager.admit(&range(0, 4), None, false).unwrap();
    run(&mut manager, &mut store, private, 4).unwrap();
    assert!(matches!(manager.pin(private, 4), Err(Error::InvalidState(_))));
}

#[test]
fn a_pinned_block_is_not_overwritten_by_its_own_holder() {
    let (mut manager, mut store) = with(ManagerConfig::new(8, 4));
    let seq = prompt(&mut manager, &mut store, &range(0, 6), None);
    let pin = manager.pin(seq, 6).unwrap();
    // Behind what is pinned it may write, before that it may not.
    manager.append(seq, &[6]).unwrap();
    run(&mut manager, &mut store, seq, 1).unwrap();
    assert_eq!(manager.stats().copies, 0);
    manager.truncate(seq, 5).unwrap();
    manager.append(seq, &[99]).unwrap();
    run(&mut manager, &mut store, seq, 1).unwrap();
    assert_eq!((manager.stats().copies, manager.known(&range(0, 8), None)), (1, 7));
    store.assert_reads(&manager, seq, None, 0);
    manager.unpin(pin).unwrap();
    manager.check().unwrap();
}

#[test]
fn a_block_that_matches_in_part_is_copied_once_or_written_in_place() {
    let (mut manager, mut store) = with(ManagerConfig::new(8, 4));
    leave(&mut manager, &mut store, &range(0, 6), None);
    // It ends where the new prompt goes on, and nobody else holds it: no copy.
    let longer = prompt(&mut manager, &mut store, &range(0, 8), None);
    assert_eq!((manager.num_cached_tokens(longer).unwrap(), manager.stats().copies), (6, 0));
    // Another goes on from its middle.
    let mut tokens = range(0, 5);
    tokens.extend([70, 71]);
    let seq = manager.admit(&tokens, None, true).unwrap();
    assert_eq!(manager.num_cached_tokens(seq).unwrap(), 5);
    let mut moves = Vec::new();
    let shared = manager.table(seq).unwrap()[1];
    let batch = manager.plan(&[(seq, 2)], &mut moves).unwrap();
    assert_eq!(moves, [Move::Copy { group: 0, src: shared, dst: batch.rows[0].tables[0][1] }]);
    store.carry_out(&moves);
    store.write(&manager, &batch, None, 0);
    manager.commit(&batch).unwrap();
    for seq in [seq, longer] {
        store.assert_reads(&manager, seq, None, 0);
    }
    assert_eq!(manager.known(&range(0, 9), None), 8);
    assert_eq!(manager.stats().used, 3);
    manager.check().unwrap();
}

#[test]
fn the_holder_goes_on_while_others_borrow_what_it_has() {
    let (mut manager, mut store) = with(ManagerConfig::new(8, 4));
    let holder = prompt(&mut manager, &mut store, &range(0, 6), None);
    let borrower = manager.admit(&range(0, 6), None, true).unwrap();
    assert_eq!(manager.num_cached_tokens(borrower).unwrap(), 5);
    assert_eq!(manager.table(borrower).unwrap(), manager.table(holder).unwrap());
    manager.append(holder, &[6]).unwrap();
    run(&mut manager, &mut store, holder, 1).unwrap();
    assert_eq!(manager.stats().copies, 0);
    // But not below what they have.
    manager.truncate(holder, 5).unwrap();
    manager.append(holder, &[80]).unwrap();
    run(&mut manager, &mut store, holder, 1).unwrap();
    assert_eq!(manager.stats().copies, 1);
    store.assert_reads(&manager, borrower, None, 0);
    run(&mut manager, &mut store, borrower, 1).unwrap();
    for seq in [holder, borrower] {
        store.assert_reads(&manager, seq, None, 0);
        manager.free(seq).unwrap();
    }
    manager.check().unwrap();
    assert_eq!(manager.num_free_blocks(), 8);
}

#[test]
fn short_hits_do_not_count() {
    let (mut manager, mut store) = with(ManagerConfig { min_prefix_tokens: 6, ..ManagerConfig::new(8, 4) });
    leave(&mut manager, &mut store, &range(0, 8), None);
    for (len, min, cached) in [(6, None, 0), (7, None, 6), (5, Some(3), 4), (9, Some(9), 0)] {
        let options = AddOptions { min_prefix_tokens: min, ..AddOptions::default() };
        let seq = manager.add(&range(0, len), &options, &mut Vec::new()).unwrap();
        assert_eq!(manager.num_cached_tokens(seq).unwrap(), cached);
        manager.free(seq).unwrap();
    }
    assert_eq!((manager.stats().hit_tokens, manager.stats().query_tokens), (10, 8 + 6 + 7 + 5 + 9));
}

fn windowed(max_rollback: usize) -> ManagerConfig {
    let groups = [(16, None), (8, Some(6))].map(|(num_blocks, window)| GroupConfig { num_blocks, window });
    ManagerConfig { groups: groups.to_vec(), max_rollback, ..ManagerConfig::new(1, 4) }
}

#[test]
fn a_window_gives_its_blocks_back_and_a_deeper_rollback_is_an_error() {
    let (mut manager, mut store) = with(windowed(3));
    let seq = prompt(&mut manager, &mut store, &range(0, 20), None);
    manager.append(seq, &range(20, 12)).unwrap();
    for _ in 0..12 {
        run(&mut manager, &mut store, seq, 1).unwrap();
    }
    // The newest plan began at 31: 28 may be next after a rollback, and sees from 23 on, which is in the sixth block.
    let table = manager.block_table(seq, 1).unwrap();
    let returned = table.iter().take_while(|block| block.is_none()).count();
    assert_eq!((table.len(), returned), (8, 5));
    assert_eq!(manager.group_stats(1).unwrap().used, 3);
    assert_eq!(manager.block_table(seq, 0).unwrap().iter().filter(|block| block.is_none()).count(), 0);
    let error = manager.truncate(seq, 24).unwrap_err();
    assert!(matches!(&error, Error::InvalidArgument(what) if what.contains("max_rollback is 3")), "{error}");
    assert_eq!(manager.num_tokens(seq).unwrap(), 32);
    manager.truncate(seq, 28).unwrap();
    manager.check().unwrap();
    store.assert_reads(&manager, seq, None, 0);
}

/// The nearest child and all before it are in the second tier, and there is no block to bring them back to; the pinned one, beside
/// it, needs nothing but its own, as a window sees no more.
#[test]
fn a_pinned_sibling_is_found_where_the_nearest_child_cannot_come_back() {
    let groups = vec![GroupConfig { num_blocks: 7, window: Some(2) }];
    let (mut manager, mut store) = with(ManagerConfig { groups, spill_slots: 20, ..ManagerConfig::new(7, 3) });
    let prefix = [1, 0, 0, 1, 1, 1, 1];
    leave(&mut manager, &mut store, &[1, 0, 0, 1, 1, 1, 1, 0], None);
    // All blocks, so that what was left goes to the second tier.
    leave(&mut manager, &mut store, &[7; 21], None);
    let kept = prompt(&mut manager, &mut store, &prefix, None);
    manager.pin(kept, prefix.len()).unwrap();
    manager.free(kept).unwrap();
    for token in 40..46 {
        prompt(&mut manager, &mut store, &[token], None);
    }
    manager.check().unwrap();
    assert_eq!(manager.stats().free, 0);
    for more in [&[9][..], &[0, 9], &[1, 9], &[0, 0, 9]] {
        let found = manager.find_prefix(&[&prefix, more].concat(), Key::default());
        assert_eq!(found.num_tokens, prefix.len(), "{more:?} {found:?}");
    }
}

/// Whatever the order in which children are looked at, which differs from manager to manager.
#[test]
fn a_sibling_serves_where_the_nearest_child_lacks_a_windows_block() {
    for _ in 0..32 {
        let (mut manager, mut store) = with(windowed(0));
        leave(&mut manager, &mut store, &[0, 0], None);
        let lacking = prompt(&mut manager, &mut store, &[0, 1, 0, 0, 5], None);
        manager.forget_block(1, manager.block_table(lacking, 1).unwrap()[0]);
        manager.free(lacking).unwrap();
        let kept = prompt(&mut manager, &mut store, &[0, 1, 0, 1], None);
        manager.pin(kept, 3).unwrap();
        manager.free(kept).unwrap();
        // It ends in a block beside both, or goes on as the child that lacks it: three tokens, not one or none.
        for tokens in [&[0, 1, 0, 9][..], &[0, 1, 0, 0, 5, 9]] {
            let found = manager.find_prefix(tokens, Key::default());
            assert_eq!(found.num_tokens, 3, "{tokens:?} {found:?}");
        }
        manager.check().unwrap();
    }
}

#[test]
fn a_hit_needs_the_window_of_its_end_only() {
    let (mut manager, mut store) = with(windowed(0));
    let seq = prompt(&mut manager, &mut store, &range(0, 24), None);
    manager.free(seq).unwrap();
    let seq = manager.admit(&range(0, 24), None, true).unwrap();
    assert_eq!(manager.num_cached_tokens(seq).unwrap(), 23);
    // 23 sees from 18 on.
    let table = manager.block_table(seq, 1).unwrap();
    assert_eq!(table.iter().map(|block| block.is_none()).collect::<Vec<_>>(), [true, true, true, true, false, false]);
    assert_eq!(manager.block_table(seq, 0).unwrap().len(), 6);
    manager.free(seq).unwrap();
    // What no hit needed goes first: the beginning of the prompt, in the group with the window.
    for (len, known) in [(20, 24), (28, 0)] {
        let filler = manager.admit(&range(100, len), None, false).unwrap();
        run(&mut manager, &mut store, filler, len).unwrap();
        assert_eq!(manager.known(&range(0, 25), None), known);
        manager.free(filler).unwrap();
    }
    // The other group still has all of it; what is computed anew fills the gaps.
    let seq = prompt(&mut manager, &mut store, &range(0, 24), None);
    assert_eq!(manager.num_cached_tokens(seq).unwrap(), 0);
    store.assert_reads(&manager, seq, None, 0);
    assert_eq!(manager.known(&range(0, 25), None), 24);
    manager.free(seq).unwrap();
    manager.check().unwrap();
}

#[test]
fn out_of_blocks_tells_the_numbers_of_the_group_that_lacks_them() {
    let (mut manager, _) = with(windowed(0));
    let seq = manager.admit(&range(0, 40), None, true).unwrap();
    let error = manager.plan(&[(seq, 40)], &mut Vec::new()).unwrap_err();
    assert_eq!(error, Error::OutOfBlocks { needed: 10, available: 8, total: 8 });
    assert_eq!((manager.free_blocks(0), manager.free_blocks(1), manager.num_free_blocks()), (16, 8, 8));
    manager.plan(&[(seq, 32)], &mut Vec::new()).unwrap();
    assert_eq!((manager.free_blocks(0), manager.free_blocks(1)), (8, 0));
    assert!(matches!(manager.block_table(seq, 2), Err(Error::InvalidArgument(_))));
    assert!(matches!(manager.group_stats(2), Err(Error::InvalidArgument(_))));
}

#[test]
fn evicted_prefixes_go_to_the_second_tier_and_come_back() {
    let (mut manager, mut store) = with(ManagerConfig { spill_slots: 2, max_events: 99, ..ManagerConfig::new(4, 4) });
    leave(&mut manager, &mut store, &range(0, 16), None);
    manager.take_events();
    // The last two blocks go; then the slots hold the first two, and the last two are lost.
    let filler = manager.admit(&range(100, 8), None, false).unwrap();
    run(&mut manager, &mut store, filler, 8).unwrap();
    assert_eq!((manager.stats().spilled, manager.stats().spills, manager.stats().evictions), (2, 2, 0));
    assert_eq!(manager.known(&range(0, 17), None), 8, "two blocks are there, and none to bring others back");
    manager.free(filler).unwrap();
    assert_eq!(manager.known(&range(0, 17), None), 16);
    let mut moves = Vec::new();
    let seq = manager.add(&range(0, 17), &AddOptions::default(), &mut moves).unwrap();
    assert_eq!(moves.iter().filter(|step| matches!(step, Move::Fetch { .. })).count(), 2);
    store.carry_out(&moves);
    store.assert_reads(&manager, seq, None, 0);
    assert_eq!((manager.num_cached_tokens(seq).unwrap(), manager.stats().spilled), (16, 0));
    manager.check().unwrap();
    // A block without the content that it should have is forgotten with all that follows.
    let evictions = manager.stats().evictions;
    let lost = manager.table(seq).unwrap()[2];
    manager.forget_block(0, lost);
    manager.check().unwrap();
    assert_eq!(manager.stats().evictions, evictions);
    assert_eq!(manager.known(&range(0, 17), None), 8);
    manager.free(seq).unwrap();
    assert_eq!((manager.known(&range(0, 17), None), manager.num_free_blocks()), (8, 4));
    let events = manager.take_events();
    let causes =
        |cause| events.list.iter().filter(|e| matches!(e, Event::Removed { cause: c, .. } if *c == cause)).count();
    assert_eq!((causes(Cause::Spilled), causes(Cause::Failed), causes(Cause::Lru)), (2, 2, 0));
}

#[test]
fn what_cannot_be_spilled_is_evicted_and_what_cannot_be_fetched_costs_nothing() {
    let (mut manager, mut store) = with(ManagerConfig { spill_slots: 8, max_events: 99, ..ManagerConfig::new(4, 4) });
    let fill = |manager: &mut BlockManager, store: &mut Store, from: u32, faults: u64| {
        let seq = manager.admit(&range(from, 16), None, true).unwrap();
        let mut disk = Disk::new(store, faults);
        let batch = manager.plan(&[(seq, 16)], &mut disk).unwrap();
        store.write(manager, &batch, None, 0);
        manager.commit(&batch).unwrap();
        manager.free(seq).unwrap();
        manager.check().unwrap();
    };
    // Of the first prompt's blocks, the last first, the third cannot be written: the two behind it are of no use.
    fill(&mut manager, &mut store, 0, 0);
    fill(&mut manager, &mut store, 100, 0b0100);
    let stats = manager.stats();
    assert_eq!((stats.spills, stats.spilled, stats.evictions, stats.evicted_lru), (3, 1, 3, 3));
    assert_eq!(manager.known(&range(0, 17), None), 4);
    // The second one can be written in full.
    fill(&mut manager, &mut store, 200, 0);
    assert_eq!((manager.stats().spills, manager.stats().spilled, manager.stats().evictions), (7, 5, 3));
    // Its third block cannot be read: it and the last are lost, what is before is found, and nothing gave way to them.
    manager.take_events();
    let mut disk = Disk::new(&mut store, 0b10000);
    let seq = manager.add(&range(100, 17), &AddOptions::default(), &mut disk).unwrap();
    assert!(disk.failed);
    store.assert_reads(&manager, seq, None, 0);
    let stats = manager.stats();
    assert_eq!((manager.num_cached_tokens(seq).unwrap(), stats.fetches, stats.hit_tokens), (8, 2, 8));
    assert_eq!((stats.spilled, stats.spills, stats.evictions), (3, 9, 5));
    let lost = |e: &&Event| matches!(e, Event::Removed { cause: Cause::Failed, .. });
    assert_eq!(manager.take_events().list.iter().filter(lost).count(), 2);
    manager.check().unwrap();
}

#[test]
fn time_goes_on_in_the_second_tier() {
    let (mut manager, mut store) = with(ManagerConfig { spill_slots: 4, ..ManagerConfig::new(4, 4) });
    leave(&mut manager, &mut store, &range(0, 8), None);
    manager.set_now(seconds(200));
    let filler = manager.admit(&range(100, 16), None, false).unwrap();
    run(&mut manager, &mut store, filler, 16).unwrap();
    manager.free(filler).unwrap();
    assert_eq!((manager.stats().spilled, manager.known(&range(0, 9), None)), (2, 8));
    manager.set_now(seconds(300));
    assert_eq!((manager.stats().spilled, manager.known(&range(0, 9), None)), (0, 0));
    manager.check().unwrap();
}

#[test]
fn events_tell_what_is_stored_removed_and_copied() {
    let (mut manager, mut store) = with(ManagerConfig { max_events: 3, ..ManagerConfig::new(2, 4) });
    let seq = prompt(&mut manager, &mut store, &range(0, 5), None);
    let table = manager.table(seq).unwrap().to_vec();
    let events = manager.take_events();
    let [
        Event::Stored { block: a, hash, num_tokens: 4, .. },
        Event::Stored { block: b, parent_hash, num_tokens: 1, .. },
    ] = events.list[..]
    else {
        panic!("{events:?}")
    };
    assert_eq!(([a, b], parent_hash), ([table[0], table[1]], hash));
    manager.free(seq).unwrap();
    leave(&mut manager, &mut store, &range(100, 8), None);
    let events = manager.take_events();
    assert_eq!((events.list.len(), events.dropped), (3, 1));
    assert!(matches!(events.list[0], Event::Removed { cause: Cause::Lru, .. }));
    assert_eq!(manager.take_events(), kvcore::paging::Events::default());
}

#[test]
fn beams_are_reordered_by_reference() {
    let (mut manager, mut store) = with(ManagerConfig::new(16, 4));
    let first = prompt(&mut manager, &mut store, &range(0, 6), None);
    let beams = [first, manager.fork(first).unwrap(), manager.fork(first).unwrap()];
    for (token, &seq) in beams.iter().enumerate() {
        manager.append(seq, &[50 + token as u32]).unwrap();
        run(&mut manager, &mut store, seq, 1).unwrap();
    }
    let next = manager.reorder(&beams, &[2, 2, 0]).unwrap();
    assert_eq!((next[0], next[2]), (beams[2], beams[0]));
    assert!(matches!(manager.num_tokens(beams[1]), Err(Error::InvalidHandle(_))));
    assert_eq!(manager.table(next[0]).unwrap(), manager.table(next[1]).unwrap());
    for (&seq, last) in next.iter().zip([52, 52, 50]) {
        assert_eq!(manager.token_ids(seq).unwrap().last(), Some(&last));
        store.assert_reads(&manager, seq, None, 0);
    }
    for (seqs, parents) in [(&next[..], &[3][..]), (&next[..], &[]), (&[next[0], next[0]], &[0]), (&[], &[0])] {
        assert!(matches!(manager.reorder(seqs, parents), Err(Error::InvalidArgument(_))));
    }
    assert!(matches!(manager.reorder(&beams, &[0]), Err(Error::InvalidHandle(_))));
    manager.check().unwrap();
    next.into_iter().for_each(|seq| manager.free(seq).unwrap());
    assert_eq!((manager.num_free_blocks(), manager.stats().num_sequences), (16, 0));
}

#[test]
fn forks_share_the_blocks_of_an_encoder() {
    let (mut manager, _) = with(ManagerConfig { cross_blocks: 4, ..ManagerConfig::new(16, 4) });
    let seq = manager.admit(&range(0, 6), None, true).unwrap();
    assert_eq!(manager.cross(seq).unwrap(), (&[][..], 0));
    assert!(matches!(manager.reserve_cross(seq, 0), Err(Error::InvalidArgument(_))));
    let error = manager.reserve_cross(seq, 17).unwrap_err();
    assert_eq!(error, Error::OutOfBlocks { needed: 5, available: 4, total: 4 });
    assert_eq!(manager.reserve_cross(seq, 9).unwrap().len(), 3);
    assert!(matches!(manager.reserve_cross(seq, 9), Err(Error::InvalidState(_))));
    let child = manager.fork(seq).unwrap();
    assert_eq!(manager.cross(seq).unwrap(), manager.cross(child).unwrap());
    let batch = manager.plan(&[(child, 6)], &mut Vec::new()).unwrap();
    assert_eq!((batch.rows[0].cross.len(), batch.rows[0].cross_tokens), (3, 9));
    manager.free(seq).unwrap();
    assert_eq!(manager.cross_stats().used, 3);
    manager.check().unwrap();
    manager.free(child).unwrap();
    assert_eq!((manager.cross_stats().free, manager.stats().total), (4, 20));
    let (mut none, _) = with(ManagerConfig::new(16, 4));
    let seq = none.admit(&[1], None, true).unwrap();
    assert!(matches!(none.reserve_cross(seq, 1), Err(Error::InvalidState(_))));
}

#[test]
fn prefixes_are_exported_and_imported_as_far_as_there_is_room() {
    let (mut manager, mut store) = with(ManagerConfig::new(16, 4));
    leave(&mut manager, &mut store, &range(0, 10), Some(retention(1000, 70)));
    let mut other = range(0, 4);
    other.extend(range(50, 4));
    leave(&mut manager, &mut store, &other, None);
    let exported = manager.export_prefixes();
    assert_eq!(exported.len(), 4);
    let entries: Vec<ImportEntry> = exported
        .iter()
        .map(|entry| ImportEntry {
            parent: entry.parent,
            key: entry.key.clone(),
            tokens: entry.tokens.clone(),
            present: entry.places.iter().map(|place| *place != Place::Nowhere).collect(),
            retention: entry.retention,
        })
        .collect();
    for (num_blocks, room) in [(16, 4), (4, 4), (2, 2)] {
        let (mut new, mut new_store) = with(ManagerConfig::new(num_blocks, 4));
        let blocks = new.import_prefixes(&entries).unwrap();
        assert_eq!(blocks.iter().filter(|blocks| blocks[0].is_some()).count(), room);
        let mut paths: Vec<Vec<u32>> = Vec::new();
        for (entry, blocks) in entries.iter().zip(&blocks) {
            let mut path = entry.parent.map_or_else(Vec::new, |parent| paths[parent].clone());
            let start = path.len();
            path.extend(&entry.tokens);
            if let Some(block) = blocks[0] {
                for position in start..path.len() {
                    new_store.set(0, &vec![block; path.len()], position, token(&path, position, None, 0));
                }
            }
            paths.push(path);
        }
        new.check().unwrap();
        if room == 4 {
            let seq = prompt(&mut new, &mut new_store, &range(0, 10), None);
            assert_eq!(new.num_cached_tokens(seq).unwrap(), 9);
            new.free(seq).unwrap();
        }
        // A second time there is nothing to write, and the time to live came along.
        if num_blocks == 16 {
            assert!(new.import_prefixes(&entries).unwrap().iter().all(|blocks| blocks[0].is_none()));
            new.set_now(seconds(999));
            assert_eq!((new.known(&range(0, 11), None), new.known(&other, None)), (10, 4));
        }
        new.check().unwrap();
    }
    let bad = |change: &dyn Fn(&mut Vec<ImportEntry>)| {
        let mut entries = entries.clone();
        change(&mut entries);
        let (mut new, _) = with(ManagerConfig::new(16, 4));
        assert!(matches!(new.import_prefixes(&entries), Err(Error::InvalidArgument(_))));
        assert_eq!(new.stats().cached, 0);
        new.check().unwrap();
    };
    bad(&|entries| entries[1].parent = Some(1));
    bad(&|entries| entries[1].parent = Some(9));
    bad(&|entries| entries[0].tokens.clear());
    bad(&|entries| entries[0].tokens.push(1));
    bad(&|entries| entries[0].tokens.truncate(2));
    bad(&|entries| entries[0].present = vec![false]);
    bad(&|entries| entries[0].present = vec![true, true]);
    bad(&|entries| entries[1].key.salt = Some([1].into()));
    bad(&|entries| entries[1].retention.priority = 101);
}

#[test]
fn bad_configurations_are_errors() {
    let base = ManagerConfig::new(8, 4);
    let group = |num_blocks, window| vec![GroupConfig { num_blocks, window }];
    for config in [
        ManagerConfig { groups: Vec::new(), ..base.clone() },
        ManagerConfig { groups: group(0, None), ..base.clone() },
        ManagerConfig { groups: group(8, Some(0)), ..base.clone() },
        ManagerConfig { max_pinned_fraction: 1.5, ..base.clone() },
        ManagerConfig { max_pinned_fraction: f64::NAN, ..base.clone() },
        ManagerConfig { retention: retention(1, 101), ..base.clone() },
        ManagerConfig { spill_slots: usize::MAX, ..base.clone() },
        ManagerConfig { cross_blocks: usize::MAX, ..base },
    ] {
        assert!(matches!(BlockManager::new(config.clone()), Err(Error::InvalidArgument(_))), "{config:?}");
    }
    let huge = ManagerConfig { max_rollback: usize::MAX, min_prefix_tokens: usize::MAX, ..windowed(0) };
    let (mut manager, mut store) = with(huge);
    leave(&mut manager, &mut store, &range(0, 24), None);
}
