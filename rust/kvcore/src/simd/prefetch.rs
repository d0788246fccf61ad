//! A hint that every CPU of an architecture takes, whatever its level.

/// Ask for the cache line at `address`, where nothing need be, into the second-level cache. Without effect on any value.
#[inline(always)]
pub fn prefetch(address: usize) {
    let at = std::ptr::without_provenance::<i8>(address);
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a hint that never faults; SSE is part of the architecture.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(at);
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: a hint that never faults and writes neither memory nor registers.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(nostack, preserves_flags, readonly));
    }
    let _ = at;
}
