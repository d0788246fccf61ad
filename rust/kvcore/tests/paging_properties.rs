//! The laws under random calls in any order, on pools so small that blocks run out.
//!
//! Beside the manager runs a naive model that knows every published prefix as a plain list of tokens and predicts every
//! result exactly: hits, tables' lengths, OutOfBlocks and its numbers, evictions, copies. Beside both, a store in which
//! every slot knows what was written there proves after each step that what can be read is right.

mod cases;
mod paging_store;

use std::collections::HashSet;

use cases::cases;
use kvcore::Error;
use kvcore::paging::{Batch, BlockCopy, BlockId, BlockManager, HashFn, ManagerConfig, SeqId, hash_block};
use paging_store::{Slot, Store, token};
use proptest::prelude::*;

const SALTS: [Option<&[u8]>; 3] = [None, Some(b""), Some(b"a")];

/// One call. Numbers are reduced modulo what there is.
#[derive(Debug, Clone)]
enum Op {
    Add { tokens: Vec<u32>, salt: usize, use_prefix: bool },
    AddLike { seq: usize, len: usize, more: Vec<u32> },
    Append { seq: usize, tokens: Vec<u32> },
    Plan { items: Vec<(usize, usize)>, wild: bool },
    Commit { batch: usize },
    Fork { seq: usize },
    Truncate { seq: usize, len: usize },
    Free { seq: usize },
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    let tokens = |len| prop::collection::vec(0..2u32, len);
    prop_oneof![
        2 => (tokens(0..12usize), 0..3usize, prop::bool::weighted(0.85))
            .prop_map(|(tokens, salt, use_prefix)| Op::Add { tokens, salt, use_prefix }),
        2 => (any::<usize>(), 1..20usize, tokens(0..3)).prop_map(|(seq, len, more)| Op::AddLike { seq, len, more }),
        6 => (any::<usize>(), tokens(0..6)).prop_map(|(seq, tokens)| Op::Append { seq, tokens }),
        10 => (prop::collection::vec((any::<usize>(), 0..9usize), 0..4), prop::bool::weighted(0.1))
            .prop_map(|(items, wild)| Op::Plan { items, wild }),
        8 => Just(Op::Commit { batch: 0 }),
        2 => (0..4usize).prop_map(|batch| Op::Commit { batch }),
        2 => any::<usize>().prop_map(|seq| Op::Fork { seq }),
        3 => (any::<usize>(), 0..20usize).prop_map(|(seq, len)| Op::Truncate { seq, len }),
        3 => any::<usize>().prop_map(|seq| Op::Free { seq }),
        1 => prop::bool::weighted(0.4).prop_map(|reset| if reset { Op::Reset } else { Op::Commit { batch: 1 } }),
    ]
}

/// What the model knows of a sequence.
#[derive(Clone)]
struct Seq {
    id: SeqId,
    salt: usize,
    use_prefix: bool,
    era: u64,
    tokens: Vec<u32>,
    computed: usize,
    cached: usize,
    chained: usize,
    table: Vec<BlockId>,
    /// Number of the newest plan, and whether it may still be committed.
    plan: Option<(usize, bool)>,
    /// What the store must return for each computed token.
    written: Vec<Slot>,
}

struct Planned {
    batch: Batch,
    number: usize,
    /// Sequence and tokens of each row.
    rows: Vec<(SeqId, usize)>,
    version: u64,
}

struct World {
    manager: BlockManager,
    store: Store,
    num_blocks: usize,
    block_size: usize,
    seqs: Vec<Seq>,
    dead: Vec<SeqId>,
    batches: Vec<Planned>,
    /// Every published prefix, whole: salt, tokens, block.
    published: Vec<(usize, Vec<u32>, BlockId)>,
    /// Published blocks that no table holds, longest unused first.
    lru: Vec<BlockId>,
    plans: usize,
    era: u64,
    hits: u64,
    queries: u64,
    evictions: u64,
    copies: u64,
    truncated: bool,
    asked: HashSet<(usize, Vec<u32>)>,
}

impl World {
    fn new(num_blocks: usize, block_size: usize, hash: HashFn) -> Self {
        let config = ManagerConfig { hash, ..ManagerConfig::new(num_blocks, block_size) };
        Self {
            manager: BlockManager::new(config).unwrap(),
            store: Store::new(num_blocks, block_size),
            num_blocks,
            block_size,
            seqs: Vec::new(),
            dead: Vec::new(),
            batches: Vec::new(),
            published: Vec::new(),
            lru: Vec::new(),
            plans: 0,
            era: 0,
            hits: 0,
            queries: 0,
            evictions: 0,
            copies: 0,
            truncated: false,
            asked: HashSet::new(),
        }
    }

