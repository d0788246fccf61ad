//! The arena's memory: reserved at once, resident as blocks fill, returned on drop. Nothing else is tested
//! here, since the memory of the whole process is measured.

use kvcore::Error;
use kvcore::paging::BlockId;
use kvcore::simd::Level;
use kvcore::storage::{KvDtype, KvStore, Layout, ScaleMode, Scales};

const MIB: usize = 1 << 20;

/// Llama 3 8B's shape in bf16: blocks of 2 MiB.
fn llama(num_blocks: usize) -> Layout {
    Layout {
        num_layers: 32,
        num_blocks,
        num_kv_heads: 8,
        k_dim: 128,
        v_dim: 128,
        latent: false,
        block_size: 16,
        dtype: KvDtype::Bf16,
        scale_mode: ScaleMode::Static,
    }
}

/// Resident bytes of this process.
#[cfg(target_os = "linux")]
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("the process's status");
    let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    let kib: usize = rss.trim().trim_end_matches(" kB").parse().expect("a number of KiB");
    kib * 1024
}

#[cfg(target_os = "linux")]
#[test]
fn memory_is_resident_as_far_as_blocks_are_filled() {
    // 8 GiB, or what a smaller machine lets one reserve.
    let reserve = |gib: usize| KvStore::new(llama(gib * 1024 / 2), Scales::unit(&llama(1)));
    let before = resident();
    let mut store = reserve(8).or_else(|_| reserve(1)).unwrap();
    let l = *store.layout();
    assert!(l.total_bytes() >= 1024 * MIB);
    assert!(resident() < before + 4 * MIB, "an empty pool of {} bytes: {} more", l.total_bytes(), resident() - before);

    // Blocks far from each other: each takes its own bytes, at most rounded up to huge pages.
    let row = vec![1.0f32; l.num_kv_heads * l.k_dim];
    for i in 1..=4 {
        let block = BlockId::new((i * l.num_blocks / 5) as u32);
        for layer in 0..l.num_layers {
            for token in 0..l.block_size {
                store.write(Level::best(), layer, std::iter::once((block, token)), &row, Some(&row));
            }
        }
        let grown = resident() - before;
        assert!(grown >= i * l.block_bytes(), "{i} blocks of {} bytes: {grown}", l.block_bytes());
        assert!(grown <= i * (l.block_bytes() + 4 * MIB) + 4 * MIB, "{i} blocks of {} bytes: {grown}", l.block_bytes());
    }

    // Reading an empty block takes no memory worth mention, either (a huge page of zeros at most).
    store.read(Level::best(), 0, &[BlockId::new(7)], 16);
    drop(store);
    assert!(resident() < before + 4 * MIB, "after drop: {} more", resident().saturating_sub(before));
}

#[test]
fn what_cannot_be_had_is_an_error_with_the_numbers() {
    // Sizes that an address could hold, but no machine has.
    for num_blocks in [1 << 36, 1 << 38] {
        let l = llama(num_blocks);
        match KvStore::new(l, Scales::unit(&l)) {
            Err(Error::OutOfMemory { bytes, .. }) => assert_eq!(bytes, l.total_bytes()),
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("{num_blocks} blocks"),
        }
    }
    // As many scales would not fit, either.
    let l = Layout { num_layers: 1 << 50, ..llama(1) };
    assert!(matches!(KvStore::new(l, Scales::unit(&l)), Err(Error::OutOfMemory { .. } | Error::InvalidArgument(_))));
    let l = Layout { num_layers: 1 << 40, ..llama(1) };
    assert!(matches!(KvStore::new(l, Scales::unit(&l)), Err(Error::OutOfMemory { .. })));
}
