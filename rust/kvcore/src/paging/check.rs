//! Proof that nothing leaked and nothing is shared that should not be.
#![forbid(unsafe_code)]

use std::collections::HashMap;

use super::block::BlockId;
use super::manager::BlockManager;
use super::sequence::Sequence;

impl BlockManager {
    /// Every internal invariant: free and cached blocks and those that sequences hold are the whole pool, counts and
    /// lists agree, shared blocks mean equal tokens and salt, the index knows full committed blocks only. For tests and
    /// after doubtful events: O(blocks + tokens). The error says what is wrong.
    pub fn check(&self) -> Result<(), String> {
        let pool = &self.blocks.pool;
        pool.check()?;
        let mut num_published = 0;
        self.blocks.index.check(|node, block| {
            num_published += 1;
            if block.index() >= pool.num_blocks() || pool.node(block) != Some(node) {
                return Err(format!("node {node} publishes {block:?}, which does not know it"));
            }
            if pool.filled(block) != self.config.block_size {
                return Err(format!("{block:?} is published with {} tokens", pool.filled(block)));
            }
            Ok(())
        })?;
        let mut holders: Vec<Option<&Sequence>> = vec![None; pool.num_blocks()];
        let mut refs = vec![0; pool.num_blocks()];
        for sequence in self.sequences.iter() {
            self.check_sequence(sequence)?;
            self.check_sharing(sequence, &mut holders)?;
            for block in &sequence.blocks {
                refs[block.index()] += 1;
            }
        }
        for (index, &held) in refs.iter().enumerate() {
            let block = BlockId::new(index as u32);
            if pool.ref_count(block) != held {
                return Err(format!("{block:?} has {} references and {held} holders", pool.ref_count(block)));
            }
            num_published -= usize::from(pool.node(block).is_some());
        }
        if num_published != 0 {
            return Err(format!("{num_published} blocks say that they are published and are not"));
        }
        Ok(())
    }

    fn check_sequence(&self, sequence: &Sequence) -> Result<(), String> {
        let (block_size, pool, index) = (self.config.block_size, &self.blocks.pool, &self.blocks.index);
        let Sequence { tokens, blocks, computed, planned, chained, link, .. } = sequence;
        let fail = |what: &str| Err(format!("{what}: {sequence:?}"));
        if computed + planned > tokens.len() || blocks.len() != (computed + planned).div_ceil(block_size) {
            return fail("a block table that does not fit its tokens");
        }
        if *planned > 0 && (sequence.committed || sequence.batch == 0) {
            return fail("a plan without a batch");
        }
        if *planned > 0 {
            for &block in &blocks[computed / block_size..] {
                if pool.ref_count(block) != 1 || pool.node(block).is_some() {
                    return fail("a plan to write what others can read");
                }
            }
        }
        if chained * block_size > *computed {
            return fail("a chain beyond what is computed");
        }
        if index.is_alive(*link) {
            let (path, domain) = index.path(link.slot);
            let equal = |(slot, tokens): (&u32, &[u32])| index.tokens(*slot) == tokens;
            if path.len() != *chained
                || domain != Some(&*sequence.domain)
                || !path.iter().rev().zip(tokens.chunks_exact(block_size)).all(equal)
            {
                return fail("a chain of other tokens");
            }
        }
        for (position, &block) in blocks.iter().enumerate() {
            let mine = computed.saturating_sub(position * block_size).min(block_size);
            if pool.filled(block) < mine {
                return fail("computed tokens that no block holds");
            }
            if let Some(node) = pool.node(block)
                && index.tokens(node)[..mine] != tokens[position * block_size..][..mine]
            {
                return fail("a block that is published with other tokens");
            }
        }
        // Of the published blocks the last suffices for the way from the root: the others lie on it.
        let last = blocks.iter().rposition(|&block| pool.node(block).is_some());
        if let Some((position, node)) = last.and_then(|p| Some((p, pool.node(blocks[p])?))) {
            let (path, domain) = index.path(node);
            let on_path =
                |position: usize| pool.node(blocks[position]).is_none_or(|n| n == path[path.len() - 1 - position]);
            if path.len() != position + 1 || domain != Some(&*sequence.domain) || !(0..=position).all(on_path) {
                return fail("a published block at another place than in the index");
            }
            let known = path.iter().rev().flat_map(|&slot| index.tokens(slot));
            if !known.zip(&tokens[..*computed]).all(|(a, b)| a == b) {
                return fail("a published block after other tokens");
            }
        }
        Ok(())
    }

    /// Law 3: whoever holds a block that an earlier sequence holds, holds it at the same place after the same tokens.
    fn check_sharing<'a>(&self, sequence: &'a Sequence, holders: &mut [Option<&'a Sequence>]) -> Result<(), String> {
        let block_size = self.config.block_size;
        let mut compared = HashMap::new();
        for (position, block) in sequence.blocks.iter().enumerate().rev() {
            let Some(other) = holders[block.index()].replace(sequence) else { continue };
            if other.blocks.get(position) != Some(block) {
                return Err(format!("{block:?} is held twice, or at two places"));
            }
            // From the last shared block on, all earlier ones have been compared with it.
            if compared.insert(std::ptr::from_ref(other), ()).is_none() {
                let end = ((position + 1) * block_size).min(sequence.computed).min(other.computed);
                if other.domain != sequence.domain || other.tokens[..end] != sequence.tokens[..end] {
                    return Err(format!("{block:?} is shared by sequences with other tokens or salt"));
                }
            }
        }
        Ok(())
    }
}
