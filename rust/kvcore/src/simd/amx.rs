//! Intel's AMX: eight tile registers of 16 rows of 64 bytes, and products of bf16 and of bytes between them.
//!
//! The compiler has no stable intrinsics for them, so each instruction is a line of assembly. Tile registers are named by
//! what they hold: 0 to 3 sums, 4 and 5 left factors, 6 and 7 right ones.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::OnceLock;

use super::tiles::{Fours, Left, Pairs, Shaped, Sums, TILE_ROWS, TILE_WORDS, Tiles, TwoTiles};
use super::vector::LANES;

/// Proof that the CPU has AMX with bf16 and bytes, and that the system lets this process use it.
#[derive(Clone, Copy, Debug)]
pub struct Amx(());

/// The shape of every tile register, as the instruction reads it.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Amx {
    /// `None` if the CPU or the system lacks it.
    pub fn new() -> Option<Self> {
        // As the standard library keeps what it has found out of a CPU: under a hypervisor each question is slow.
        static HAS: OnceLock<bool> = OnceLock::new();
        HAS.get_or_init(|| has() && allowed()).then_some(Self(()))
    }
}

/// Whether the CPU has all of it, and the system keeps its state.
fn has() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const BF16_TILE_INT8: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    const TILE_STATE: u64 = 3 << 17;
    // SAFETY: every x86-64 CPU has cpuid; xgetbv is there where the system has turned OSXSAVE on.
    #[allow(unused_unsafe, reason = "safe from Rust 1.93 on")]
    unsafe {
        __cpuid(0).eax >= 7
            && __cpuid_count(7, 0).edx & BF16_TILE_INT8 == BF16_TILE_INT8
            && __cpuid(1).ecx & OSXSAVE != 0
            && xcr0() & TILE_STATE == TILE_STATE
    }
}

/// # Safety
/// The system must have turned OSXSAVE on.
unsafe fn xcr0() -> u64 {
    #[target_feature(enable = "xsave")]
    fn enabled() -> u64 {
        // SAFETY: register 0 is always there.
        unsafe { _xgetbv(0) }
    }
    // SAFETY: the caller's promise: the CPU has XSAVE then.
    unsafe { enabled() }
}

/// Ask the system for the tiles' state, which is too large to be given to every process. Once is enough, more do no harm.
#[cfg(target_os = "linux")]
fn allowed() -> bool {
    const ARCH_PRCTL: isize = 158;
    const REQUEST_PERMISSION: usize = 0x1023;
    const TILE_DATA: usize = 18;
    let mut result = ARCH_PRCTL;
    // SAFETY: the call takes two numbers, touches no memory of ours, and clobbers rcx and r11 as all do.
    unsafe {
        asm!("syscall", inlateout("rax") result, in("rdi") REQUEST_PERMISSION, in("rsi") TILE_DATA,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn allowed() -> bool {
    false
}

impl Tiles for Amx {
    type Shaped = AmxShaped;

    #[inline(always)]
    fn shaped<T>(self, rows: usize, words: usize, work: impl FnOnce(&AmxShaped) -> T) -> T {
        assert!(
            (1..=TILE_ROWS).contains(&rows) && (1..=TILE_WORDS).contains(&words),
            "tiles of {rows} rows of {words} words"
        );
        // Sums and left factors have the rows, right factors a row for each word.
        let (r, w) = (rows as u8, words as u8);
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        config.row_bytes[..8].copy_from_slice(&[64, 64, 64, 64, 4 * words as u16, 4 * words as u16, 64, 64]);
        config.rows[..8].copy_from_slice(&[r, r, r, r, r, r, w, w]);
        self.configured(config, || work(&AmxShaped { rows, words, _on_this_thread: PhantomData }))
    }
}

thread_local! {
    /// Whether this thread's tiles have a shape that somebody here relies on.
    static SHAPED: Cell<bool> = const { Cell::new(false) };
}

/// Brings back the configuration that was there before.
struct Before(Config);

impl Drop for Before {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: only `Amx` makes one; the configuration is one that the CPU had, or none.
        unsafe {
            if self.0.palette == 0 {
                asm!("tilerelease", options(nostack, preserves_flags));
            } else {
                asm!("ldtilecfg [{}]", in(reg) &raw const self.0, options(nostack, preserves_flags));
            }
        }
        SHAPED.set(false);
    }
}

impl Amx {
    /// Run `work` under this configuration, with palette 1.
    #[inline(always)]
    fn configured<T>(self, config: Config, work: impl FnOnce() -> T) -> T {
        assert!(!SHAPED.replace(true), "tiles have a shape");
        let mut before = config;
        // SAFETY: `self` proves the feature; 64 bytes are writable behind the first address and readable behind the second;
        // every such CPU has palette 1, and the shapes are within its limits.
        unsafe {
            asm!("sttilecfg [{}]", in(reg) &raw mut before, options(nostack, preserves_flags));
            asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, preserves_flags));
        }
        let _before = Before(before);
        work()
    }
}