    fn refs(&self, block: BlockId) -> usize {
        self.seqs.iter().filter(|seq| seq.table.contains(&block)).count()
    }

    fn num_free(&self) -> usize {
        let held: HashSet<BlockId> = self.seqs.iter().flat_map(|seq| seq.table.iter().copied()).collect();
        self.num_blocks - held.len()
    }

    /// Index of a live sequence; now and then None, for which a dead handle is used.
    fn pick(&self, seq: usize) -> Option<usize> {
        (!self.seqs.is_empty() && (!seq.is_multiple_of(16) || self.dead.is_empty()))
            .then(|| (seq / 16) % self.seqs.len())
    }

    fn a_dead_one(&self, seq: usize) -> Option<SeqId> {
        (!self.dead.is_empty()).then(|| self.dead[(seq / 16) % self.dead.len()])
    }

    fn find(&self, salt: usize, tokens: &[u32]) -> Vec<BlockId> {
        let mut found = Vec::new();
        for end in (self.block_size..tokens.len()).step_by(self.block_size) {
            let Some((.., block)) = self.published.iter().find(|(s, t, _)| *s == salt && t[..] == tokens[..end]) else {
                break;
            };
            found.push(*block);
        }
        found
    }

    fn unpublish(&mut self, block: BlockId) -> usize {
        let Some(at) = self.published.iter().position(|(.., b)| *b == block) else { return 0 };
        let (salt, prefix, _) = self.published[at].clone();
        let gone: Vec<BlockId> = self
            .published
            .iter()
            .filter(|(s, t, _)| *s == salt && t.starts_with(&prefix))
            .map(|(.., block)| *block)
            .collect();
        self.published.retain(|(.., block)| !gone.contains(block));
        self.lru.retain(|block| !gone.contains(block));
        gone.len()
    }

    /// Called after the tables changed: blocks that nobody holds any more, in the order of their release.
    fn released(&mut self, table: &[BlockId]) {
        for &block in table.iter().rev() {
            if self.refs(block) == 0 && self.published.iter().any(|(.., b)| *b == block) {
                self.lru.push(block);
            }
        }
    }

    /// The manager took `block`; was that the right one?
    fn taken(&mut self, block: BlockId) {
        let vacant = self.num_free() - self.lru.len();
        if vacant == 0 {
            assert_eq!(self.lru[0], block, "the longest unused prefix is evicted");
            self.evictions += self.unpublish(block) as u64;
        }
        assert_eq!(self.refs(block), 0);
        assert!(!self.published.iter().any(|(.., b)| *b == block));
    }

    fn step(&mut self, op: &Op) {
        match op {
            Op::Add { tokens, salt, use_prefix } => self.add(tokens.clone(), *salt, *use_prefix),
            Op::AddLike { seq, len, more } => {
                if let Some(at) = self.pick(*seq) {
                    let like = &self.seqs[at];
                    let mut tokens = like.tokens[..(*len).min(like.tokens.len())].to_vec();
                    tokens.extend(more);
                    self.add(tokens, like.salt, true);
                }
            }
            Op::Append { seq, tokens } => match self.pick(*seq) {
                Some(at) => {
                    self.seqs[at].tokens.extend(tokens);
                    self.manager.append(self.seqs[at].id, tokens).unwrap();
                }
                None => self.refuse_dead(*seq),
            },
            Op::Plan { items, wild } => self.plan(items, *wild),
            Op::Commit { batch } => self.commit(*batch),
            Op::Fork { seq } => match self.pick(*seq) {
                Some(at) => {
                    self.forget(at);
                    let mut child = self.seqs[at].clone();
                    child.id = self.manager.fork(child.id).unwrap();
                    self.seqs.push(child);
                }
                None => self.refuse_dead(*seq),
            },
            Op::Truncate { seq, len } => match self.pick(*seq) {
                Some(at) => self.truncate(at, *len),
                None => self.refuse_dead(*seq),
            },
            Op::Free { seq } => match self.pick(*seq) {
                Some(at) => self.free(at),
                None => self.refuse_dead(*seq),
            },
            Op::Reset => {
                self.manager.reset_prefix_cache().unwrap();
                self.published.clear();
                self.lru.clear();
                self.era += 1;
            }
        }
        self.check();
    }

