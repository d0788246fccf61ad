//! Proof that nothing leaked and nothing is shared that should not be.
#![forbid(unsafe_code)]

use std::collections::HashMap;

use super::block::BlockId;
use super::group::Group;
use super::manager::BlockManager;
use super::pool::BlockPool;
use super::sequence::Sequence;
use super::transfer::Place;

/// The class that takes in what finds no room: it may come to outlive parents.
const LAST_CLASS: u16 = 255;

impl BlockManager {
    /// Every internal invariant: free and cached blocks and those that sequences and views hold are the whole of each
    /// pool, counts and lists agree, shared blocks mean equal tokens and key, the index knows committed tokens only,
    /// parents outlive children, pins and retention are counted right. For tests and after doubtful events: O(blocks +
    /// tokens). The error says what is wrong.
    pub fn check(&self) -> Result<(), String> {
        let mut uses = vec![0; usize::from(LAST_CLASS) + 1];
        uses[usize::from(self.class)] += 1;
        let mut published = vec![(0, 0); self.num_groups()];
        self.blocks.index.check(|node| {
            uses[usize::from(self.blocks.index.class(node))] += 1;
            self.check_node(node, &mut published)
        })?;
        for sequence in self.sequences.iter() {
            uses[usize::from(sequence.class)] += 1;
            sequence.marks.iter().for_each(|mark| uses[usize::from(mark.class)] += 1);
            self.check_sequence(sequence)?;
        }
        self.blocks.classes.check(&uses)?;
        for (number, group) in self.blocks.groups.iter().enumerate() {
            self.check_group(number, group, published[number]).map_err(|what| format!("group {number}: {what}"))?;
        }
        self.check_cross()
    }

    fn check_node(&self, node: u32, published: &mut [(usize, usize)]) -> Result<(), String> {
        let (index, classes) = (&self.blocks.index, &self.blocks.classes);
        let mut is_useless = !index.has_children(node);
        for (number, group) in self.blocks.groups.iter().enumerate() {
            let (pool, block) = match (index.place(node, number), &group.tier) {
                (Place::Nowhere, _) if group.window.is_some() => continue,
                (Place::Block(block), _) => {
                    published[number].0 += 1;
                    (&group.pool, block)
                }
                (Place::Slot(slot), Some(tier)) => {
                    published[number].1 += 1;
                    (tier, BlockId::new(slot.raw()))
                }
                (place, _) => return Err(format!("node {node} has {place:?} in group {number}")),
            };
            is_useless = false;
            if block.index() >= pool.num_blocks() || pool.node(block) != Some(node) {
                return Err(format!("node {node} publishes {block:?} of group {number}, which does not know it"));
            }
            if pool.class(block) != index.class(node) {
                return Err(format!("{block:?} of group {number} has another class than its node {node}"));
            }
            if !matches!(index.place(node, number), Place::Block(_)) {
                continue;
            }
            if pool.filled(block) < index.tokens(node).len() || pool.is_spoiled(block) {
                return Err(format!("{block:?} of group {number} is published with more tokens than it has"));
            }
        }
        if is_useless {
            return Err(format!("node {node} has neither blocks nor children"));
        }
        let parent = index.parent(node).slot;
        if !index.is_root(parent)
            && !classes.covers(index.class(parent), index.class(node))
            && index.class(node) != LAST_CLASS
        {
            return Err(format!("node {node} outlives its parent {parent}"));
        }
        Ok(())
    }

    fn check_group(&self, number: usize, group: &Group, published: (usize, usize)) -> Result<(), String> {
        let Group { pool, tier, .. } = group;
        pool.check()?;
        let mut holders: Vec<Option<&Sequence>> = vec![None; pool.num_blocks()];
        let mut refs = vec![(0, 0, 0); pool.num_blocks()];
        for sequence in self.sequences.iter() {
            self.check_sharing(number, sequence, &mut holders)?;
            let blocks = &sequence.tables[number].blocks;
            for (position, block) in blocks.iter().enumerate().filter(|(_, block)| !block.is_none()) {
                refs[block.index()].0 += 1;
                refs[block.index()].1 += usize::from(sequence.borrowed && position + 1 == blocks.len());
            }
        }
        self.holds.blocks(Some(number)).for_each(|block| refs[block.index()].0 += 1);
        self.pins.blocks().filter(|(of, _)| *of == number).for_each(|(_, block)| refs[block.index()].2 += 1);
        let mut num_published = 0;
        for (index, &held) in refs.iter().enumerate() {
            let block = BlockId::new(index as u32);
            let counted = (pool.ref_count(block), pool.borrow_count(block), pool.pin_count(block));
            if counted != held {
                return Err(format!("{block:?} has {counted:?} references, borrowers and pins, counted {held:?}"));
            }
            num_published += usize::from(pool.node(block).is_some());
        }
        let mut num_spilled = 0;
        if let Some(tier) = tier {
            tier.check()?;
            num_spilled = tier.num_evictable();
            if num_spilled != tier.num_blocks() - (tier.num_free() - num_spilled) {
                return Err("a slot is neither vacant nor findable".into());
            }
        }
        if (num_published, num_spilled) != published {
            return Err(format!(
                "{num_published} blocks and {num_spilled} slots say that they are published, {published:?} are"
            ));
        }
        Ok(())
    }

