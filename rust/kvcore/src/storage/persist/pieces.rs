//! Digests of a file's pieces, and the one digest over them.
#![forbid(unsafe_code)]

use xxhash_rust::xxh3::xxh3_128;

/// Bytes of a piece: it stays in the second-level cache while it is read, hashed and copied.
pub(super) const PIECE: usize = 256 << 10;

/// Bytes of a digest.
pub(super) const DIGEST: usize = 16;

/// Digests of pieces, in order, each in the byte order that XXH3's canonical form has.
#[derive(Default)]
pub(super) struct Digests(Vec<u8>);

impl Digests {
    pub fn push(&mut self, piece: &[u8]) {
        self.0.extend_from_slice(&digest(piece));
    }

    /// Whether these are the bytes that were pushed as the piece of this index.
    pub fn matches(&self, index: usize, piece: &[u8]) -> bool {
        self.0.chunks_exact(DIGEST).nth(index) == Some(&digest(piece))
    }

    /// The digest of all digests.
    pub fn root(&self) -> [u8; DIGEST] {
        digest(&self.0)
    }
}

fn digest(bytes: &[u8]) -> [u8; DIGEST] {
    xxh3_128(bytes).to_be_bytes()
}
