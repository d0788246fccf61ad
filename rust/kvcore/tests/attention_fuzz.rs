//! Calls of attention that nobody would think of: any shape, any mixture of sequences, and arguments that are wrong.
//! What is right gives what the oracle says; what is wrong is an error that has written nothing; nothing panics.

mod attention_call;
mod attention_inputs;
mod cases;

use std::cell::Cell;

use attention_call::{Drawn, Parts, Seq, UNTOUCHED, World, is_invalid};
use attention_inputs::{Random, Shape, Style};
use cases::cases;
use kvcore::Error;
use kvcore::attention::Mask;
use kvcore::paging::BlockId;
use kvcore::simd::Level;
use kvcore::threads::NEVER;
use proptest::prelude::*;

/// Values in a row of queries, at most: the oracle is slow.
const WIDEST: usize = 1280;

/// An even number from 2 to `most`, rather a small one.
fn even(most: usize) -> impl Strategy<Value = usize> {
    prop_oneof![3 => 1usize..=24, 1 => 1usize..=most / 2].prop_map(move |half| 2 * half.min(most / 2))
}

fn shapes() -> impl Strategy<Value = Shape> {
    let formats: Vec<_> = Shape::all_formats().collect();
    let dims = prop_oneof![
        3 => (even(256), even(256)).prop_map(|(k, v)| (k, v, false)),
        1 => even(256).prop_map(|d| (d, d, false)),
        1 => even(576).prop_flat_map(|k| (Just(k), (1..=k / 2).prop_map(|half| 2 * half), Just(true))),
    ];
    let size = prop::sample::select(vec![16usize, 32, 48, 64]);
    (1usize..=5, 1usize..=9, dims, size, prop::sample::select(formats)).prop_map(
        |(kv_heads, group, (k_dim, v_dim, latent), block_size, (dtype, scale_mode))| {
            let kv_heads = if latent { 1 } else { kv_heads };
            let group = group.min(WIDEST / k_dim.max(v_dim) / kv_heads).max(1);
            Shape { kv_heads, group, k_dim, v_dim, latent, block_size, dtype, scale_mode }
        },
    )
}

fn sequences() -> impl Strategy<Value = Vec<Drawn>> {
    let start = prop_oneof![4 => 0usize..70, 2 => 230usize..270, 1 => 500usize..530];
    let len = prop_oneof![1 => Just(0usize), 3 => Just(1), 4 => 2usize..8, 1 => 8usize..36];
    let window =
        prop_oneof![4 => Just(0usize), 1 => Just(1), 2 => 2usize..40, 2 => 200usize..300, 1 => Just(usize::MAX)];
    let far = prop_oneof![0usize..600, any::<usize>(), (0usize..40).prop_map(|n| usize::MAX - n)];
    let part = || prop_oneof![2 => Just(0.0f32), 1 => Just(1.0), 1 => 0.0f32..1.0];
    let drawn = (start, len, window, prop::option::weighted(0.2, far), any::<bool>(), part(), part()).prop_map(
        |(start, len, window, cross, tree, shared, mixed)| Drawn { start, len, window, cross, tree, shared, mixed },
    );
    prop::collection::vec(drawn, 0..6)
}

/// Which parts of scoring there are; their numbers come with the heads.
fn styles() -> impl Strategy<Value = (Option<f32>, u8, usize, bool)> {
    let softcap = prop_oneof![2 => Just(None), 1 => Just(Some(3.0f32)), 1 => Just(Some(50.0))];
    prop_oneof![Just((None, 0, 0, false)), (softcap, 0u8..3, 0usize..40, any::<bool>())]
}

fn style((softcap, bias, before, sinks): (Option<f32>, u8, usize, bool), heads: usize) -> Style {
    let mut random = Random(5);
    let slopes = if bias == 1 { random.values(heads, 0.02) } else { Vec::new() };
    let table = if bias == 2 { random.values(heads * (before + 1 + 3), 4.0) } else { Vec::new() };
    let mut sinks = if sinks { random.values(heads, 6.0) } else { Vec::new() };
    if let Some(sink) = sinks.first_mut() {
        *sink = f32::NEG_INFINITY; // this head has none
    }
    Style { softcap, slopes, table, before, sinks }
}

fn worlds() -> impl Strategy<Value = World> {
    (shapes(), sequences(), styles(), any::<u64>())
        .prop_map(|(shape, drawn, chosen, seed)| World::new(shape, &drawn, style(chosen, shape.q_heads()), seed))
}

