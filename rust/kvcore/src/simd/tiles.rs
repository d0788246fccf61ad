//! Registers of two dimensions, where a CPU has them: some rows of one factor times 16 columns of the other at once.
//!
//! ```text
//! bf16:   sums[m][n] += (sum over even k of left[m][k] * right[k][n], in order) + (the same over odd k)     a step of k
//! bytes:  sums[m][n]  = sum over k of left[m][k] * right[k][n], exact
//! ```
//! Right factors lie as panels of weights and tiles of a cache do: what is summed side by side for each of 16 columns.
#![forbid(unsafe_code)]

use super::vector::LANES;

/// Rows of a tile at most.
pub const TILE_ROWS: usize = 16;
/// Pairs of bf16, or fours of bytes, that one product of tiles sums at most.
pub const TILE_WORDS: usize = 16;

/// 16 columns for each of up to 16 rows, twice. What lies behind the rows that a tile has is not written. Each row is a cache line:
/// one that lay across two would take twice as long.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct TwoTiles<T>(pub [[[T; LANES]; TILE_ROWS]; 2]);

/// Values of a tile of [`TwoTiles`].
pub const TILE_VALUES: usize = LANES * TILE_ROWS;

impl<T> TwoTiles<T> {
    /// All values, the second tile's behind the first's.
    pub fn values_mut(&mut self) -> &mut [T] {
        self.0.as_flattened_mut().as_flattened_mut()
    }
}

/// 16 columns' pairs of bf16.
pub type Pairs = [u16; 2 * LANES];
/// 16 columns' fours of bytes.
pub type Fours = [u8; 4 * LANES];

/// Tiles of rows of pairs of bf16, `stride` apart.
#[derive(Clone, Copy, Debug)]
pub struct Left<'a, const R: usize> {
    /// Each tile's rows.
    pub tiles: [&'a [u32]; R],
    /// Pairs from one row to the next.
    pub stride: usize,
}

/// Sums of tiles of rows with panels.
#[derive(Debug)]
pub struct Sums<'a, const R: usize> {
    /// Each tile's rows.
    pub tiles: [&'a mut [f32]; R],
    /// From one row to the next.
    pub stride: usize,
    /// From one panel's 16 sums of a row to the next panel's.
    pub panel: usize,
}

impl<'a, const R: usize> Sums<'a, R> {
    /// Two panels side by side.
    pub fn of(sums: &'a mut [TwoTiles<f32>; R]) -> Self {
        Self { tiles: sums.each_mut().map(TwoTiles::values_mut), stride: LANES, panel: TILE_VALUES }
    }
}

/// Proof that the CPU has tile registers and that this process may use them.
pub trait Tiles: Copy + Send + Sync + 'static {
    /// Tile registers that have a shape.
    type Shaped: Shaped;

    /// Run `work` with tiles of `rows` rows of `words` pairs of bf16 or fours of bytes, both 1 to 16, on this thread. Giving
    /// them a shape takes as long as some hundred thousand products.
    ///
    /// # Panics
    /// If `work` asks for tiles of another shape.
    fn shaped<T>(self, rows: usize, words: usize, work: impl FnOnce(&Self::Shaped) -> T) -> T;
}

/// Products of tiles.
pub trait Shaped {
    /// Rows of a tile.
    fn rows(&self) -> usize;

    /// Add the products of `R` tiles of rows with `panels` panels to `sums`, or begin these anew, step after step and two panels at a
    /// time. Each step takes as many pairs of each row as a tile has words. `right`: of a panel and a step as many rows of 16 pairs,
    /// `right_stride` apart. `behind` is called behind each two panels.
    ///
    /// # Panics
    /// If a slice is too short.
    #[allow(clippy::too_many_arguments)] // Three matrices and how they are gone through.
    fn bf16<'a, const R: usize>(
        &self,
        left: Left<'_, R>,
        steps: usize,
        panels: usize,
        right: impl FnMut(usize, usize) -> &'a [Pairs],
        right_stride: usize,
        anew: bool,
        sums: Sums<'_, R>,
        behind: impl FnMut(),
    );

    /// Two tiles of whole products: of rows of signed bytes, four in a number, `left_stride` apart, with a panel of such bytes for
    /// each of 16 columns, four side by side; as many as a tile has words.
    ///
    /// # Panics
    /// If a slice is too short.
    fn bytes(&self, left: [&[i32]; 2], left_stride: usize, right: [&[Fours]; 2], sums: &mut TwoTiles<i32>);
}

/// No tile registers: there is no value of this.
#[derive(Clone, Copy, Debug)]
pub enum NoTiles {}

impl Tiles for NoTiles {
    type Shaped = NoTiles;

    fn shaped<T>(self, _: usize, _: usize, _: impl FnOnce(&NoTiles) -> T) -> T {
        match self {}
    }
}

impl Shaped for NoTiles {
    fn rows(&self) -> usize {
        match *self {}
    }
    fn bf16<'a, const R: usize>(
        &self,
        _: Left<'_, R>,
        _: usize,
        _: usize,
        _: impl FnMut(usize, usize) -> &'a [Pairs],
        _: usize,
        _: bool,
        _: Sums<'_, R>,
        _: impl FnMut(),
    ) {
        match *self {}
    }
    fn bytes(&self, _: [&[i32]; 2], _: usize, _: [&[Fours]; 2], _: &mut TwoTiles<i32>) {
        match *self {}
    }
}
