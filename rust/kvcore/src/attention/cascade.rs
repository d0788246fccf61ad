//! Which rows read the same tiles: sequences whose block tables begin with the same blocks (a shared prefix, beams over
//! one encoder's output) go through these together, so that each tile is read once for all of them.
//!
//! ```text
//! share(entries, chunk c):                                all agree on the chunks before c
//!     while all have the same blocks in chunk c: c += 1   -> a segment: all their rows, these chunks
//!     sort by the blocks of chunk c; for each run of equal ones: share(run, c)
//! ```
//! An entry is some rows of one sequence; its segments follow each other without a gap. Nothing else about a row depends on them: each row's sums are
//! its own, and chunks are merged in order. This is the tree of Hydragen (Juravsky et al., 2024) and of cascade attention
//! (FlashInfer, Ye et al., 2024), found from the block ids.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::chunk::CHUNK;
use crate::paging::BlockId;

/// Rows that read the same tiles over some chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Whose, as places in the order that [`share`] has left.
    pub entries: Range<usize>,
    /// The chunks; where they end differs with the rows of one entry, not between entries.
    pub chunks: Range<usize>,
}

/// Consecutive rows of one sequence, or one row of a tree.
#[derive(Clone, Debug)]
pub struct Entry<'a> {
    /// The sequence's block table.
    pub blocks: &'a [BlockId],
    /// The tokens that any of the rows sees.
    pub sees: Range<usize>,
    /// Tokens from here on are its own, whatever the blocks are.
    pub own_from: usize,
}

/// An entry's chunks.
struct Chunks<'a> {
    entry: &'a Entry<'a>,
    block_size: usize,
    id: usize,
}

impl<'a> Chunks<'a> {
    fn range(&self) -> Range<usize> {
        self.entry.sees.start / CHUNK..self.entry.sees.end.div_ceil(CHUNK)
    }

    /// The blocks of chunk `c` that are seen, the place of the first, and whose they are alone, if anybody's.
    fn of(&self, c: usize) -> (usize, &'a [BlockId], usize) {
        let Entry { blocks, sees, own_from } = self.entry;
        let (start, end) = (sees.start.max(c * CHUNK), sees.end.min((c + 1) * CHUNK));
        if start >= end {
            return (0, &[], 0);
        }
        let first = start / self.block_size;
        let owner = if end > *own_from { 1 + self.id } else { 0 };
        (first, &blocks[first..end.div_ceil(self.block_size)], owner)
    }
}

/// Order the entries so that those that share lie side by side: the order, as places in `entries`, and the segments.
pub fn share(entries: &[Entry<'_>], block_size: usize) -> (Vec<usize>, Vec<Segment>) {
    let chunks: Vec<Chunks> = entries.iter().enumerate().map(|(id, entry)| Chunks { entry, block_size, id }).collect();
    let mut order: Vec<usize> = (0..entries.len()).filter(|&i| !entries[i].sees.is_empty()).collect();
    let mut segments = Vec::with_capacity(order.len());
    if let [one] = order[..] {
        segments.push(Segment { entries: 0..1, chunks: chunks[one].range() });
        return (order, segments);
    }
    order.sort_unstable_by_key(|&i| chunks[i].range().start);
    let mut start = 0;
    while start < order.len() {
        let first = chunks[order[start]].range().start;
        let run = order[start..].iter().take_while(|&&i| chunks[i].range().start == first).count();
        split(&chunks, &mut order, start..start + run, first, &mut segments);
        start += run;
    }
    (order, segments)
}

/// The runs of entries with equal blocks in chunk `c`, each with what it shares from there on.
fn split(chunks: &[Chunks<'_>], order: &mut [usize], all: Range<usize>, c: usize, segments: &mut Vec<Segment>) {
    order[all.clone()].sort_unstable_by(|&a, &b| chunks[a].of(c).cmp(&chunks[b].of(c)));
    let mut start = all.start;
    while start < all.end {
        let of = |i: usize, c: usize| chunks[order[i]].of(c);
        let first = of(start, c);
        let end = (start + 1..all.end).find(|&i| of(i, c) != first).unwrap_or(all.end);
        let last = chunks[order[start]].range().end;
        if end - start == 1 {
            if c < last {
                segments.push(Segment { entries: start..end, chunks: c..last });
            }
        } else if c < last {
            let mut next = c + 1;
            while next < last && (start + 1..end).all(|i| of(i, next) == of(start, next)) {
                next += 1;
            }
            segments.push(Segment { entries: start..end, chunks: c..next });
            split(chunks, order, start..end, next, segments);
        }
        start = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables(ids: &[&[u32]]) -> Vec<Vec<BlockId>> {
        // Chunks of 16 blocks, each named by one number.
        let chunk = |&id: &u32| (0..16).map(move |i| BlockId::new(16 * id + i));
        ids.iter().map(|ids| ids.iter().flat_map(chunk).collect()).collect()
    }

    fn segments(tables: &[Vec<BlockId>], lengths: &[usize]) -> Vec<(Vec<usize>, Range<usize>)> {
        let entries: Vec<Entry> = tables
            .iter()
            .zip(lengths)
            .map(|(blocks, &tokens)| Entry { blocks, sees: 0..tokens, own_from: usize::MAX })
            .collect();
        named(&entries)
    }

    fn named(entries: &[Entry<'_>]) -> Vec<(Vec<usize>, Range<usize>)> {
        let (order, segments) = share(entries, 16);
        let mut named: Vec<_> = segments
            .into_iter()
            .map(|s| {
                let mut entries = order[s.entries].to_vec();
                entries.sort_unstable();
                (entries, s.chunks)
            })
            .collect();
        named.sort_unstable_by_key(|(s, c)| (s.clone(), c.start));
        named
    }

    #[test]
    fn a_tree_of_prefixes() {
        let tables = tables(&[&[0, 1, 2], &[0, 1, 3], &[0, 4], &[5, 6], &[0, 1, 2, 7]]);
        let got = segments(&tables, &[700, 600, 512, 400, 900]);
        // Sequence 0 sees 188 tokens of its last chunk, sequence 4 all of the same.
        let expected = [
            (vec![0], 2..3),
            (vec![0, 1, 2, 4], 0..1),
            (vec![0, 1, 4], 1..2),
            (vec![1], 2..3),
            (vec![2], 1..2),
            (vec![3], 0..2),
            (vec![4], 2..4),
        ];
        assert_eq!(got, expected);
    }

    #[test]
    fn one_table_for_all() {
        let tables = tables(&[&[0, 1], &[0, 1], &[0, 1]]);
        assert_eq!(segments(&tables, &[300, 300, 300]), [(vec![0, 1, 2], 0..2)]);
        assert_eq!(segments(&tables[..1], &[300]), [(vec![0], 0..2)]);
        assert_eq!(segments(&[], &[]), []);
    }

    #[test]
    fn drafts_share_what_lies_before_them() {
        let tables = tables(&[&[0, 1, 2]]);
        let entry = |end| Entry { blocks: &tables[0], sees: 0..end, own_from: 600 };
        let got = named(&[entry(601), entry(602), entry(601)]);
        let expected = [(vec![0], 2..3), (vec![0, 1, 2], 0..2), (vec![1], 2..3), (vec![2], 2..3)];
        assert_eq!(got, expected);
    }
}
