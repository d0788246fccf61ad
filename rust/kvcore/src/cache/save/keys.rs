//! A key's parts as tensors: an absent part has none.
#![forbid(unsafe_code)]

use crate::Result;
use crate::paging::{Key, OwnedKey};
use crate::storage::persist::{Dtype, Reader, TensorSpec, Writer};

const PARTS: [&str; 3] = ["salt", "adapter", "extra"];

fn parts<'a>(key: Key<'a>) -> impl Iterator<Item = (&'static str, &'a [u8])> {
    PARTS.into_iter().zip([key.salt, key.adapter, key.extra]).filter_map(|(name, part)| Some((name, part?)))
}

/// The tensors of a key.
pub fn specs(prefix: &str, key: Key<'_>) -> Vec<TensorSpec> {
    parts(key).map(|(name, part)| TensorSpec::new(format!("{prefix}{name}"), Dtype::U8, [part.len()])).collect()
}

/// Writes them.
pub fn write(writer: &mut Writer<'_>, prefix: &str, key: Key<'_>) -> Result<()> {
    parts(key).try_for_each(|(name, part)| writer.write(&format!("{prefix}{name}"), part))
}

/// Reads a key.
pub fn read(reader: &mut Reader<'_>, prefix: &str) -> Result<OwnedKey> {
    let mut part = |name: &str| -> Result<Option<Box<[u8]>>> {
        let name = format!("{prefix}{name}");
        if !reader.names().any(|known| known == name) {
            return Ok(None);
        }
        Ok(Some(reader.values::<u8>(&name, &[None])?.into()))
    };
    Ok(OwnedKey { salt: part("salt")?, adapter: part("adapter")?, extra: part("extra")? })
}
