//! What must be equal besides the tokens before anything is shared.
//!
//! ```text
//! hash(domain) = H(base, salt, adapter, extra)      each part as presence, length and bytes: no two keys look alike
//! ```
#![forbid(unsafe_code)]

use xxhash_rust::xxh3::xxh3_128;

/// Key of a prompt. An absent part differs from an empty one, and a part of one kind from the same bytes in another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Key<'a> {
    /// Whose prompt it is: tenants with different salts never share.
    pub salt: Option<&'a [u8]>,
    /// Identity of the adapter that computes K and V.
    pub adapter: Option<&'a [u8]>,
    /// Whatever else K and V depend on, as the content of images.
    pub extra: Option<&'a [u8]>,
}

/// A [`Key`] with bytes of its own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct OwnedKey {
    /// See [`Key::salt`].
    pub salt: Option<Box<[u8]>>,
    /// See [`Key::adapter`].
    pub adapter: Option<Box<[u8]>>,
    /// See [`Key::extra`].
    pub extra: Option<Box<[u8]>>,
}

impl OwnedKey {
    /// The key, borrowed.
    pub fn as_key(&self) -> Key<'_> {
        Key { salt: self.salt.as_deref(), adapter: self.adapter.as_deref(), extra: self.extra.as_deref() }
    }

    /// Start of the hash chain. `base` is what all keys of a cache share.
    pub(super) fn hash(&self, base: &[u8]) -> u128 {
        let mut bytes = Vec::new();
        for part in [Some(base), self.salt.as_deref(), self.adapter.as_deref(), self.extra.as_deref()] {
            bytes.push(u8::from(part.is_some()));
            let part = part.unwrap_or_default();
            bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
            bytes.extend_from_slice(part);
        }
        xxh3_128(&bytes)
    }
}

impl From<Key<'_>> for OwnedKey {
    fn from(key: Key<'_>) -> Self {
        Self { salt: key.salt.map(Into::into), adapter: key.adapter.map(Into::into), extra: key.extra.map(Into::into) }
    }
}

impl Key<'_> {
    /// Whether no part is there.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_keys_start_the_same_chain() {
        let parts: [Option<&[u8]>; 5] = [None, Some(b""), Some(b"\0"), Some(b"\x01"), Some(b"X")];
        let mut hashes = std::collections::HashSet::new();
        for base in [&b""[..], b"X"] {
            for salt in parts {
                for adapter in parts {
                    for extra in parts {
                        assert!(hashes.insert(OwnedKey::from(Key { salt, adapter, extra }).hash(base)));
                    }
                }
            }
        }
    }
}