    fn check_cross(&self) -> Result<(), String> {
        let mut refs: HashMap<BlockId, usize> = HashMap::new();
        for sequence in self.sequences.iter() {
            if sequence.cross.len() != sequence.cross_tokens.div_ceil(self.config.block_size) {
                return Err(format!("{} blocks for {} encoder tokens", sequence.cross.len(), sequence.cross_tokens));
            }
            sequence.cross.iter().for_each(|&block| *refs.entry(block).or_default() += 1);
        }
        self.holds.blocks(None).for_each(|block| *refs.entry(block).or_default() += 1);
        let Some(pool) = &self.cross else { return Ok(()) };
        pool.check()?;
        let right = refs.iter().all(|(&block, &held)| pool.ref_count(block) == held);
        if !right || pool.num_blocks() - pool.num_free() != refs.len() {
            return Err("blocks of encoders have other references than holders".into());
        }
        Ok(())
    }

    fn check_sequence(&self, sequence: &Sequence) -> Result<(), String> {
        let (block_size, index) = (self.config.block_size, &self.blocks.index);
        let Sequence { tokens, tables, computed, planned, chained, link, borrowed, .. } = sequence;
        let fail = |what: &str| Err(format!("{what}: {sequence:?}"));
        if *planned > 0 && (sequence.committed || sequence.batch == 0) {
            return fail("a plan without a batch");
        }
        if *borrowed && (*planned > 0 || computed % block_size == 0) {
            return fail("a borrowed block where none can be");
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
        for (number, (group, table)) in self.blocks.groups.iter().zip(tables).enumerate() {
            if computed + planned > tokens.len() || table.blocks.len() != (computed + planned).div_ceil(block_size) {
                return fail("a block table that does not fit its tokens");
            }
            let seen = group.first_seen(*computed);
            let needed = if computed % block_size == 0 { seen } else { seen.min(computed - 1) };
            if table.returned * block_size > needed
                || table.blocks[..table.returned].iter().any(|block| !block.is_none())
                || table.held().iter().any(|block| block.is_none())
            {
                return fail("a window that lacks blocks or has too many");
            }
            self.check_table(number, &group.pool, sequence)?;
        }
        Ok(())
    }

    fn check_table(&self, number: usize, pool: &BlockPool, sequence: &Sequence) -> Result<(), String> {
        let (block_size, index) = (self.config.block_size, &self.blocks.index);
        let Sequence { tokens, tables, computed, planned, .. } = sequence;
        let fail = |what: &str| Err(format!("{what} in group {number}: {sequence:?}"));
        let blocks = &tables[number].blocks;
        let published = |position: usize| {
            let block = blocks[position];
            if block.is_none() { None } else { pool.node(block) }
        };
        if *planned > 0 {
            for (position, &block) in blocks.iter().enumerate().skip(computed / block_size) {
                let slot = computed.saturating_sub(position * block_size);
                let known = pool.node(block).map_or(0, |node| index.tokens(node).len());
                if pool.ref_count(block) - pool.borrow_count(block) != 1 || pool.filled(block) > slot || known > slot {
                    return fail("a plan to write what others can read");
                }
            }
        }
        for (position, &block) in blocks.iter().enumerate().filter(|(_, block)| !block.is_none()) {
            let mine = computed.saturating_sub(position * block_size).min(block_size);
            if pool.filled(block) < mine {
                return fail("computed tokens that no block holds");
            }
            if let Some(node) = pool.node(block) {
                let known = index.tokens(node);
                let common = known.len().min(mine);
                if known[..common] != tokens[position * block_size..][..common] {
                    return fail("a block that is published with other tokens");
                }
            }
        }
        // Of the published blocks the last suffices for the way from the root: the others lie on it.
        let last = (0..blocks.len()).rev().find_map(|position| Some((position, published(position)?)));
        if let Some((position, node)) = last {
            let (path, domain) = index.path(node);
            // A pinned node may have been left behind by a sibling that has its tokens and more.
            let on_path = |position: usize| {
                let at = path[path.len() - 1 - position];
                published(position).is_none_or(|node| {
                    let left_behind = || index.tokens(at).starts_with(index.tokens(node));
                    node == at || (index.parent(node) == index.parent(at) && left_behind())
                })
            };
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
    fn check_sharing<'a>(
        &self,
        number: usize,
        sequence: &'a Sequence,
        holders: &mut [Option<&'a Sequence>],
    ) -> Result<(), String> {
        let block_size = self.config.block_size;
        let mut compared = HashMap::new();
        for (position, block) in sequence.tables[number].blocks.iter().enumerate().rev() {
            if block.is_none() {
                continue;
            }
            let Some(other) = holders[block.index()].replace(sequence) else { continue };
            if other.tables[number].blocks.get(position) != Some(block) {
                return Err(format!("{block:?} is held twice, or at two places"));
            }
            // From the last shared block on, all earlier ones have been compared with it.
            if compared.insert(std::ptr::from_ref(other), ()).is_none() {
                let end = ((position + 1) * block_size).min(sequence.computed).min(other.computed);
                if other.domain != sequence.domain || other.tokens[..end] != sequence.tokens[..end] {
                    return Err(format!("{block:?} is shared by sequences with other tokens or keys"));
                }
            }
        }
        Ok(())
    }
}
