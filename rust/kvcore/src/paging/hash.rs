//! Hash of a block: its parent's hash and its token ids.
#![forbid(unsafe_code)]

use xxhash_rust::xxh3::xxh3_128;

/// Hash of a block: its parent's hash and its token ids. A parameter so that a test can make all of them equal.
pub type HashFn = fn(parent: u128, tokens: &[u32]) -> u128;

/// The hash that is used unless a test asks otherwise: XXH3-128 over the parent's 16 bytes and 4 bytes a token, all
/// little-endian. Unambiguous, because all full blocks of a cache have the same number of tokens.
pub fn hash_block(parent: u128, tokens: &[u32]) -> u128 {
    // The buffer is on the stack for the usual sizes; its length is a constant so that filling it is a few moves.
    match tokens.len() {
        0..=16 => hash_on_stack::<80>(parent, tokens),
        17..=64 => hash_on_stack::<272>(parent, tokens),
        _ => {
            let mut bytes = vec![0; 16 + 4 * tokens.len()];
            hash_in(&mut bytes, parent, tokens)
        }
    }
}

fn hash_on_stack<const N: usize>(parent: u128, tokens: &[u32]) -> u128 {
    hash_in(&mut [0; N][..16 + 4 * tokens.len()], parent, tokens)
}

fn hash_in(bytes: &mut [u8], parent: u128, tokens: &[u32]) -> u128 {
    let (head, tail) = bytes.split_at_mut(16);
    head.copy_from_slice(&parent.to_le_bytes());
    for (bytes, token) in tail.chunks_exact_mut(4).zip(tokens) {
        bytes.copy_from_slice(&token.to_le_bytes());
    }
    xxh3_128(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffer_size_does_not_change_the_hash() {
        for len in [0, 1, 16, 17, 64, 65, 300] {
            let tokens: Vec<u32> = (0..len).map(|i: u32| i.wrapping_mul(0x0102_0304)).collect();
            let mut bytes = 7u128.to_le_bytes().to_vec();
            bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
            assert_eq!(hash_block(7, &tokens), xxh3_128(&bytes));
        }
    }
}