/// This thread's tile registers have a shape: sums `rows` rows of 16 numbers, left factors `rows` of `words`, right factors
/// `words` of 16. Only [`Amx::shaped`] makes one, lends it for as long as that holds, and for one at a time.
#[derive(Debug)]
pub struct AmxShaped {
    rows: usize,
    words: usize,
    _on_this_thread: PhantomData<*const ()>,
}

/// One instruction, after whose operands all tile registers count as changed: the compiler keeps nothing in them.
macro_rules! tile {
    ($text:literal $($operands:tt)*) => {
        asm!($text $($operands)*, out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
            out("tmm6") _, out("tmm7") _, options(nostack, preserves_flags))
    };
}

/// Load a tile, its rows `stride` bytes apart.
///
/// # Safety
/// The tiles have a shape, and all rows of this one are readable.
#[inline(always)]
unsafe fn load<const T: u8, E>(at: *const E, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe { tile!("tileloadd tmm{t}, [{at} + {stride}]", t = const T, at = in(reg) at, stride = in(reg) stride) }
}

/// Store a tile, its rows `stride` bytes apart.
///
/// # Safety
/// The tiles have a shape, and all rows of this one are writable.
#[inline(always)]
unsafe fn store<const T: u8, E>(at: *mut E, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe { tile!("tilestored [{at} + {stride}], tmm{t}", t = const T, at = in(reg) at, stride = in(reg) stride) }
}

/// # Safety
/// The tiles have a shape.
#[inline(always)]
unsafe fn zero<const T: u8>() {
    // SAFETY: the caller's promise.
    unsafe { tile!("tilezero tmm{t}", t = const T) }
}

/// `sums += left * right` of bf16.
///
/// # Safety
/// The tiles have a shape.
#[inline(always)]
unsafe fn dot_bf16<const SUMS: u8, const LEFT: u8, const RIGHT: u8>() {
    // SAFETY: the caller's promise.
    unsafe { tile!("tdpbf16ps tmm{c}, tmm{a}, tmm{b}", c = const SUMS, a = const LEFT, b = const RIGHT) }
}

/// `sums += left * right` of signed bytes.
///
/// # Safety
/// The tiles have a shape.
#[inline(always)]
unsafe fn dot_bytes<const SUMS: u8, const LEFT: u8, const RIGHT: u8>() {
    // SAFETY: the caller's promise.
    unsafe { tile!("tdpbssd tmm{c}, tmm{a}, tmm{b}", c = const SUMS, a = const LEFT, b = const RIGHT) }
}

/// Whether `len` values hold so many rows, `stride` apart, of `width` values.
fn holds(len: usize, rows: usize, stride: usize, width: usize) -> bool {
    stride.checked_mul(rows - 1).and_then(|last| last.checked_add(width)).is_some_and(|end| end <= len)
}

impl Shaped for AmxShaped {
    fn rows(&self) -> usize {
        self.rows
    }