fn check_near(got: &[f32], expected: &[f32], bound: f32, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (x, e)) in got.iter().zip(expected).enumerate() {
        assert!((x - e).abs() <= bound, "{what} [{i}]: {x}, not {e} (within {bound})");
    }
}

/// The weights of some rows and heads of every sequence, by the laws of weights.
fn check_weights(world: &World, level: Level, expected: &[f32]) {
    let (heads, v_dim) = (world.parts.num_q_heads, world.shape.v_dim);
    let mut first = 0;
    for (index, seq) in world.parts.seqs.iter().enumerate() {
        let tokens = seq.rows().tokens();
        let rows: Vec<usize> = if seq.len == 0 { Vec::new() } else { vec![seq.len - 1, 0] };
        let chosen = [heads - 1, heads / 2];
        let len = rows.len() * 2 * tokens;
        let (result, weights) = world.parts.weights(&world.store, level, (index, &rows, &chosen), len, NEVER);
        assert_eq!(result, Ok(()));
        for (i, weights) in weights.chunks_exact(tokens.max(1)).enumerate() {
            let (row, head) = (rows[i / 2], chosen[i % 2]);
            let sees = seq.mask.sees(seq.position(row));
            assert!(weights.iter().all(|w| (0.0..=1.0).contains(w)), "{level:?}");
            assert!(weights.iter().enumerate().all(|(token, &w)| w == 0.0 || sees.contains(&token)), "{level:?}");
            let sum: f32 = weights.iter().sum();
            assert!(sum < 1.0 + 1e-4 && (sum > 1.0 - 1e-4 || !world.parts.style.sinks.is_empty()), "{level:?} {sum}");
            if world.is_near() {
                let mixed = world.mix(seq, row, head, weights);
                // These weights are not rounded; what is left are scores of f32.
                let bound = world.bounds().0.max(1e-5);
                check_near(&mixed, &expected[((first + row) * heads + head) * v_dim..][..v_dim], bound, "weights");
            }
        }
        first += seq.len;
    }
}