    fn refuse_dead(&mut self, seq: usize) {
        let Some(id) = self.a_dead_one(seq) else { return };
        assert!(matches!(self.manager.append(id, &[0]), Err(Error::InvalidHandle(_))));
        assert!(matches!(self.manager.plan(&[(id, 1)], &mut Vec::new()), Err(Error::InvalidHandle(_))));
        assert!(matches!(self.manager.fork(id), Err(Error::InvalidHandle(_))));
        assert!(matches!(self.manager.truncate(id, 1), Err(Error::InvalidHandle(_))));
        assert!(matches!(self.manager.free(id), Err(Error::InvalidHandle(_))));
    }

    fn add(&mut self, tokens: Vec<u32>, salt: usize, use_prefix: bool) {
        let result = self.manager.add(&tokens, SALTS[salt], use_prefix);
        if tokens.is_empty() {
            assert!(matches!(result, Err(Error::InvalidArgument(_))));
            return;
        }
        let table = if use_prefix { self.find(salt, &tokens) } else { Vec::new() };
        let computed = table.len() * self.block_size;
        if use_prefix {
            self.queries += tokens.len() as u64;
            self.hits += computed as u64;
        }
        self.lru.retain(|block| !table.contains(block));
        self.asked.insert((salt, tokens.clone()));
        self.seqs.push(Seq {
            id: result.unwrap(),
            salt,
            use_prefix,
            era: self.era,
            written: (0..computed).map(|position| token(&tokens, position, SALTS[salt], self.era)).collect(),
            tokens,
            computed,
            cached: computed,
            chained: table.len(),
            table,
            plan: None,
        });
    }

    /// Drops what a sequence has planned but not committed.
    fn forget(&mut self, at: usize) {
        let seq = &mut self.seqs[at];
        seq.plan = None;
        seq.table.truncate(seq.computed.div_ceil(self.block_size));
    }

    fn plan(&mut self, items: &[(usize, usize)], wild: bool) {
        let block_size = self.block_size;
        let mut picked: Vec<(usize, usize)> =
            items.iter().filter_map(|&(seq, n)| Some(((seq / 16).checked_rem(self.seqs.len())?, n))).collect();
        if !wild {
            let open = |at: usize| self.seqs[at].tokens.len() - self.seqs[at].computed;
            let mut seen = HashSet::new();
            picked.retain(|&(at, _)| open(at) > 0 && seen.insert(at));
            picked = picked.into_iter().map(|(at, n)| (at, n.clamp(1, open(at)))).collect();
        }
        let items: Vec<(SeqId, usize)> = picked.iter().map(|&(at, n)| (self.seqs[at].id, n)).collect();
        let mut copies = vec![BlockCopy { src: BlockId::new(7), dst: BlockId::new(7) }];
        let before: Vec<Vec<BlockId>> = self.seqs.iter().map(|seq| seq.table.clone()).collect();
        let result = self.manager.plan(&items, &mut copies);
        copies.remove(0);

        let unique: HashSet<usize> = picked.iter().map(|&(at, _)| at).collect();
        let valid = |&(at, n): &(usize, usize)| n >= 1 && n <= self.seqs[at].tokens.len() - self.seqs[at].computed;
        if picked.is_empty() || unique.len() != picked.len() || !picked.iter().all(valid) {
            assert!(matches!(result, Err(Error::InvalidArgument(_))));
            return;
        }
        // What it should cost, found out by doing it on copies of the tables.
        let mut tables = before.clone();
        for &(at, n) in &picked {
            tables[at].truncate((self.seqs[at].computed + n).div_ceil(block_size));
        }
        let held: HashSet<BlockId> = tables.iter().flatten().copied().collect();
        let available = self.num_blocks - held.len();
        let mut needed = 0;
        for &(at, n) in &picked {
            let computed = self.seqs[at].computed;
            if !computed.is_multiple_of(block_size) {
                let last = tables[at][computed / block_size];
                if tables.iter().filter(|table| table.contains(&last)).count() > 1 {
                    needed += 1;
                    tables[at][computed / block_size] = BlockId::new(u32::MAX - needed as u32);
                }
            }
            needed += (computed + n).div_ceil(block_size) - tables[at].len();
        }
        let batch = match result {
            Err(error) => {
                assert_eq!(error, Error::OutOfBlocks { needed, available, total: self.num_blocks });
                assert!(needed > available && copies.is_empty());
                return;
            }
            Ok(batch) => batch,
        };
        assert!(needed <= available);

        // The model follows, block by block, and learns from the manager which ones it took.
        for &(at, n) in &picked {
            let seq = &mut self.seqs[at];
            seq.table.truncate((seq.computed + n).div_ceil(block_size));
        }
        let mut expected_copies = Vec::new();
        for (&(at, n), row) in picked.iter().zip(&batch.rows) {
            let computed = self.seqs[at].computed;
            assert_eq!((row.seq, row.start, row.len), (self.seqs[at].id, computed, n));
            assert_eq!(row.blocks.len(), (computed + n).div_ceil(block_size));
            if !computed.is_multiple_of(block_size) {
                let last = computed / block_size;
                let block = self.seqs[at].table[last];
                if self.refs(block) > 1 {
                    self.taken(row.blocks[last]);
                    self.seqs[at].table[last] = row.blocks[last];
                    expected_copies.push(BlockCopy { src: block, dst: row.blocks[last] });
                } else {
                    self.unpublish(block);
                }
            }
            for position in self.seqs[at].table.len()..row.blocks.len() {
                self.taken(row.blocks[position]);
                self.seqs[at].table.push(row.blocks[position]);
            }
            let seq = &mut self.seqs[at];
            assert_eq!(seq.table, row.blocks);
            seq.plan = Some((self.plans, true));
            if computed == 0 {
                seq.era = self.era;
            }
        }
        assert_eq!(copies, expected_copies);
        self.copies += copies.len() as u64;
        self.store.copy(&copies);
        // Some layers are written at once: nobody else may be able to read these slots.
        self.store.write_half(&batch);
        self.batches.insert(0, Planned { batch, number: self.plans, rows: items, version: self.era });
        self.batches.truncate(8);
        self.plans += 1;
    }

