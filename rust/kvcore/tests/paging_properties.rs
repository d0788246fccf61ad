//! The laws under random calls in any order, on pools so small that blocks run out.
//!
//! Beside the manager stands a store in which every slot knows what was written there, blocks and spilled ones. After
//! each step everything that any sequence or any prompt to come could read is compared with what it has to be, and
//! the manager's answers with what a naive look at its own published list says.

mod cases;
mod paging_store;

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use cases::cases;
use kvcore::Error;
use kvcore::paging::{
    AddOptions, Batch, BlockId, BlockManager, GroupConfig, HashFn, ImportEntry, Key, ManagerConfig, Move, Occupancy,
    OwnedKey, PinId, Place, PrefixEntry, Retention, Saved, SeqId, SlotId, hash_block,
};
use paging_store::{Disk, Slot, Store, token};
use proptest::prelude::*;

const SALTS: [Option<&[u8]>; 3] = [None, Some(b""), Some(b"a")];

/// One call. Numbers are reduced modulo what there is.
#[derive(Debug, Clone)]
enum Op {
    Add {
        tokens: Vec<u32>,
        salt: usize,
        use_prefix: bool,
        retention: Option<(u64, u8)>,
    },
    AddLike {
        seq: usize,
        len: usize,
        more: Vec<u32>,
    },
    Append {
        seq: usize,
        tokens: Vec<u32>,
    },
    Plan {
        items: Vec<(usize, usize)>,
        wild: bool,
    },
    Commit {
        batch: usize,
    },
    /// Of each sequence the rows of which a bit is set: all, without a list, if all are.
    CommitRows {
        batch: usize,
        bits: u16,
    },
    Fork {
        seq: usize,
    },
    Reorder {
        seqs: Vec<usize>,
        parents: Vec<usize>,
    },
    Truncate {
        seq: usize,
        len: usize,
    },
    Free {
        seq: usize,
    },
    Reset,
    Advance {
        seconds: u64,
    },
    Mark {
        seq: usize,
        len: usize,
        retention: (u64, u8),
    },
    Pin {
        seq: usize,
        len: usize,
    },
    Unpin {
        pin: usize,
    },
    ShareCross {
        seq: usize,
        source: usize,
    },
    Cross {
        seq: usize,
        len: usize,
    },
    /// From now on the second tier fails like this; see [`Disk`].
    Faults {
        bits: u64,
    },
    Restore {
        seq: usize,
        give_up: bool,
    },
    Save,
    Load,
    Forget {
        entry: usize,
        group: usize,
    },
}

fn retention() -> impl Strategy<Value = (u64, u8)> {
    (prop::sample::select(vec![2, 5, 9, 0]), prop::sample::select(vec![10, 50, 90]))
}

fn to_retention((ttl, priority): (u64, u8)) -> Retention {
    Retention { ttl: (ttl > 0).then(|| Duration::from_secs(ttl)), priority }
}

fn op() -> impl Strategy<Value = Op> {
    let tokens = |len| prop::collection::vec(0..2u32, len);
    let some = prop::option::weighted(0.3, retention());
    prop_oneof![
        4 => (tokens(0..12usize), 0..3usize, prop::bool::weighted(0.9), some)
            .prop_map(|(tokens, salt, use_prefix, retention)| Op::Add { tokens, salt, use_prefix, retention }),
        6 => (0..512usize, 1..20usize, tokens(0..3)).prop_map(|(seq, len, more)| Op::AddLike { seq, len, more }),
        12 => (0..512usize, tokens(0..6)).prop_map(|(seq, tokens)| Op::Append { seq, tokens }),
        20 => (prop::collection::vec((0..512usize, 0..9usize), 0..4), prop::bool::weighted(0.1))
            .prop_map(|(items, wild)| Op::Plan { items, wild }),
        16 => Just(Op::Commit { batch: 0 }),
        4 => (0..4usize).prop_map(|batch| Op::Commit { batch }),
        6 => (prop::sample::select(vec![0, 0, 0, 1, 2]), prop_oneof![any::<u16>(), Just(0), Just(1), Just(u16::MAX)])
            .prop_map(|(batch, bits)| Op::CommitRows { batch, bits }),
        4 => (0..512usize).prop_map(|seq| Op::Fork { seq }),
        2 => (prop::collection::vec(0..512usize, 0..4), prop::collection::vec(0..5usize, 0..5))
            .prop_map(|(seqs, parents)| Op::Reorder { seqs, parents }),
        6 => (0..512usize, 0..20usize).prop_map(|(seq, len)| Op::Truncate { seq, len }),
        8 => (0..512usize).prop_map(|seq| Op::Free { seq }),
        1 => Just(Op::Reset),
        2 => (0..4u64).prop_map(|seconds| Op::Advance { seconds }),
        2 => (0..512usize, 0..20usize, retention()).prop_map(|(seq, len, retention)| Op::Mark { seq, len, retention }),
        2 => (0..512usize, 0..20usize).prop_map(|(seq, len)| Op::Pin { seq, len }),
        2 => (0..512usize).prop_map(|pin| Op::Unpin { pin }),
        1 => (0..512usize, 0..9usize).prop_map(|(seq, len)| Op::Cross { seq, len }),
        1 => (0..512usize, 0..512usize).prop_map(|(seq, source)| Op::ShareCross { seq, source }),
        2 => prop_oneof![Just(0), any::<u64>(), Just(u64::MAX)].prop_map(|bits| Op::Faults { bits }),
        3 => (0..512usize, prop::bool::weighted(0.2)).prop_map(|(seq, give_up)| Op::Restore { seq, give_up }),
        1 => Just(Op::Save),
        1 => Just(Op::Load),
        1 => (0..512usize, 0..3usize).prop_map(|(entry, group)| Op::Forget { entry, group }),
    ]
}