proptest! {
    #![proptest_config(cases(96))]

    #[test]
    fn any_call_gives_what_the_oracle_says(world in worlds(), threads in 1usize..=3) {
        let (expected, expected_lse) = world.expected();
        let (of_values, of_lse) = world.bounds();
        for level in Level::available() {
            let (result, (out, lse)) = world.parts.attend(&world.store, level, threads, NEVER);
            prop_assert_eq!(result, Ok(()));
            prop_assert!(out.iter().chain(&lse).all(|x| x.is_finite() && *x != UNTOUCHED), "{}", level.name());
            if world.is_near() {
                let what = format!("{} {:?} {:?}", level.name(), world.shape, world.parts.style);
                check_near(&out, &expected, of_values, &what);
                check_near(&lse, &expected_lse, of_lse, &what);
            }
            check_weights(&world, level, &expected);
        }
    }

    #[test]
    fn a_broken_call_is_an_error_and_writes_nothing(
        world in worlds(),
        breaks in prop::collection::vec(breaks(), 1..4),
        threads in 1usize..=3,
    ) {
        // The first that does break this call.
        let broken = breaks.iter().find_map(|broken| {
            let mut parts = world.parts.clone();
            broken.apply(&world, &mut parts).then_some((broken, parts))
        });
        prop_assume!(broken.is_some());
        let (done, parts) = broken.unwrap();
        for level in Level::available() {
            let (result, (out, lse)) = parts.attend(&world.store, level, threads, NEVER);
            prop_assert!(is_invalid(&result), "{done:?}: {result:?}");
            prop_assert!(out.iter().chain(&lse).all(|&x| x == UNTOUCHED), "{done:?}");
            if parts.out == world.parts.out && parts.lse == world.parts.lse {
                // Weights have no output of a row's width, so nothing else can be wrong with them.
                let (result, out) = parts.weights(&world.store, level, (0, &[], &[]), 0, NEVER);
                prop_assert!(is_invalid(&result) && out.is_empty(), "weights {done:?}: {result:?}");
            }
        }
        // The call itself is as good as before.
        let (result, _) = world.parts.attend(&world.store, Level::best(), threads, NEVER);
        prop_assert_eq!(result, Ok(()));
    }

    #[test]
    fn weights_of_what_is_not_there_are_an_error(
        world in worlds(),
        (index, row, head) in (edges(), edges(), edges()),
        len in prop_oneof![0usize..40, 0usize..2000],
    ) {
        let seqs = &world.parts.seqs;
        let fits = |seq: &Seq| row < seq.len && head < world.parts.num_q_heads && len == seq.rows().tokens();
        let valid = seqs.get(index).is_some_and(fits);
        for level in Level::available() {
            let (result, out) = world.parts.weights(&world.store, level, (index, &[row], &[head]), len, NEVER);
            prop_assert!(if valid { result.is_ok() } else { is_invalid(&result) }, "{result:?}");
            prop_assert!(valid || out.iter().all(|&x| x == UNTOUCHED));
        }
    }

    /// Numbers of any size everywhere, on a store whose bytes are any bytes.
    #[test]
    fn numbers_without_any_sense(
        shape in shapes(),
        bytes in any::<u8>(),
        parts in any_parts(),
        threads in 1usize..=3,
        chosen in (edges(), edges(), edges()),
    ) {
        let mut world = World::new(shape, &[Drawn { start: 200, len: 0, ..NOTHING }], Style::default(), 1);
        for block in 0..world.store.layout().num_blocks as u32 {
            world.store.block_bytes_mut(BlockId::new(block)).fill(bytes);
        }
        let mut parts = parts;
        // Lengths that fit, wherever memory has room for them.
        let rows = parts.seqs.iter().try_fold(0usize, |sum, seq| sum.checked_add(seq.len));
        let queries = rows.and_then(|rows| rows.checked_mul(parts.num_q_heads)).filter(|&n| n < 1 << 12);
        if let (Some(queries), true) = (queries, parts.q.is_empty()) {
            parts.q = vec![0.5; queries * shape.k_dim];
            (parts.out, parts.lse) = (queries * shape.v_dim, queries);
        }
        for level in Level::available() {
            let (result, (out, lse)) = parts.attend(&world.store, level, threads, NEVER);
            prop_assert!(result.is_ok() || is_invalid(&result), "{result:?}");
            prop_assert!(result.is_ok() || out.iter().chain(&lse).all(|&x| x == UNTOUCHED));
            let (index, row, head) = chosen;
            let (result, _) = parts.weights(&world.store, level, (index, &[row], &[head]), parts.out, NEVER);
            prop_assert!(result.is_ok() || is_invalid(&result), "{result:?}");
        }
    }

    #[test]
    fn a_call_may_be_stopped_at_any_look(world in worlds(), after in 0usize..12, threads in 1usize..=3) {
        let looks = Cell::new(0);
        let should_stop = || looks.replace(looks.get() + 1) >= after;
        let level = Level::best();
        let (result, _) = world.parts.attend(&world.store, level, threads, &should_stop);
        prop_assert_eq!(result, if looks.get() > after { Err(Error::Interrupted) } else { Ok(()) });
        if let Some(seq) = world.parts.seqs.first().filter(|seq| seq.len > 0) {
            looks.set(0);
            let rows = vec![0; 6];
            let len = rows.len() * seq.rows().tokens();
            let (result, _) = world.parts.weights(&world.store, level, (0, &rows, &[0]), len, &should_stop);
            prop_assert_eq!(result, if looks.get() > after { Err(Error::Interrupted) } else { Ok(()) });
        }
        let (result, whole) = world.parts.attend(&world.store, level, threads, NEVER);
        prop_assert_eq!(result, Ok(()));
        prop_assert_eq!(whole, world.parts.attend(&world.store, level, 1, NEVER).1);
    }
}

const NOTHING: Drawn = Drawn { start: 0, len: 0, window: 0, cross: None, tree: false, shared: 0.0, mixed: 0.0 };

/// Numbers at which something ends.
fn edges() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => 0usize..4,
        2 => prop::sample::select(vec![15usize, 16, 17, 255, 256, 257, 1024, 1025]),
        1 => (0u32..64, 0usize..3).prop_map(|(bit, less)| (1usize << bit).wrapping_sub(less)),
        1 => (0usize..20).prop_map(|n| usize::MAX - n),
        1 => any::<usize>(),
    ]
}

/// Any float: rather one at which something ends.
fn floats() -> impl Strategy<Value = f32> {
    prop_oneof![
        3 => prop::sample::select(vec![
            0.0, -0.0, 1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-45,
            2e38, -2e38, 1e28, 1e-38,
        ]),
        1 => any::<u32>().prop_map(f32::from_bits),
    ]
}