    #[inline(always)]
    fn bf16<'a, const R: usize>(
        &self,
        left: Left<'_, R>,
        steps: usize,
        panels: usize,
        mut right: impl FnMut(usize, usize) -> &'a [Pairs],
        right_stride: usize,
        anew: bool,
        sums: Sums<'_, R>,
        mut behind: impl FnMut(),
    ) {
        const { assert!(R == 1 || R == 2) }
        let Some(last) = panels.checked_sub(1) else { return };
        // All that is the same for each step is looked at once: what lies between two products is time that tiles wait.
        let offset = last.checked_mul(sums.panel).expect("panels of sums");
        let fits =
            |sums_of: &[f32]| offset <= sums_of.len() && holds(sums_of.len() - offset, self.rows, sums.stride, LANES);
        assert!(sums.tiles.iter().all(|tile| fits(tile)), "sums of {}", sums.stride);
        let width = steps.checked_mul(self.words).expect("pairs of a row");
        assert!(
            left.tiles.iter().all(|tile| holds(tile.len(), self.rows, left.stride, width)),
            "rows of {}",
            left.stride
        );
        let right_last = (self.words - 1).checked_mul(right_stride).expect("rows of a panel");
        let (left_bytes, right_bytes) = (size_of::<u32>() * left.stride, size_of::<Pairs>() * right_stride);
        let (sums_bytes, step_pairs) = (size_of::<f32>() * sums.stride, self.words);
        let mut tiles = sums.tiles.into_iter();
        let mut rows = || tiles.next().map_or(std::ptr::null_mut(), <[f32]>::as_mut_ptr);
        let (one, two) = (rows(), rows());
        for first in (0..panels).step_by(2) {
            let (a, b) = (first, (first + 1).min(last));
            let (at_a, at_b) = (a * sums.panel, b * sums.panel);
            // SAFETY: a value of this type proves that the tiles have its shape; the assertions, that all rows are in the slices, of
            // which `one` is the first sums' start, and `two`, if R is 2, the second's.
            unsafe {
                if anew {
                    zero::<0>();
                    zero::<1>();
                } else {
                    load::<0, _>(one.add(at_a).cast_const(), sums_bytes);
                    load::<1, _>(one.add(at_b).cast_const(), sums_bytes);
                }
                if R == 2 && anew {
                    zero::<2>();
                    zero::<3>();
                } else if R == 2 {
                    load::<2, _>(two.add(at_a).cast_const(), sums_bytes);
                    load::<3, _>(two.add(at_b).cast_const(), sums_bytes);
                }
                for step in 0..steps {
                    let (of_a, of_b) = (right(a, step), right(b, step));
                    assert!(of_a.len() > right_last && of_b.len() > right_last, "panels of {right_stride}");
                    load::<6, _>(of_a.as_ptr(), right_bytes);
                    load::<4, _>(left.tiles[0].as_ptr().add(step * step_pairs), left_bytes);
                    dot_bf16::<0, 4, 6>();
                    load::<7, _>(of_b.as_ptr(), right_bytes);
                    dot_bf16::<1, 4, 7>();
                    if R == 2 {
                        load::<5, _>(left.tiles[1].as_ptr().add(step * step_pairs), left_bytes);
                        dot_bf16::<2, 5, 6>();
                        dot_bf16::<3, 5, 7>();
                    }
                }
                store::<0, _>(one.add(at_a), sums_bytes);
                store::<1, _>(one.add(at_b), sums_bytes);
                if R == 2 {
                    store::<2, _>(two.add(at_a), sums_bytes);
                    store::<3, _>(two.add(at_b), sums_bytes);
                }
            }
            behind();
        }
    }

    #[inline(always)]
    fn bytes(&self, left: [&[i32]; 2], left_stride: usize, right: [&[Fours]; 2], sums: &mut TwoTiles<i32>) {
        assert!(left.iter().all(|left| holds(left.len(), self.rows, left_stride, self.words)), "rows of {left_stride}");
        assert!(right.iter().all(|right| right.len() >= self.words), "panels of {}", self.words);
        let left_bytes = size_of::<i32>() * left_stride;
        // SAFETY: a value of this type proves that the tiles have its shape; the assertions, that all rows are in the slices.
        unsafe {
            load::<4, _>(left[0].as_ptr(), left_bytes);
            load::<6, _>(right[0].as_ptr(), size_of::<Fours>());
            zero::<0>();
            dot_bytes::<0, 4, 6>();
            store::<0, _>(sums.0[0].as_mut_ptr(), 64);
            load::<5, _>(left[1].as_ptr(), left_bytes);
            load::<7, _>(right[1].as_ptr(), size_of::<Fours>());
            zero::<1>();
            dot_bytes::<1, 5, 7>();
            store::<1, _>(sums.0[1].as_mut_ptr(), 64);
        }
    }
}

const _: () = assert!(size_of::<Config>() == 64 && size_of::<Pairs>() == 64 && size_of::<Fours>() == 64 && LANES == 16);