fn config() -> impl Strategy<Value = ManagerConfig> {
    let window = prop_oneof![Just(None), Just(None), (1..7usize).prop_map(Some)];
    let groups = prop::collection::vec((1..24usize, window), 1..4);
    let hash = prop_oneof![
        2 => Just(hash_block as HashFn),
        1 => Just((|_, _| 7) as HashFn),
        1 => Just((|parent, tokens| hash_block(parent, tokens) & 1) as HashFn),
    ];
    (groups, 1..5usize, hash, 0..4usize, prop::sample::select(vec![0, 0, 1, 3, 9]), 0..6usize, 0..4usize).prop_map(
        |(groups, block_size, hash, max_rollback, spill_slots, cross_blocks, min_prefix_tokens)| ManagerConfig {
            groups: groups.into_iter().map(|(num_blocks, window)| GroupConfig { num_blocks, window }).collect(),
            hash,
            max_rollback,
            spill_slots,
            cross_blocks,
            min_prefix_tokens: min_prefix_tokens.saturating_sub(1),
            retention: to_retention((5, 50)),
            max_events: 64,
            ..ManagerConfig::new(1, block_size)
        },
    )
}

/// What is known of a sequence.
#[derive(Clone)]
struct Seq {
    id: SeqId,
    salt: usize,
    use_prefix: bool,
    era: u64,
    tokens: Vec<u32>,
    computed: usize,
    cached: usize,
    /// Number of the newest plan, and whether it may still be committed.
    plan: Option<(usize, bool)>,
    /// The furthest that a plan of it began.
    last_start: usize,
    /// What the store must return for each computed token.
    written: Vec<Slot>,
    cross: Option<usize>,
    /// Whether something of it was forgotten: it may publish no more.
    spoiled: bool,
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
    config: ManagerConfig,
    seqs: Vec<Seq>,
    dead: Vec<SeqId>,
    batches: Vec<Planned>,
    /// Salt, tokens.
    pins: Vec<(PinId, usize, Vec<u32>)>,
    saved: Vec<ImportEntry>,
    plans: usize,
    era: u64,
    now: u64,
    /// When something was last renewed that nobody held.
    renewed: u64,
    /// When each block was last seen held.
    held: HashMap<(usize, BlockId), u64>,
    hits: u64,
    queries: u64,
    faults: u64,
    spills: u64,
    fetches: u64,
    asked: HashSet<(usize, Vec<u32>)>,
}

/// Everything that a call that fails must leave as it is.
type State = (kvcore::paging::PagingStats, Vec<Vec<Vec<BlockId>>>, Vec<(OwnedKey, Vec<u32>, Vec<Place>)>);

fn is_spill(step: &Move) -> bool {
    matches!(step, Move::Spill { .. })
}

fn is_fetch(step: &Move) -> bool {
    matches!(step, Move::Fetch { .. })
}

impl World {
    fn new(config: ManagerConfig) -> Self {
        Self {
            manager: BlockManager::new(config.clone()).unwrap(),
            store: Store::of(&config),
            config,
            seqs: Vec::new(),
            dead: Vec::new(),
            batches: Vec::new(),
            pins: Vec::new(),
            saved: Vec::new(),
            plans: 0,
            era: 0,
            now: 0,
            renewed: 0,
            held: HashMap::new(),
            hits: 0,
            queries: 0,
            faults: 0,
            spills: 0,
            fetches: 0,
            asked: HashSet::new(),
        }
    }

    fn num_groups(&self) -> usize {
        self.config.groups.len()
    }

    /// Nothing but tokens decides what is found.
    fn is_plain(&self) -> bool {
        self.config.spill_slots == 0 && self.config.groups.iter().all(|group| group.window.is_none())
    }

    /// First token before `end` that a query at `end` sees.
    fn first_seen(&self, group: usize, end: usize) -> usize {
        self.config.groups[group].window.map_or(0, |window| (end + 1).saturating_sub(window))
    }

    /// Index of a live sequence; now and then None, for which a dead handle is used.
    fn pick(&self, seq: usize) -> Option<usize> {
        (!self.seqs.is_empty() && (!seq.is_multiple_of(16) || self.dead.is_empty()))
            .then(|| (seq / 16) % self.seqs.len())
    }

    fn tables(&self, id: SeqId) -> Vec<Vec<BlockId>> {
        (0..self.num_groups()).map(|group| self.manager.block_table(id, group).unwrap().to_vec()).collect()
    }

    fn state(&self) -> State {
        let tables = self.seqs.iter().map(|seq| self.tables(seq.id)).collect();
        let mut published: Vec<_> = self.published().into_iter().map(|(e, path)| (e.key, path, e.places)).collect();
        published.sort_by(|a, b| (&a.0.salt, &a.1).cmp(&(&b.0.salt, &b.1)));
        (self.manager.stats(), tables, published)
    }

    /// What is published, each with all tokens from the first on.
    fn published(&self) -> Vec<(PrefixEntry, Vec<u32>)> {
        let mut paths: Vec<Vec<u32>> = Vec::new();
        let entries = self.manager.export_prefixes();
        for entry in &entries {
            let mut path = entry.parent.map_or_else(Vec::new, |parent| paths[parent].clone());
            path.extend(&entry.tokens);
            paths.push(path);
        }
        entries.into_iter().zip(paths).collect()
    }