fn any_parts() -> impl Strategy<Value = Parts> {
    let mask = prop_oneof![
        Just(Mask::Causal),
        edges().prop_map(Mask::Window),
        edges().prop_map(|tokens| Mask::Cross { tokens }),
    ];
    let table = prop::collection::vec(prop_oneof![6 => 0u32..4, 1 => Just(u32::MAX), 1 => any::<u32>()], 0..24)
        .prop_map(|ids| ids.into_iter().map(BlockId::new).collect());
    let parents = prop::option::weighted(0.3, prop::collection::vec(prop::option::of(edges()), 0..5));
    let seq = (table, edges(), edges(), mask, parents).prop_map(|(table, start, len, mask, parents)| Seq {
        table,
        start,
        len,
        mask,
        parents,
    });
    let numbers = || prop_oneof![2 => Just(Vec::new()), 1 => prop::collection::vec(floats(), 0..12)];
    let style = (prop::option::weighted(0.3, floats()), numbers(), numbers(), edges(), numbers())
        .prop_map(|(softcap, slopes, table, before, sinks)| Style { softcap, slopes, table, before, sinks });
    let q = prop_oneof![4 => Just(Vec::new()), 1 => prop::collection::vec(floats(), 0..100)];
    (prop::collection::vec(seq, 0..4), edges(), floats(), style, q, 0usize..100, 0usize..100).prop_map(
        |(seqs, num_q_heads, scale, style, q, out, lse)| Parts { seqs, num_q_heads, scale, style, q, out, lse },
    )
}

/// One thing that is wrong with a call.
#[derive(Clone, Debug)]
enum Break {
    Q(isize),
    Out(isize),
    Lse(isize),
    Heads(usize),
    Scale(f32),
    Softcap(f32),
    Sinks(isize, f32),
    Slopes(isize, f32),
    Table(isize, f32),
    Before(usize),
    /// Of the sequence with this number, counted round.
    Of(usize, BreakSeq),
}

#[derive(Clone, Debug)]
enum BreakSeq {
    /// Another number of rows than there are queries for.
    Len(usize),
    Start(usize),
    Mask(Mask),
    /// A block that is seen has this id (from the end of the pool on).
    Block(usize, u32),
    /// Fewer blocks than are seen.
    Cut(usize),
    /// A row's parent is this one, where it may not be; or there are too many.
    Parent(usize, usize),
    Parents(usize),
}

fn breaks() -> impl Strategy<Value = Break> {
    let by = || prop_oneof![Just(-1isize), Just(1), Just(isize::MIN), -20isize..20];
    let bad = || prop::sample::select(vec![f32::NAN, f32::INFINITY, 3e38]);
    let of = prop_oneof![
        edges().prop_map(BreakSeq::Len),
        edges().prop_map(BreakSeq::Start),
        prop::sample::select(vec![
            Mask::Window(0),
            Mask::Cross { tokens: 0 },
            Mask::Cross { tokens: usize::MAX },
            Mask::Cross { tokens: 1 << 20 },
        ])
        .prop_map(BreakSeq::Mask),
        (any::<usize>(), prop_oneof![0u32..3, Just(u32::MAX)]).prop_map(|(at, id)| BreakSeq::Block(at, id)),
        any::<usize>().prop_map(BreakSeq::Cut),
        (any::<usize>(), edges()).prop_map(|(row, by)| BreakSeq::Parent(row, by)),
        edges().prop_map(BreakSeq::Parents),
    ];
    prop_oneof![
        1 => by().prop_map(Break::Q),
        1 => by().prop_map(Break::Out),
        1 => by().prop_map(Break::Lse),
        2 => edges().prop_map(Break::Heads),
        1 => bad().prop_map(Break::Scale),
        1 => prop::sample::select(vec![f32::NAN, f32::INFINITY, 0.0, -1.0, 1e-40, 3e38]).prop_map(Break::Softcap),
        1 => (by(), bad()).prop_map(|(by, x)| Break::Sinks(by, x)),
        1 => (by(), bad()).prop_map(|(by, x)| Break::Slopes(by, x)),
        1 => (by(), bad()).prop_map(|(by, x)| Break::Table(by, x)),
        1 => edges().prop_map(Break::Before),
        10 => (any::<usize>(), of).prop_map(|(index, of)| Break::Of(index, of)),
    ]
}

/// Another length: `by` more or fewer, none at all for the least number.
fn other_length(len: usize, by: isize) -> Option<usize> {
    let other = if by == isize::MIN { 0 } else { len.checked_add_signed(by).unwrap_or(0) };
    (other != len).then_some(other)
}