    fn commit(&mut self, which: usize) {
        let Some(Planned { batch, number, rows, version }) = self.batches.get(which) else { return };
        let state = |id: &SeqId| self.seqs.iter().find(|seq| seq.id == *id).and_then(|seq| seq.plan);
        let valid = rows.iter().all(|(id, _)| state(id).is_some_and(|(plan, _)| plan == *number));
        let open = rows.iter().all(|(id, _)| state(id) == Some((*number, true)));
        if !valid {
            assert!(matches!(self.manager.validate(batch), Err(Error::StaleBatch(_))));
            assert!(matches!(self.manager.commit(batch), Err(Error::StaleBatch(_))));
            return;
        }
        self.manager.validate(batch).unwrap();
        assert_eq!(self.manager.is_committed(batch), !open);
        if !open {
            assert!(matches!(self.manager.commit(batch), Err(Error::InvalidState(_))));
            return;
        }
        for (row, &(id, n)) in batch.rows.iter().zip(rows) {
            let seq = self.seqs.iter_mut().find(|seq| seq.id == id).unwrap();
            for position in seq.computed..seq.computed + n {
                let slot = token(&seq.tokens, position, SALTS[seq.salt], *version);
                self.store.set(&row.blocks, position, slot.clone());
                seq.written.push(slot);
            }
        }
        self.manager.commit(batch).unwrap();
        for &(id, n) in rows {
            let seq = self.seqs.iter_mut().find(|seq| seq.id == id).unwrap();
            seq.computed += n;
            seq.plan = Some((*number, false));
            let full = seq.computed / self.block_size;
            if !seq.use_prefix || seq.era != self.era || full == seq.chained {
                continue;
            }
            seq.chained = full;
            for index in 0..full {
                let prefix = &seq.tokens[..(index + 1) * self.block_size];
                if !self.published.iter().any(|(salt, tokens, _)| *salt == seq.salt && tokens == prefix) {
                    self.published.push((seq.salt, prefix.to_vec(), seq.table[index]));
                }
            }
        }
    }

    fn truncate(&mut self, at: usize, len: usize) {
        // Mostly a length that is known; 19 stays out of range.
        let len = if len < 19 { len % (self.seqs[at].tokens.len() + 1) } else { usize::MAX };
        let result = self.manager.truncate(self.seqs[at].id, len);
        if len == 0 || len > self.seqs[at].tokens.len() {
            assert!(matches!(result, Err(Error::InvalidArgument(_))));
            return;
        }
        result.unwrap();
        self.truncated = true;
        self.forget(at);
        let seq = &mut self.seqs[at];
        self.asked.insert((seq.salt, seq.tokens.clone()));
        seq.tokens.truncate(len);
        seq.computed = seq.computed.min(len);
        seq.written.truncate(len);
        seq.chained = seq.chained.min(seq.computed / self.block_size);
        let released = seq.table.split_off(seq.computed.div_ceil(self.block_size));
        self.released(&released);
    }