    fn step(&mut self, op: &Op) {
        match op {
            Op::Add { tokens, salt, use_prefix, retention } => {
                self.add(tokens.clone(), *salt, *use_prefix, *retention);
            }
            Op::AddLike { seq, len, more } => {
                if let Some(at) = self.pick(*seq) {
                    let like = &self.seqs[at];
                    let mut tokens = like.tokens[..(*len).min(like.tokens.len())].to_vec();
                    tokens.extend(more);
                    self.add(tokens, like.salt, true, None);
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
            Op::Commit { batch } => self.commit(*batch, None),
            Op::CommitRows { batch, bits } => self.commit(*batch, Some(*bits)),
            Op::Fork { seq } => match self.pick(*seq) {
                Some(at) => {
                    self.seqs[at].plan = None;
                    let mut child = self.seqs[at].clone();
                    child.id = self.manager.fork(child.id).unwrap();
                    self.seqs.push(child);
                }
                None => self.refuse_dead(*seq),
            },
            Op::Reorder { seqs, parents } => self.reorder(seqs, parents),
            Op::Truncate { seq, len } => match self.pick(*seq) {
                Some(at) => self.truncate(at, *len),
                None => self.refuse_dead(*seq),
            },
            Op::Free { seq } => match self.pick(*seq) {
                Some(at) => self.free(at),
                None => self.refuse_dead(*seq),
            },
            Op::Reset => {
                // What is pinned stays; that is another test.
                if self.pins.is_empty() {
                    self.manager.reset_prefix_cache().unwrap();
                    self.era += 1;
                    assert!(self.published().is_empty());
                }
            }
            Op::Advance { seconds } => {
                self.now += seconds;
                self.manager.set_now(Duration::from_secs(self.now));
                self.manager.set_now(Duration::from_secs(self.now.saturating_sub(1)));
            }
            Op::Mark { seq, len, retention } => {
                let Some(at) = self.pick(*seq) else { return };
                let (id, known) = (self.seqs[at].id, self.seqs[at].tokens.len());
                let shares = self.seqs[at].use_prefix && self.config.enable_prefix_caching;
                let len = len % (known + 2);
                let result = self.manager.mark(id, len, to_retention(*retention));
                assert_eq!(result.is_ok(), (1..=known).contains(&len) && shares, "{result:?}");
                self.renewed = self.now;
            }
            Op::Pin { seq, len } => self.pin(*seq, *len),
            Op::Unpin { pin } => {
                if !self.pins.is_empty() {
                    let (pin, ..) = self.pins.swap_remove(pin % self.pins.len());
                    self.manager.unpin(pin).unwrap();
                    assert!(matches!(self.manager.unpin(pin), Err(Error::InvalidHandle(_))));
                    self.renewed = self.now;
                }
            }
            Op::Cross { seq, len } => self.cross(*seq, *len),
            Op::ShareCross { seq, source } => self.share_cross(*seq, *source),
            Op::Faults { bits } => self.faults = *bits,
            Op::Restore { seq, give_up } => {
                if let Some(at) = self.pick(*seq) {
                    self.restore(at, *give_up);
                }
            }
            Op::Save => self.save(),
            Op::Load => self.load(),
            Op::Forget { entry, group } => self.forget(*entry, *group),
        }
        self.check();
    }

    fn refuse_dead(&mut self, seq: usize) {
        if self.dead.is_empty() {
            return;
        }
        let id = self.dead[(seq / 16) % self.dead.len()];
        assert!(matches!(self.manager.append(id, &[0]), Err(Error::InvalidHandle(_))));
        assert!(matches!(self.manager.plan(&[(id, 1)], &mut Vec::new()), Err(Error::InvalidHandle(_))));
        assert!(matches!(self.manager.fork(id), Err(Error::InvalidHandle(_))));
        assert!(matches!(self.manager.truncate(id, 1), Err(Error::InvalidHandle(_))));
        assert!(matches!(self.manager.free(id), Err(Error::InvalidHandle(_))));
        assert!(matches!(self.manager.mark(id, 1, Retention::default()), Err(Error::InvalidHandle(_))));
        assert!(matches!(self.manager.pin(id, 1), Err(Error::InvalidHandle(_))));
        assert!(matches!(self.manager.reserve_cross(id, 1), Err(Error::InvalidHandle(_))));
    }

    /// The longest common beginning with anything that is published, all tokens but the last.
    fn longest(&self, salt: usize, tokens: &[u32]) -> usize {
        let key = OwnedKey::from(Key { salt: SALTS[salt], ..Key::default() });
        let common = |path: &[u32]| path.iter().zip(&tokens[..tokens.len() - 1]).take_while(|(a, b)| a == b).count();
        let published = self.published();
        published.iter().filter(|(entry, _)| entry.key == key).map(|(_, path)| common(path)).max().unwrap_or(0)
    }

    fn add(&mut self, tokens: Vec<u32>, salt: usize, use_prefix: bool, retention: Option<(u64, u8)>) {
        let options =
            AddOptions { use_prefix, retention: retention.map(to_retention), ..AddOptions::salted(SALTS[salt]) };
        let found = if tokens.is_empty() { 0 } else { self.manager.find_prefix(&tokens, options.key).num_tokens };
        let longest = if tokens.is_empty() { 0 } else { self.longest(salt, &tokens) };
        let mut disk = Disk::new(&mut self.store, self.faults);
        let result = self.manager.add(&tokens, &options, &mut disk);
        (self.spills, self.fetches) = (self.spills + disk.count(is_spill), self.fetches + disk.count(is_fetch));
        let failed = disk.failed;
        assert_eq!(disk.count(|step| matches!(step, Move::Copy { .. })), 0);
        if tokens.is_empty() {
            assert!(matches!(result, Err(Error::InvalidArgument(_))));
            return;
        }
        let id = result.unwrap();
        let cached = self.manager.num_cached_tokens(id).unwrap();
        let least = if found < self.config.min_prefix_tokens || !use_prefix { 0 } else { found };
        assert!(if failed { cached <= least } else { cached == least });
        assert!(cached <= longest && (!self.is_plain() || !use_prefix || found == longest));
        if use_prefix {
            self.queries += tokens.len() as u64;
            self.hits += cached as u64;
        }
        if retention.is_some() || failed {
            self.renewed = self.now;
        }
        self.asked.insert((salt, tokens.clone()));
        self.seqs.push(Seq {
            id,
            salt,
            use_prefix,
            era: self.era,
            written: (0..cached).map(|position| token(&tokens, position, SALTS[salt], self.era)).collect(),
            tokens,
            computed: cached,
            cached,
            plan: None,
            last_start: 0,
            cross: None,
            spoiled: false,
        });
    }

    fn plan(&mut self, items: &[(usize, usize)], wild: bool) {
        let block_size = self.config.block_size;
        let mut picked: Vec<(usize, usize)> =
            items.iter().filter_map(|&(seq, n)| Some(((seq / 16).checked_rem(self.seqs.len())?, n))).collect();
        if !wild {
            let open = |at: usize| self.seqs[at].tokens.len() - self.seqs[at].computed;
            let mut seen = HashSet::new();
            picked.retain(|&(at, _)| open(at) > 0 && seen.insert(at));
            picked = picked.into_iter().map(|(at, n)| (at, n.clamp(1, open(at)))).collect();
        }
        let items: Vec<(SeqId, usize)> = picked.iter().map(|&(at, n)| (self.seqs[at].id, n)).collect();
        let before = self.state();
        let given_back = self.given_back(&picked);
        let mut disk = Disk::new(&mut self.store, self.faults);
        let result = self.manager.plan(&items, &mut disk);
        (self.spills, self.fetches) = (self.spills + disk.count(is_spill), self.fetches + disk.count(is_fetch));
        let moves = disk.moves;

        let unique: HashSet<usize> = picked.iter().map(|&(at, _)| at).collect();
        let valid = |&(at, n): &(usize, usize)| n >= 1 && n <= self.seqs[at].tokens.len() - self.seqs[at].computed;
        if picked.is_empty() || unique.len() != picked.len() || !picked.iter().all(valid) {
            assert!(matches!(result, Err(Error::InvalidArgument(_))));
            assert_eq!(self.state(), before);
            return;
        }
        let batch = match result {
            Err(Error::OutOfBlocks { needed, available, total }) => {
                assert!(needed > available && moves.is_empty());
                assert_eq!(self.state(), before);
                // The numbers are those of some group.
                assert!((0..self.num_groups()).any(|group| {
                    let least: usize = picked.iter().map(|&(at, n)| self.growth(at, n, group)).sum();
                    available == self.manager.free_blocks(group) + given_back[group]
                        && total == self.config.groups[group].num_blocks
                        && needed >= least
                        && needed <= least + picked.len()
                }));
                return;
            }
            result => result.unwrap(),
        };
        let sources: HashSet<(usize, BlockId)> = (0..self.num_groups())
            .flat_map(|group| before.1.iter().flat_map(move |tables| tables[group].iter().map(move |&b| (group, b))))
            .collect();
        for step in &moves {
            if let Move::Copy { group, src, .. } = step {
                assert!(sources.contains(&(*group, *src)), "a copy of what nobody holds");
            }
        }
        for (&(at, n), row) in picked.iter().zip(&batch.rows) {
            let seq = &mut self.seqs[at];
            assert_eq!((row.seq, row.start, row.len), (seq.id, seq.computed, n));
            assert_eq!(row.cross_tokens, seq.cross.unwrap_or(0));
            seq.plan = Some((self.plans, true));
            seq.last_start = seq.last_start.max(seq.computed);
            if seq.computed == 0 {
                seq.era = self.era;
            }
            for (group, table) in row.tables.iter().enumerate() {
                assert_eq!(table.len(), (row.start + n).div_ceil(block_size));
                assert_eq!(table, self.manager.block_table(row.seq, group).unwrap());
                // Blocks outside of the window are not kept.
                let reach = self.first_seen(group, row.start.saturating_sub(self.config.max_rollback)) / block_size;
                assert!(table[..reach].iter().all(|block| block.is_none()));
            }
        }
        // Some layers are written at once: nobody else may be able to read these slots.
        self.store.write_half(&batch);
        self.batches.insert(0, Planned { batch, number: self.plans, rows: items, version: self.era });
        self.batches.truncate(8);
        self.plans += 1;
    }

    /// Blocks that a table lacks for the plan.
    fn growth(&self, at: usize, n: usize, group: usize) -> usize {
        let have = self.manager.block_table(self.seqs[at].id, group).unwrap().len();
        (self.seqs[at].computed + n).div_ceil(self.config.block_size).saturating_sub(have)
    }

    /// Blocks of each group that nobody holds any more once the plan has begun.
    fn given_back(&self, picked: &[(usize, usize)]) -> Vec<usize> {
        let block_size = self.config.block_size;
        let mut seen = HashSet::new();
        let mut of = vec![HashMap::<BlockId, usize>::new(); self.num_groups()];
        for &(at, n) in picked.iter().filter(|(at, _)| seen.insert(*at)) {
            let seq = &self.seqs[at];
            for (group, counts) in of.iter_mut().enumerate() {
                let table = self.manager.block_table(seq.id, group).unwrap();
                let reach = self.first_seen(group, seq.computed.saturating_sub(self.config.max_rollback)) / block_size;
                let want = (seq.computed + n).div_ceil(block_size);
                for (position, &block) in table.iter().enumerate() {
                    if !block.is_none() && (position < reach || position >= want) {
                        *counts.entry(block).or_default() += 1;
                    }
                }
            }
        }
        of.iter()
            .enumerate()
            .map(|(group, counts)| {
                let infos = self.manager.group_snapshot(group);
                let free = |(block, count): (&BlockId, &usize)| {
                    infos[block.index()].refs == *count && !infos[block.index()].pinned
                };
                counts.iter().filter(|&entry| free(entry)).count()
            })
            .collect()
    }

    fn commit(&mut self, which: usize, bits: Option<u16>) {
        let Some(Planned { batch, number, rows, version }) = self.batches.get(which) else { return };
        let state = |id: &SeqId| self.seqs.iter().find(|seq| seq.id == *id).and_then(|seq| seq.plan);
        let valid = rows.iter().all(|(id, _)| state(id).is_some_and(|(plan, _)| plan == *number));
        let open = rows.iter().all(|(id, _)| state(id) == Some((*number, true)));
        let kept = |&(_, n): &(SeqId, usize)| -> Vec<usize> {
            (0..n).filter(|row| bits.is_none_or(|bits| bits >> (row % 16) & 1 == 1)).collect()
        };
        let kept: Vec<Vec<usize>> = rows.iter().map(kept).collect();
        let keep: Vec<_> = kept.iter().map(|kept| (bits != Some(u16::MAX)).then_some(&kept[..])).collect();
        let call = |manager: &mut BlockManager| match bits {
            None => manager.commit(batch),
            Some(_) => manager.commit_rows(batch, &keep),
        };
        if !valid {
            assert!(matches!(self.manager.validate(batch), Err(Error::StaleBatch(_))));
            assert!(matches!(call(&mut self.manager), Err(Error::StaleBatch(_))));
            return;
        }
        self.manager.validate(batch).unwrap();
        assert_eq!(self.manager.is_committed(batch), !open);
        if !open {
            assert!(matches!(call(&mut self.manager), Err(Error::InvalidState(_))));
            return;
        }
        let left = |(&(id, n), kept): (&(SeqId, usize), &Vec<usize>)| {
            self.manager.num_tokens(id).unwrap() - n + kept.len() > 0
        };
        if !rows.iter().zip(&kept).all(left) {
            let before = self.state();
            assert!(matches!(call(&mut self.manager), Err(Error::InvalidArgument(_))));
            assert_eq!(self.state(), before);
            return;
        }
        for ((row, &(id, n)), kept) in batch.rows.iter().zip(rows).zip(&kept) {
            let seq = self.seqs.iter_mut().find(|seq| seq.id == id).unwrap();
            let behind = seq.tokens.split_off(seq.computed + n);
            let planned = seq.tokens.split_off(seq.computed);
            seq.tokens.extend(kept.iter().map(|&row| planned[row]));
            for position in seq.computed..seq.tokens.len() {
                let slot = token(&seq.tokens, position, SALTS[seq.salt], *version);
                for (group, table) in row.tables.iter().enumerate() {
                    self.store.set(group, table, position, slot.clone());
                }
                seq.written.push(slot);
            }
            seq.tokens.extend(behind);
        }
        call(&mut self.manager).unwrap();
        // A longer retention may have gone up to blocks that nobody holds.
        self.renewed = self.now;
        let rows = rows.clone();
        let number = *number;
        for ((id, _), kept) in rows.into_iter().zip(&kept) {
            let seq = self.seqs.iter_mut().find(|seq| seq.id == id).unwrap();
            seq.computed += kept.len();
            seq.plan = bits.is_none().then_some((number, false));
            // Every written token can be found at once.
            let seq = &self.seqs[self.seqs.iter().position(|seq| seq.id == id).unwrap()];
            if seq.use_prefix
                && seq.era == self.era
                && !seq.spoiled
                && self.config.groups.iter().all(|g| g.window.is_none())
            {
                let mut longer = seq.tokens[..seq.computed].to_vec();
                longer.push(9);
                let key = Key { salt: SALTS[seq.salt], ..Key::default() };
                let found = self.manager.find_prefix(&longer, key).num_tokens;
                assert!(found == seq.computed || self.config.spill_slots > 0);
            }
        }
    }

    fn reorder(&mut self, seqs: &[usize], parents: &[usize]) {
        let at: Vec<usize> = seqs.iter().filter_map(|seq| (seq / 16).checked_rem(self.seqs.len())).collect();
        let ids: Vec<SeqId> = at.iter().map(|&at| self.seqs[at].id).collect();
        let unique: HashSet<SeqId> = ids.iter().copied().collect();
        let before = self.state();
        let result = self.manager.reorder(&ids, parents);
        if unique.len() != ids.len() || parents.is_empty() || parents.iter().any(|&parent| parent >= ids.len()) {
            assert!(matches!(result, Err(Error::InvalidArgument(_))));
            assert_eq!(self.state(), before);
            return;
        }
        let result = result.unwrap();
        let olds: Vec<Seq> = at.iter().map(|&at| self.seqs[at].clone()).collect();
        self.seqs.retain(|seq| !unique.contains(&seq.id));
        let uses = |parent: usize| parents.iter().filter(|&&p| p == parent).count();
        for (&parent, &id) in parents.iter().zip(&result) {
            let mut seq = olds[parent].clone();
            assert_eq!(id == seq.id, !self.seqs.iter().any(|other| other.id == seq.id));
            seq.id = id;
            if uses(parent) > 1 {
                seq.plan = None;
            }
            self.seqs.push(seq);
        }
        self.dead.extend((0..olds.len()).filter(|&parent| uses(parent) == 0).map(|parent| olds[parent].id));
        self.renewed = self.now;
    }

    fn truncate(&mut self, at: usize, len: usize) {
        // Mostly a length that is known; 19 stays out of range.
        let len = if len < 19 { len % (self.seqs[at].tokens.len() + 1) } else { usize::MAX };
        let seq = &self.seqs[at];
        let (block_size, computed) = (self.config.block_size, seq.computed.min(len));
        let missing = (0..self.num_groups()).any(|group| {
            let table = self.manager.block_table(seq.id, group).unwrap();
            let returned = table.iter().take_while(|block| block.is_none()).count();
            let window = self.config.groups[group].window.unwrap_or(1);
            returned > 0 && computed < returned * block_size + window - 1
        });
        let promised = computed + self.config.max_rollback >= seq.last_start && computed >= seq.cached;
        let before = self.state();
        let result = self.manager.truncate(seq.id, len);
        if len == 0 || len > seq.tokens.len() || missing {
            assert!(matches!(result, Err(Error::InvalidArgument(_))), "{result:?} {missing}");
            assert!(!missing || len == 0 || !promised);
            assert_eq!(self.state(), before);
            return;
        }
        result.unwrap();
        self.asked.insert((seq.salt, seq.tokens.clone()));
        let seq = &mut self.seqs[at];
        seq.plan = None;
        seq.tokens.truncate(len);
        seq.computed = computed;
        seq.written.truncate(len);
    }

    fn free(&mut self, at: usize) {
        let seq = self.seqs.swap_remove(at);
        self.manager.free(seq.id).unwrap();
        self.renewed = self.now;
        self.asked.insert((seq.salt, seq.tokens));
        self.dead.push(seq.id);
    }

    fn pin(&mut self, seq: usize, len: usize) {
        let Some(at) = self.pick(seq) else { return };
        let seq = &self.seqs[at];
        let len = len % (seq.computed + 2);
        let before = self.manager.stats();
        let result = self.manager.pin(seq.id, len);
        match result {
            Ok(pin) => {
                assert!((1..=seq.computed).contains(&len) && seq.use_prefix && seq.era == self.era);
                self.pins.push((pin, seq.salt, seq.tokens[..len].to_vec()));
                self.renewed = self.now;
            }
            Err(Error::InvalidArgument(_)) => assert!(len == 0 || len > seq.computed),
            Err(Error::InvalidState(_)) => {
                let windows = self.config.groups.iter().any(|group| group.window.is_some());
                assert!(!seq.use_prefix || seq.era != self.era || seq.spoiled || windows);
            }
            Err(Error::PinLimit { needed, pinned, limit, total }) => {
                assert!(pinned + needed > limit && limit == total / 2);
            }
            Err(other) => panic!("{other}"),
        }
        if self.pins.is_empty() {
            assert_eq!(before.pinned, self.manager.stats().pinned);
        }
    }

    fn cross(&mut self, seq: usize, len: usize) {
        let Some(at) = self.pick(seq) else { return };
        let free = self.manager.cross_stats().free;
        let needed = len.div_ceil(self.config.block_size);
        let seq = &mut self.seqs[at];
        let result = self.manager.reserve_cross(seq.id, len).map(<[BlockId]>::len);
        match result {
            Ok(blocks) => {
                assert!(seq.cross.is_none() && blocks == needed);
                seq.cross = Some(len);
                seq.plan = None;
            }
            Err(Error::OutOfBlocks { needed: told, available, .. }) => {
                assert_eq!((told, available), (needed, free));
                assert!(needed > free);
            }
            Err(Error::InvalidArgument(_)) => assert_eq!(len, 0),
            Err(Error::InvalidState(_)) => assert!(seq.cross.is_some() || self.config.cross_blocks == 0),
            Err(other) => panic!("{other}"),
        }
    }

    fn share_cross(&mut self, seq: usize, source: usize) {
        let (Some(at), Some(source)) = (self.pick(seq), self.pick(source)) else { return };
        let (free, theirs) = (self.manager.cross_stats().free, self.seqs[source].cross);
        let (id, source) = (self.seqs[at].id, self.seqs[source].id);
        match self.manager.share_cross(id, source) {
            Ok(()) => {
                assert!(self.seqs[at].cross.is_none() && theirs.is_some());
                assert_eq!(self.manager.cross(id).unwrap(), self.manager.cross(source).unwrap());
                self.seqs[at].cross = theirs;
                self.seqs[at].plan = None;
            }
            Err(Error::InvalidState(_)) => assert!(self.seqs[at].cross.is_some() || theirs.is_none()),
            Err(other) => panic!("{other}"),
        }
        assert_eq!(self.manager.cross_stats().free, free);
    }

    /// What a sequence has, as if from a file, in a sequence of its own.
    fn restore(&mut self, at: usize, give_up: bool) {
        let old = self.seqs[at].clone();
        let count = old.computed.div_ceil(self.config.block_size);
        let returned = |table: &Vec<BlockId>| table.iter().take_while(|block| block.is_none()).count().min(count);
        let first: Vec<usize> = self.tables(old.id).iter().map(returned).collect();
        let use_prefix = self.manager.is_shared(old.id).unwrap();
        assert!(!use_prefix || (old.use_prefix && (old.computed == 0 || old.era == self.era)));
        let saved = Saved {
            token_ids: &old.tokens,
            computed: old.computed,
            first: &first,
            cross_tokens: old.cross.unwrap_or(0),
        };
        let options = AddOptions { use_prefix, min_prefix_tokens: Some(0), ..AddOptions::salted(SALTS[old.salt]) };
        let before = self.state();
        let mut disk = Disk::new(&mut self.store, self.faults);
        let result = self.manager.restore(&saved, &options, &mut disk);
        (self.spills, self.fetches) = (self.spills + disk.count(is_spill), self.fetches + disk.count(is_fetch));
        let restored = match result {
            Err(Error::OutOfBlocks { needed, available, .. }) => {
                assert!(needed > available);
                let failed = disk.failed;
                assert!(failed || disk.moves.is_empty());
                assert!(failed || self.state() == before);
                self.renewed = if failed { self.now } else { self.renewed };
                return;
            }
            result => result.unwrap(),
        };
        let id = restored.seq;
        for (group, entries) in restored.fill.iter().enumerate() {
            let table = self.manager.block_table(id, group).unwrap();
            for &entry in entries {
                assert!(entry >= first[group]);
                let start = entry * self.config.block_size;
                for position in start..old.computed.min(start + self.config.block_size) {
                    self.store.set(group, table, position, old.written[position].clone());
                }
            }
        }
        self.renewed = self.now;
        if give_up {
            self.manager.free(id).unwrap();
            self.dead.push(id);
            return;
        }
        assert_eq!(self.manager.finish_restore(restored).unwrap(), id);
        let computed = self.manager.num_computed_tokens(id).unwrap();
        assert!(computed == old.computed || (use_prefix && computed > old.computed));
        let mut written = old.written.clone();
        written.extend((old.computed..computed).map(|at| token(&old.tokens, at, SALTS[old.salt], self.era)));
        self.seqs.push(Seq {
            id,
            use_prefix,
            era: self.era,
            computed,
            cached: self.manager.num_cached_tokens(id).unwrap(),
            plan: None,
            last_start: old.last_start.max(old.computed),
            written,
            spoiled: false,
            ..old
        });
    }

    fn save(&mut self) {
        let entries = self.manager.export_prefixes();
        self.saved = entries
            .into_iter()
            .map(|entry| ImportEntry {
                parent: entry.parent,
                key: entry.key,
                tokens: entry.tokens,
                present: entry.places.iter().map(|place| *place != Place::Nowhere).collect(),
                retention: entry.retention,
            })
            .collect();
    }

    fn load(&mut self) {
        let vacant: Vec<usize> = (0..self.num_groups()).map(|g| self.manager.group_stats(g).unwrap().free).collect();
        let before = self.manager.stats();
        let result = self.manager.import_prefixes(&self.saved).unwrap();
        let mut paths: Vec<Vec<u32>> = Vec::new();
        for (entry, blocks) in self.saved.iter().zip(&result) {
            let mut path = entry.parent.map_or_else(Vec::new, |parent| paths[parent].clone());
            let start = path.len();
            path.extend(&entry.tokens);
            for (group, block) in blocks.iter().enumerate() {
                let Some(block) = block else { continue };
                assert!(entry.present[group]);
                let mut table = vec![BlockId::NONE; start / self.config.block_size];
                table.push(*block);
                for position in start..path.len() {
                    let slot = token(&path, position, entry.key.salt.as_deref(), self.era);
                    self.store.set(group, &table, position, slot);
                }
            }
            paths.push(path);
        }
        for (group, vacant) in vacant.into_iter().enumerate() {
            let taken = result.iter().filter(|blocks| blocks[group].is_some()).count();
            // Partial nodes that are replaced give blocks back.
            assert!(self.manager.group_stats(group).unwrap().free + taken >= vacant);
        }
        assert_eq!(self.manager.stats().evictions, before.evictions);
        self.renewed = self.now;
    }

    fn forget(&mut self, entry: usize, group: usize) {
        let entries = self.published();
        if entries.is_empty() || !self.pins.is_empty() {
            return;
        }
        let (entry, path) = &entries[entry % entries.len()];
        let group = group % self.num_groups();
        match entry.places[group] {
            Place::Nowhere => return,
            Place::Block(block) => {
                let holds = |seq: &Seq| self.manager.block_table(seq.id, group).unwrap().contains(&block);
                let holders: Vec<bool> = self.seqs.iter().map(holds).collect();
                self.seqs.iter_mut().zip(holders).for_each(|(seq, holds)| seq.spoiled |= holds);
                self.manager.forget_block(group, block);
            }
            Place::Slot(slot) => self.manager.forget_slot(group, slot),
        }
        let place = entry.places[group];
        assert!(!self.published().iter().any(|(other, _)| other.places[group] == place));
        if self.config.groups[group].window.is_none() && entry.tokens.len() == self.config.block_size {
            let below = |(other, more): &(PrefixEntry, Vec<u32>)| other.key == entry.key && more.starts_with(path);
            assert!(!self.published().iter().any(below));
        }
        self.manager.forget_slot(group, SlotId::new(99));
        self.manager.forget_block(group, BlockId::new(99));
        self.manager.forget_block(99, BlockId::NONE);
    }

    fn check(&mut self) {
        self.manager.check().unwrap();
        let stats = self.manager.stats();
        assert_eq!(stats.free + stats.cached + stats.used, stats.total);
        assert_eq!((stats.hit_tokens, stats.query_tokens), (self.hits, self.queries));
        assert_eq!((stats.spills, stats.fetches), (self.spills, self.fetches));
        assert_eq!(stats.num_sequences, self.seqs.len());
        assert_eq!(stats.evictions, stats.evicted_lru + stats.evicted_expired);
        assert!(stats.tokens <= stats.slots);
        self.manager.take_events();
        for group in 0..self.num_groups() {
            let (infos, stats) = (self.manager.group_snapshot(group), self.manager.group_stats(group).unwrap());
            let count = |state| infos.iter().filter(|info| info.state == state).count();
            assert_eq!((count(Occupancy::Vacant), count(Occupancy::Used)), (stats.free, stats.used));
            assert_eq!(count(Occupancy::Cached) + count(Occupancy::Pinned), stats.cached);
            assert_eq!(self.manager.free_blocks(group), stats.free + count(Occupancy::Cached));
            for (index, info) in infos.iter().enumerate().filter(|(_, info)| info.refs > 0) {
                assert!(info.filled <= self.config.block_size);
                self.held.insert((group, BlockId::new(index as u32)), self.now);
            }
        }
        for seq in &self.seqs {
            assert_eq!(self.manager.token_ids(seq.id).unwrap(), seq.tokens);
            assert_eq!(self.manager.num_computed_tokens(seq.id).unwrap(), seq.computed);
            assert_eq!(self.manager.num_cached_tokens(seq.id).unwrap(), seq.cached);
            let (blocks, tokens) = self.manager.cross(seq.id).unwrap();
            assert_eq!(tokens, seq.cross.unwrap_or(0));
            assert_eq!(blocks.len(), tokens.div_ceil(self.config.block_size));
            for group in 0..self.num_groups() {
                let table = self.manager.block_table(seq.id, group).unwrap();
                for (position, slot) in seq.written.iter().enumerate() {
                    let block = table[position / self.config.block_size];
                    if block.is_none() {
                        assert!(position < self.first_seen(group, seq.computed));
                    } else {
                        let found = self.store.get(group, block, position % self.config.block_size);
                        assert_eq!(found, slot, "position {position} of {:?} in group {group}", seq.id);
                    }
                }
            }
        }
        self.check_published();
    }

    /// Whatever can be found holds the K and V of exactly these tokens, of today's weights, and has not expired.
    fn check_published(&self) {
        let published = self.published();
        for (entry, path) in &published {
            let start = path.len() - entry.tokens.len();
            for (group, place) in entry.places.iter().enumerate() {
                for index in 0..entry.tokens.len() {
                    let expected = token(path, start + index, entry.key.salt.as_deref(), self.era);
                    match *place {
                        Place::Nowhere => assert!(self.config.groups[group].window.is_some()),
                        Place::Block(block) => assert_eq!(*self.store.get(group, block, index), expected),
                        Place::Slot(slot) => assert_eq!(self.store.spilled(group, slot.index())[index], expected),
                    }
                }
                if let (Place::Block(block), Some(ttl), true) = (place, entry.retention.ttl, self.pins.is_empty()) {
                    let released = self.held.get(&(group, *block)).copied().unwrap_or(0).max(self.renewed);
                    assert!(self.now < released + ttl.as_secs(), "{entry:?} was released at {released}");
                }
            }
        }
        // Pinned prefixes are found whatever happens, and however the prompt goes on.
        for (_, salt, tokens) in &self.pins {
            for more in [&[9][..], &[0, 9], &[1, 9], &[0, 0, 9]] {
                let longer = [tokens, more].concat();
                let found = self.manager.find_prefix(&longer, Key { salt: SALTS[*salt], ..Key::default() });
                assert!(found.num_tokens >= tokens.len(), "a pinned prefix of {tokens:?} before {more:?}: {found:?}");
            }
        }
    }

    fn assert_finds(&self, salt: usize, tokens: &[u32]) {
        let found = self.manager.find_prefix(tokens, Key { salt: SALTS[salt], ..Key::default() });
        let longest = self.longest(salt, tokens);
        assert!(found.num_tokens <= longest && (!self.is_plain() || found.num_tokens == longest));
        for (group, table) in found.tables.iter().enumerate() {
            assert_eq!(table.len(), found.num_tokens.div_ceil(self.config.block_size));
            for position in self.first_seen(group, found.num_tokens)..found.num_tokens {
                let block = table[position / self.config.block_size];
                if block.is_none() {
                    assert!(self.config.spill_slots > 0);
                } else {
                    let expected = token(tokens, position, SALTS[salt], self.era);
                    assert_eq!(*self.store.get(group, block, position % self.config.block_size), expected);
                }
            }
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
        while let Some((pin, ..)) = self.pins.pop() {
            self.manager.unpin(pin).unwrap();
            self.renewed = self.now;
            self.check();
        }
        for group in 0..self.num_groups() {
            assert_eq!(self.manager.free_blocks(group), self.config.groups[group].num_blocks);
        }
        assert_eq!((self.manager.stats().tokens, self.manager.cross_stats().used), (0, 0));
        self.manager.set_now(Duration::from_secs(self.now + 1000));
        self.manager.check().unwrap();
        // Only what was meant to stay for ever is still there.
        assert!(self.published().iter().all(|(entry, _)| entry.retention.ttl.is_none()));
        self.manager.reset_prefix_cache().unwrap();
        self.manager.check().unwrap();
        let stats = self.manager.stats();
        assert_eq!((stats.cached, stats.spilled, stats.free), (0, 0, stats.total));
    }
}

proptest! {
    #![proptest_config(cases(1500))]

    #[test]
    fn every_call_in_any_order_keeps_the_laws(config in config(), ops in prop::collection::vec(op(), 1..200)) {
        let mut world = World::new(config);
        for op in &ops {
            world.step(op);
        }
        world.end();
    }

    #[test]
    fn one_branching_conversation(
        num_blocks in 4..10usize,
        spill_slots in 0..6usize,
        ops in prop::collection::vec(op(), 1..200),
    ) {
        // Equal prompts, computed in one step by three sequences, then anything: chains below the blocks of others.
        let config = ManagerConfig { spill_slots, ..ManagerConfig::new(num_blocks + 6, 2) };
        let mut world = World::new(config);
        for _ in 0..3 {
            let tokens = vec![0, 1, 0, 1];
            world.step(&Op::Add { tokens, salt: 0, use_prefix: true, retention: None });
        }
        world.step(&Op::Plan { items: vec![(16, 4), (32, 4), (0, 4)], wild: false });
        world.step(&Op::Commit { batch: 0 });
        for op in &ops {
            world.step(op);
        }
        world.end();
    }
}
