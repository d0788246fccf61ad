//! The children of one node in the order of their tokens: which of them has the longest common beginning with a prompt?
//!
//! ```text
//! children = a treap: a search tree by tokens, a heap by a pseudo-random priority     links live in the node array
//! best_match(query): go down as if to insert; the best is among the nodes that are met, because the longest
//!                    common beginning is with a neighbour of the place where the query would stand
//! ```
//!
//! Expected O(log children) comparisons, no allocation. The seed differs from manager to manager, so that nobody can
//! prepare prompts that make the tree deep; no result depends on the tree's shape.
#![forbid(unsafe_code)]

use super::block::NIL;
use super::prefix::PrefixIndex;

/// The three links of a node: siblings with lesser tokens, with greater ones, and its own children.
pub(super) const LESS: usize = 0;
pub(super) const MORE: usize = 1;
pub(super) const CHILDREN: usize = 2;

/// A place in the tree that names a node: one of the links of another.
type Hole = (u32, usize);

impl PrefixIndex {
    /// The child of `parent` with the longest common beginning with `query` that `accept` takes, and its length.
    pub fn best_match(&self, parent: u32, query: &[u32], accept: impl Fn(u32) -> bool) -> Option<(u32, usize)> {
        let mut at = self.link_of((parent, CHILDREN));
        let (mut best, mut len, mut best_is_greater) = (NIL, 0, false);
        while at != NIL {
            let known = self.tokens(at);
            let common = known.iter().zip(query).take_while(|(a, b)| a == b).count();
            let greater = common < known.len() && (common == query.len() || known[common] > query[common]);
            // Of equally good ones the nearest that is greater, or else the nearest: whatever the tree's shape.
            let better = common > len || (common > 0 && common == len && (greater || !best_is_greater));
            if better && accept(at) {
                (best, len, best_is_greater) = (at, common, greater);
            }
            at = self.link_of((at, if greater { LESS } else { MORE }));
        }
        (best != NIL).then_some((best, len))
    }

    /// The same among the `budget` children that are nearest in the tree: for when what `accept` takes is rare, so that
    /// neighbours of the place where the query would stand do not suffice.
    pub fn best_match_among(
        &self,
        parent: u32,
        query: &[u32],
        budget: usize,
        accept: impl Fn(u32) -> bool,
    ) -> Option<(u32, usize)> {
        let (mut best, mut len) = (NIL, 0);
        let mut open = vec![self.link_of((parent, CHILDREN))];
        for _ in 0..budget {
            let Some(at) = open.pop() else { break };
            if at == NIL {
                continue;
            }
            let known = self.tokens(at);
            let common = known.iter().zip(query).take_while(|(a, b)| a == b).count();
            let better = common > len || (common > 0 && common == len && known < self.tokens(best));
            if better && accept(at) {
                (best, len) = (at, common);
            }
            let (near, far) = if known <= query { (MORE, LESS) } else { (LESS, MORE) };
            open.extend([self.link_of((at, far)), self.link_of((at, near))]);
        }
        (best != NIL).then_some((best, len))
    }

    /// The children with the greatest tokens below, and with the least not below `tokens`; [`NIL`] if there is none.
    pub fn neighbours(&self, parent: u32, tokens: &[u32]) -> (u32, u32) {
        let (mut below, mut above) = (NIL, NIL);
        let mut at = self.link_of((parent, CHILDREN));
        while at != NIL {
            if self.tokens(at) < tokens {
                below = at;
                at = self.link_of((at, MORE));
            } else {
                above = at;
                at = self.link_of((at, LESS));
            }
        }
        (below, above)
    }

    /// The child whose tokens are these or begin with these.
    pub fn starting_with(&self, parent: u32, tokens: &[u32]) -> Option<u32> {
        let (_, above) = self.neighbours(parent, tokens);
        (above != NIL && self.tokens(above).starts_with(tokens)).then_some(above)
    }

    /// Puts a node, whose tokens are known, among the children of its parent; no child may have equal tokens.
    pub(super) fn attach(&mut self, parent: u32, slot: u32) {
        let priority = self.priority(slot);
        let mut hole = (parent, CHILDREN);
        let mut at = self.link_of(hole);
        while at != NIL && self.priority(at) > priority {
            hole = (at, self.side(at, slot));
            at = self.link_of(hole);
        }
        self.set_link(hole, slot);
        // What stood here is parted into lesser and greater tokens.
        let (mut less, mut more): (Hole, Hole) = ((slot, LESS), (slot, MORE));
        while at != NIL {
            let side = self.side(at, slot);
            let open = if side == MORE { &mut less } else { &mut more };
            let filled = std::mem::replace(open, (at, side));
            self.set_link(filled, at);
            at = self.link_of((at, side));
        }
        self.set_link(less, NIL);
        self.set_link(more, NIL);
    }

    /// Takes a node out of the children of its parent; its tokens are still those that it was put in with.
    pub(super) fn detach(&mut self, parent: u32, slot: u32) {
        let mut hole = (parent, CHILDREN);
        while self.link_of(hole) != slot {
            let at = self.link_of(hole);
            hole = (at, self.side(at, slot));
        }
        let (mut less, mut more) = (self.link_of((slot, LESS)), self.link_of((slot, MORE)));
        while less != NIL && more != NIL {
            if self.priority(less) > self.priority(more) {
                self.set_link(hole, less);
                hole = (less, MORE);
                less = self.link_of(hole);
            } else {
                self.set_link(hole, more);
                hole = (more, LESS);
                more = self.link_of(hole);
            }
        }
        self.set_link(hole, if less == NIL { more } else { less });
        self.set_link((slot, LESS), NIL);
        self.set_link((slot, MORE), NIL);
    }

    /// Calls `visit` with every child in the order of their tokens.
    pub fn children(&self, parent: u32, mut visit: impl FnMut(u32)) {
        let (mut path, mut at) = (Vec::new(), self.link_of((parent, CHILDREN)));
        loop {
            while at != NIL {
                path.push(at);
                at = self.link_of((at, LESS));
            }
            let Some(next) = path.pop() else { return };
            visit(next);
            at = self.link_of((next, MORE));
        }
    }

    /// On which side of `at` the node `slot` belongs.
    fn side(&self, at: u32, slot: u32) -> usize {
        if self.tokens(at) < self.tokens(slot) { MORE } else { LESS }
    }

    /// The order and the heap below one parent; the number of its children. `Err` says what is wrong.
    pub(super) fn check_children(&self, parent: u32) -> Result<usize, String> {
        let (mut count, mut last, mut wrong) = (0, None::<u32>, None);
        self.children(parent, |child| {
            count += 1;
            if last.is_some_and(|last| self.tokens(last) >= self.tokens(child)) {
                wrong = Some(format!("node {child} is not behind its lesser sibling {last:?}"));
            }
            for side in [LESS, MORE] {
                let below = self.link_of((child, side));
                if below != NIL && self.priority(below) > self.priority(child) {
                    wrong = Some(format!("node {below} stands below its sibling {child}"));
                }
            }
            last = Some(child);
        });
        wrong.map_or(Ok(count), Err)
    }
}