/// As many numbers as there are heads and `by` more or fewer; with a bad one where the number is right.
fn numbers(heads: usize, by: isize, bad: f32) -> Vec<f32> {
    match other_length(heads, by) {
        // None at all would be a call without them.
        Some(n) if n > 0 => vec![0.0; n],
        _ => (0..heads).map(|i| if i == heads / 2 { bad } else { 0.0 }).collect(),
    }
}

impl Break {
    /// Break a call that is right; false if this does not break it.
    fn apply(&self, world: &World, parts: &mut Parts) -> bool {
        let heads = parts.num_q_heads;
        match *self {
            Break::Q(by) => {
                let other = other_length(parts.q.len(), by);
                other.inspect(|&n| parts.q.resize(n, 0.0)).is_some()
            }
            Break::Out(by) => {
                let other = other_length(parts.out, by);
                other.inspect(|&n| parts.out = n).is_some()
            }
            Break::Lse(by) => {
                let other = other_length(parts.lse, by);
                other.inspect(|&n| parts.lse = n).is_some()
            }
            Break::Heads(n) => {
                parts.num_q_heads = n;
                // Without any rows there are no queries, whatever the number of heads; but heads must divide.
                let Style { slopes, table, sinks, .. } = &parts.style;
                let counted = !slopes.is_empty() || !sinks.is_empty();
                let divides = n != 0 && n.is_multiple_of(world.shape.kv_heads);
                n != heads && (!parts.q.is_empty() || !divides || (counted && table.is_empty()))
            }
            Break::Scale(x) => {
                parts.scale = x;
                true
            }
            Break::Softcap(x) => {
                parts.style.softcap = Some(x);
                true
            }
            Break::Sinks(by, x) => {
                parts.style.sinks = numbers(heads, by, x);
                true
            }
            Break::Slopes(by, x) => {
                parts.style.slopes = numbers(heads, by, x);
                true
            }
            Break::Table(by, x) => {
                (parts.style.slopes, parts.style.table) = (Vec::new(), numbers(heads, by, x));
                let table = &parts.style.table;
                !table.len().is_multiple_of(heads)
                    || table.len() / heads <= parts.style.before
                    || table.iter().any(|x| !x.is_finite() || *x > 2e38)
            }
            Break::Before(n) => {
                parts.style.before = n;
                let table = &parts.style.table;
                parts.style.slopes.is_empty() && !table.is_empty() && table.len() / heads <= n
            }
            Break::Of(index, ref of) => {
                let Some(index) = index.checked_rem(parts.seqs.len()) else { return false };
                of.apply(world, &mut parts.seqs[index])
            }
        }
    }
}

impl BreakSeq {
    fn apply(&self, world: &World, seq: &mut Seq) -> bool {
        let (before, seen) = (seq.len, seq.seen());
        let size = world.shape.block_size;
        let blocks = seen.start / size..seen.end.div_ceil(size);
        match *self {
            BreakSeq::Len(len) => {
                seq.len = len;
                len != before
            }
            BreakSeq::Start(start) => {
                seq.start = start;
                // Behind the table, or so far that positions end.
                let tokens = seq.table.len() * size;
                match seq.mask {
                    Mask::Cross { .. } => before > 0 && start > usize::MAX - before,
                    _ => before > 0 && start.checked_add(before).is_none_or(|end| end > tokens),
                }
            }
            BreakSeq::Mask(mask) => {
                seq.mask = mask;
                before > 0 || matches!(mask, Mask::Window(0) | Mask::Cross { tokens: 0 })
            }
            BreakSeq::Block(at, id) => {
                let Some(at) = at.checked_rem(blocks.len()) else { return false };
                let pool = world.store.layout().num_blocks as u32;
                seq.table[blocks.start + at] = BlockId::new(pool.saturating_add(id));
                true
            }
            BreakSeq::Cut(to) => {
                let Some(to) = to.checked_rem(blocks.end) else { return false };
                seq.table.truncate(to);
                true
            }
            BreakSeq::Parent(row, by) => {
                let Some(row) = row.checked_rem(before) else { return false };
                let parents = seq.parents.get_or_insert_with(|| vec![None; before]);
                parents[row] = Some(row.saturating_add(by));
                true
            }
            BreakSeq::Parents(n) => {
                let n = n.min(2000);
                seq.parents = Some(vec![None; n]);
                n != before
            }
        }
    }
}