    fn free(&mut self, at: usize) {
        let seq = self.seqs.swap_remove(at);
        self.manager.free(seq.id).unwrap();
        self.released(&seq.table);
        self.asked.insert((seq.salt, seq.tokens));
        self.dead.push(seq.id);
    }

    fn check(&self) {
        self.manager.check().unwrap();
        let stats = self.manager.stats();
        assert_eq!(stats.total, self.num_blocks);
        assert_eq!((stats.free, stats.cached), (self.num_free() - self.lru.len(), self.lru.len()));
        assert_eq!((stats.used, stats.num_sequences), (self.num_blocks - self.num_free(), self.seqs.len()));
        assert_eq!((stats.hit_tokens, stats.query_tokens), (self.hits, self.queries));
        assert_eq!((stats.evictions, stats.copies), (self.evictions, self.copies));
        assert_eq!(self.manager.num_free_blocks(), stats.free + stats.cached);
        let mut slots = HashSet::new();
        for seq in &self.seqs {
            assert_eq!(self.manager.token_ids(seq.id).unwrap(), seq.tokens);
            assert_eq!(self.manager.num_computed_tokens(seq.id).unwrap(), seq.computed);
            assert_eq!(self.manager.num_cached_tokens(seq.id).unwrap(), seq.cached);
            assert_eq!(self.manager.block_table(seq.id).unwrap(), seq.table);
            for (position, slot) in seq.written.iter().enumerate() {
                assert_eq!(self.store.get(&seq.table, position), slot, "position {position} of {:?}", seq.id);
                slots.insert((seq.table[position / self.block_size], position % self.block_size));
            }
        }
        assert!(if self.truncated { stats.tokens >= slots.len() } else { stats.tokens == slots.len() });
        assert!(stats.tokens <= stats.used * self.block_size);
        // Whatever can be found holds the K and V of exactly these tokens, of today's weights.
        for (salt, tokens, _) in &self.published {
            let mut longer = tokens.clone();
            longer.push(0);
            self.assert_finds(*salt, &longer);
        }
    }

    fn assert_finds(&self, salt: usize, tokens: &[u32]) {
        let found = self.manager.find_prefix(tokens, SALTS[salt]);
        assert_eq!(found, self.find(salt, tokens));
        for position in 0..found.len() * self.block_size {
            assert_eq!(*self.store.get(&found, position), token(tokens, position, SALTS[salt], self.era));
        }
    }

    fn end(mut self) {
        for (salt, tokens) in &self.asked {
            for salt in [*salt, (*salt + 1) % SALTS.len()] {
                self.assert_finds(salt, tokens);
            }
        }
        while !self.seqs.is_empty() {
            self.free(0);
            self.check();
        }
        assert_eq!(self.manager.num_free_blocks(), self.num_blocks);
        assert_eq!(self.manager.stats().tokens, 0);
    }
}

fn hashes() -> impl Strategy<Value = HashFn> {
    prop_oneof![
        2 => Just(hash_block as HashFn),
        1 => Just((|_, _| 7) as HashFn),
        1 => Just((|parent, tokens| hash_block(parent, tokens) & 1) as HashFn),
    ]
}

proptest! {
    #![proptest_config(cases(1500))]

    #[test]
    fn the_manager_does_what_the_model_says(
        num_blocks in 1..32usize,
        block_size in 1..5usize,
        hash in hashes(),
        ops in prop::collection::vec(op(), 1..200),
    ) {
        let mut world = World::new(num_blocks, block_size, hash);
        for op in &ops {
            world.step(op);
        }
        world.end();
    }

    #[test]
    fn one_branching_conversation(
        num_blocks in 4..10usize,
        ops in prop::collection::vec(op(), 1..200),
    ) {
        // Equal prompts, computed in one step by three sequences, then anything: chains below the blocks of others.
        let mut world = World::new(num_blocks + 6, 2, hash_block);
        for _ in 0..3 {
            world.step(&Op::Add { tokens: vec![0, 1, 0, 1], salt: 0, use_prefix: true });
        }
        world.step(&Op::Plan { items: vec![(16, 4), (32, 4), (0, 4)], wild: false });
        world.step(&Op::Commit { batch: 0 });
        for op in &ops {
            world.step(op);
        }
        world.end();
    }
}
