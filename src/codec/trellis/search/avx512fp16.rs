//! The search on AVX512-FP16: 32 costs a vector, several tiles at once, bit-equal to [`super::scalar`].
//!
//! Each position takes 65536 transitions of three vector operations (subtract, multiply-add, minimum); two vector ports
//! bound it from below, so everything else is kept off them:
//!
//! - A vector is 32 consecutive out-states: `32 / Q` adjacent groups times the `Q = 2^b` last symbols, in lane order
//!   `symbol * (32 / Q) + group`. For branch `k` all lanes then need the same few adjacent costs repeated: one broadcast
//!   load, which the load ports do alone. One word permutation a finished vector restores the order of states (none from
//!   5 bits on).
//! - The codebook is laid out again as `[block][k][vector of the block][32]` and read once, in order, a position. A table
//!   load serves all tiles; one tile alone would wait for L2.
//! - No back-pointers: cost rows are kept from the boundary on, and the minimum is found again along the traced path, in
//!   lockstep over the tiles: gather `Q` costs, a table `[out-state][k]`, then `phminposuw`. Costs are never negative, so
//!   they compare as integers, and it returns the lowest index on ties, as the definition asks.
//! - Up to 3 bits, where rows are large, only every second one is kept.
//! - Rows up to 3 bits have 64 bytes of padding after each branch's costs, or all branches would fall into few L1 sets;
//!   tiles are staggered by a kilobyte for the same reason.
//!
//! 2 to 6 bits run here; 1, 7 and 8 bits fall back to [`super::avx2`], the scalar arithmetic on eight lanes. Each thread
//! that searches keeps a work buffer: 17 MB after 2 bits, 9 after 3 or 4, half as much with each further bit.
#![allow(unsafe_code)]

use super::super::codebook::{Codebook, STATES};
use super::super::pack;
use super::avx2::Avx2;
use super::buffer::Buffer;
use super::layout::{Shape, Tables, Vector};
use super::scalar::Scalar;
use super::{PASS_ONE_START, States, TILE_LEN, Tile, TileSearch, check};
use crate::error::Result;
use half::f16;
use std::arch::x86_64::*;
use std::cell::RefCell;

/// The AVX512-FP16 engine: 2 to 6 bits itself, others through [`Avx2`]. Obtained from [`Avx512Fp16::detect`] alone.
#[derive(Debug, Clone, Copy)]
pub struct Avx512Fp16(());

impl Avx512Fp16 {
    /// The engine, if this machine has the instructions.
    pub fn detect() -> Option<&'static Self> {
        static ENGINE: Avx512Fp16 = Avx512Fp16(());
        let present = is_x86_feature_detected!("avx512fp16")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl");
        present.then_some(&ENGINE)
    }
}

impl TileSearch for Avx512Fp16 {
    fn name(&self) -> &'static str {
        "avx512-fp16"
    }

    fn search(&self, codebook: Codebook, bits: u32, targets: &[Tile], states: &mut [States]) -> Result<()> {
        check(bits, targets, states.len())?;
        // SAFETY: a value of this type exists only where `detect` found the instructions.
        unsafe {
            match bits {
                2 => search::<2, 1>(codebook, targets, states),
                3 => search::<3, 2>(codebook, targets, states),
                4 => search::<4, 2>(codebook, targets, states),
                5 => search::<5, 2>(codebook, targets, states),
                6 => search::<6, 2>(codebook, targets, states),
                _ => match Avx2::detect() {
                    Some(engine) => engine.search(codebook, bits, targets, states),
                    None => Scalar.search(codebook, bits, targets, states),
                },
            }
        }
    }
}

/// Tiles at work at once: enough to share table loads, few enough for the registers. Matrices have multiples of eight.
const TOGETHER: usize = 4;

/// Searches any number of tiles. Blocks of the table have `JU` vectors.
#[target_feature(enable = "avx512fp16,avx512bw,avx512vl")]
fn search<const B: u32, const JU: usize>(
    codebook: Codebook,
    targets: &[Tile],
    states: &mut [States],
) -> Result<()> {
    thread_local!(static BUFFER: RefCell<Buffer> = const { RefCell::new(Buffer::new()) });
    let tables = Tables::get::<B, JU>(codebook);
    BUFFER.with_borrow_mut(|buffer| {
        let mut done = 0;
        while done < targets.len() {
            // As even as can be: four tiles are two and two rather than three and one.
            let left = targets.len() - done;
            let count = left.div_ceil(left.div_ceil(TOGETHER));
            let (targets, states) = (&targets[done..][..count], &mut states[done..][..count]);
            let rows = buffer.halves(Work::<B, 1>::TILE * count)?;
            // SAFETY: the features are those of this function; `rows` has room for `count` tiles, for as long as
            // `buffer` is borrowed.
            unsafe {
                match count {
                    1 => Work::<B, 1>::new(tables, rows, targets).run::<JU>(states),
                    2 => Work::<B, 2>::new(tables, rows, targets).run::<JU>(states),
                    3 => Work::<B, 3>::new(tables, rows, targets).run::<JU>(states),
                    _ => Work::<B, 4>::new(tables, rows, targets).run::<JU>(states),
                }
            }
            done += count;
        }
        Ok(())
    })
}

/// `NT` tiles at work.
struct Work<const B: u32, const NT: usize> {
    tables: &'static Tables,
    /// The first row of each tile: [`Self::KEPT`] rows, and two more that take turns where none is kept.
    rows: [*mut u16; NT],
    /// Targets as f16 bits, `[position][tile]`.
    targets: [[u16; NT]; TILE_LEN],
}

impl<const B: u32, const NT: usize> Work<B, NT> {
    /// Whether rows after odd positions are not kept, and tracing back computes the costs of interest again. At 2 bits
    /// writing every row takes as long as computing it; at 3 half the memory costs a hundredth in time.
    const HALF: bool = B <= 3;
    /// Rows kept of a tile. Pass one needs the one after position 255 beside those of the first half.
    const KEPT: usize = if Self::HALF { TILE_LEN / 2 + 1 } else { TILE_LEN };
    /// Costs a tile's rows take, with the stagger.
    const TILE: usize = (Self::KEPT + 2) * Shape::<B>::ROW + 512;

    /// # Safety
    /// `rows` must be valid for `NT * TILE` costs while `self` lives, and aligned to 64 bytes.
    #[target_feature(enable = "avx512fp16,avx512bw,avx512vl")]
    unsafe fn new(tables: &'static Tables, rows: *mut u16, targets: &[Tile]) -> Self {
        Self {
            tables,
            // SAFETY: within the caller's room.
            rows: std::array::from_fn(|tile| unsafe { rows.add(tile * Self::TILE) }),
            targets: std::array::from_fn(|position| {
                std::array::from_fn(|tile| f16::from_f32(targets[tile][position]).to_bits())
            }),
        }
    }

    /// The row after a position.
    fn row(&self, position: usize) -> [*mut u16; NT] {
        let row = match position {
            _ if !Self::HALF => position,
            255 => Self::KEPT - 1,
            _ if position.is_multiple_of(2) => position / 2,
            _ => Self::KEPT,
        };
        self.rows.map(|rows| rows.wrapping_add(row * Shape::<B>::ROW))
    }

    /// The rows that take turns.
    fn turn(&self, i: usize) -> [*mut u16; NT] {
        self.rows.map(|rows| rows.wrapping_add((Self::KEPT + i % 2) * Shape::<B>::ROW))
    }

    /// Both passes over all tiles.
    ///
    /// # Safety
    /// As [`Self::new`].
    #[target_feature(enable = "avx512fp16,avx512bw,avx512vl")]
    unsafe fn run<const JU: usize>(&self, states: &mut [States]) {
        // SAFETY: every row named here is one of the KEPT + 2 rows of each tile.
        unsafe {
            let boundary = self.pass_one::<JU>();
            self.pass_two::<JU>(boundary, states);
        }
    }

    /// The out-state of each tile between positions 255 and 0.
    ///
    /// # Safety
    /// As [`Self::new`].
    #[target_feature(enable = "avx512fp16,avx512bw,avx512vl")]
    unsafe fn pass_one<const JU: usize>(&self) -> [usize; NT] {
        // SAFETY: rows are those of `row` and `turn`, and two steps in succession have different ones.
        unsafe {
            for rows in self.turn(0) {
                rows.write_bytes(0, Shape::<B>::ROW);
            }
            for i in 0..PASS_ONE_START {
                let position = PASS_ONE_START + i;
                let after = if position + 1 == TILE_LEN { self.row(position) } else { self.turn(i + 1) };
                step::<B, JU, NT>(&self.tables.forward, &self.targets[position], self.turn(i), after);
            }
            for position in 0..PASS_ONE_START {
                let before = self.row(if position == 0 { TILE_LEN - 1 } else { position - 1 });
                step::<B, JU, NT>(&self.tables.forward, &self.targets[position], before, self.row(position));
            }
            let mut end = self.row(PASS_ONE_START - 1).map(|row| cheapest::<B>(row));
            for position in (0..PASS_ONE_START).rev() {
                end = self.best(position, end).map(|state| state >> B);
            }
            end
        }
    }

    /// The states of each tile, given its boundary.
    ///
    /// # Safety
    /// As [`Self::new`]; boundaries are out-states.
    #[target_feature(enable = "avx512fp16,avx512bw,avx512vl")]
    unsafe fn pass_two<const JU: usize>(&self, boundary: [usize; NT], states: &mut [States]) {
        // SAFETY: rows are those of `row`, and two positions in succession have different ones.
        unsafe {
            for (tile, boundary) in boundary.into_iter().enumerate() {
                self.first_row(tile, boundary);
            }
            // The row after position 255 has one entry of interest, which tracing back decides.
            for position in 1..TILE_LEN - 1 {
                let (before, after) = (self.row(position - 1), self.row(position));
                step::<B, JU, NT>(&self.tables.forward, &self.targets[position], before, after);
            }
            let mut end = boundary;
            for position in (1..TILE_LEN).rev() {
                let chosen = self.best(position, end);
                for tile in 0..NT {
                    states[tile][position] = chosen[tile] as u16;
                }
                end = chosen.map(|state| state >> B);
            }
            for (tile, (boundary, end)) in boundary.into_iter().zip(end).enumerate() {
                let cost = *self.rows[tile].add(Shape::<B>::at(end));
                // All other branches cost infinity, and so may this one: then the first branch wins the tie.
                let k = boundary / Shape::<B>::J;
                let reached = cost < f16::INFINITY.to_bits();
                let state = if reached { k * Shape::<B>::R + end } else { end };
                states[tile][0] = state as u16;
                if state >> B != boundary {
                    pack::close(&mut states[tile], B);
                }
            }
        }
    }

    /// The row after position 0 of pass two: the `Q` out-states that the boundary leads to, infinity elsewhere.
    ///
    /// # Safety
    /// As [`Self::pass_two`].
    #[target_feature(enable = "avx512fp16,avx512bw,avx512vl")]
    unsafe fn first_row(&self, tile: usize, boundary: usize) {
        let row = self.rows[tile];
        let back = self.tables.back.as_ptr().cast::<u16>();
        let infinity = _mm512_set1_epi16(f16::INFINITY.to_bits() as i16);
        let target = _mm_set1_epi16(self.targets[0][tile] as i16);
        // SAFETY: a row is a multiple of 32 costs; out-states are below R and states below STATES.
        unsafe {
            for i in (0..Shape::<B>::ROW).step_by(32) {
                _mm512_storeu_si512(row.add(i).cast(), infinity);
            }
            for state in boundary << B..(boundary + 1) << B {
                let (k, e) = (state / Shape::<B>::R, state % Shape::<B>::R);
                let value = _mm_set1_epi16(*back.add(e * Shape::<B>::Q + k) as i16);
                let d = _mm_sub_ph(_mm_castsi128_ph(value), _mm_castsi128_ph(target));
                let cost = _mm_castph_si128(_mm_mul_ph(d, d));
                *row.add(Shape::<B>::at(e)) = _mm_extract_epi16::<0>(cost) as u16;
            }
        }
    }

    /// The cheapest state at `position` into out-state `end` of each tile, the lowest on ties.
    ///
    /// # Safety
    /// As [`Self::new`], and the rows before `position` are computed.
    #[inline]
    #[target_feature(enable = "avx512fp16,avx512bw,avx512vl")]
    unsafe fn best(&self, position: usize, end: [usize; NT]) -> [usize; NT] {
        let mut best = end;
        for (tile, best) in best.iter_mut().enumerate() {
            let end = end[tile];
            // SAFETY: branch k < Q of a group below J is in the row; `end` and what it comes from are out-states.
            let (_, k) = unsafe {
                if Self::HALF && position.is_multiple_of(2) && position > 0 {
                    let before = self.row(position - 2)[tile];
                    let mut costs = [0; 8];
                    for (k, cost) in costs.iter_mut().enumerate().take(Shape::<B>::Q) {
                        let end = k * Shape::<B>::J + (end >> B);
                        let row = before.add(end >> B);
                        *cost = self.branch(tile, position - 1, end, |k| *row.add(k * Shape::<B>::BRANCH)).0;
                    }
                    self.branch(tile, position, end, |k| costs[k])
                } else {
                    let before = self.row(if position == 0 { TILE_LEN - 1 } else { position - 1 })[tile];
                    let row = before.add(end >> B);
                    self.branch(tile, position, end, |k| *row.add(k * Shape::<B>::BRANCH))
                }
            };
            *best += k * Shape::<B>::R;
        }
        best
    }

    /// The least cost of out-state `end` after `position`, and its branch, the lowest on ties; `cost` is that of a branch
    /// before.
    ///
    /// # Safety
    /// `end` is an out-state.
    #[inline]
    #[target_feature(enable = "avx512fp16,avx512bw,avx512vl")]
    unsafe fn branch(
        &self,
        tile: usize,
        position: usize,
        end: usize,
        cost: impl Fn(usize) -> u16,
    ) -> (u16, usize) {
        let target = _mm_castsi128_ph(_mm_set1_epi16(self.targets[position][tile] as i16));
        let back = self.tables.back.as_ptr().cast::<u16>().wrapping_add(end * Shape::<B>::Q);
        let mut least = (u32::MAX, 0);
        for first in (0..Shape::<B>::Q).step_by(8) {
            // At 2 bits half the lanes have no branch; of equals the lowest lane is found, so infinity does not win.
            let cost = |k: usize| {
                if k < Shape::<B>::Q { cost(first + k) as i16 } else { f16::INFINITY.to_bits() as i16 }
            };
            let costs =
                _mm_setr_epi16(cost(0), cost(1), cost(2), cost(3), cost(4), cost(5), cost(6), cost(7));
            // SAFETY: an out-state has Q values in the table; 64 bits are four.
            let values = unsafe {
                match B {
                    2 => _mm_loadl_epi64(back.cast()),
                    _ => _mm_loadu_si128(back.add(first).cast()),
                }
            };
            let d = _mm_sub_ph(_mm_castsi128_ph(values), target);
            let costs = _mm_castph_si128(_mm_fmadd_ph(d, d, _mm_castsi128_ph(costs)));
            // The least in the low word, its index in the next.
            let found = _mm_cvtsi128_si32(_mm_minpos_epu16(costs)) as u32;
            if found & 0xffff < least.0 {
                least = (found & 0xffff, first + (found >> 16) as usize);
            }
        }
        (least.0 as u16, least.1)
    }
}

/// The out-state of least cost in a row, the smallest on ties.
///
/// # Safety
/// `row` is a whole row.
#[target_feature(enable = "avx512fp16,avx512bw,avx512vl")]
unsafe fn cheapest<const B: u32>(row: *const u16) -> usize {
    // SAFETY: out-states are below R; `at` places them within the row.
    let cost = |e: usize| unsafe { *row.add(Shape::<B>::at(e)) };
    let least = (0..Shape::<B>::R).map(cost).min().unwrap_or(0);
    (0..Shape::<B>::R).find(|&e| cost(e) == least).unwrap_or(0)
}

/// The costs that the lanes of a vector need for one branch: `G` adjacent ones, repeated.
///
/// # Safety
/// `costs` has `G` costs.
#[inline]
#[target_feature(enable = "avx512fp16,avx512bw,avx512vl")]
unsafe fn broadcast<const B: u32>(costs: *const u16) -> __m512h {
    // SAFETY: the caller's row holds `G` costs from here.
    _mm512_castsi512_ph(unsafe {
        match B {
            2 => _mm512_broadcast_i32x4(_mm_loadu_si128(costs.cast())),
            3 => _mm512_set1_epi64(costs.cast::<i64>().read_unaligned()),
            4 => _mm512_set1_epi32(costs.cast::<i32>().read_unaligned()),
            _ => _mm512_set1_epi16(costs.cast::<i16>().read_unaligned()),
        }
    })
}

/// One position of `NT` tiles: rows `after` from rows `before`.
///
/// # Safety
/// The rows are whole, and no row of `after` overlaps one of `before`. `forward` is a table of this `B` and `JU`.
#[inline(never)]
#[target_feature(enable = "avx512fp16,avx512bw,avx512vl")]
unsafe fn step<const B: u32, const JU: usize, const NT: usize>(
    forward: &[Vector],
    targets: &[u16; NT],
    before: [*mut u16; NT],
    after: [*mut u16; NT],
) {
    let order: [i16; 32] = std::array::from_fn(|natural| Shape::<B>::lane(natural) as i16);
    // SAFETY: 64 bytes read from an array of 64.
    let order = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
    let targets: [__m512h; NT] =
        std::array::from_fn(|tile| _mm512_castsi512_ph(_mm512_set1_epi16(targets[tile] as i16)));
    let mut table = forward.as_ptr();
    debug_assert_eq!(forward.len(), STATES / 32);
    for block in 0..Shape::<B>::R / (32 * JU) {
        let mut costs: [*const u16; NT] = std::array::from_fn(|tile| {
            before[tile].wrapping_add(Shape::<B>::first(block, 0, JU) >> B).cast_const()
        });
        let mut least = [[_mm512_setzero_ph(); JU]; NT];
        // The branch `$k` after the one that `table` and `costs` stand at.
        macro_rules! branch {
            ($k:expr, $first:expr) => {
                for u in 0..JU {
                    // SAFETY: the table has Q * JU vectors a block; the row has Q branches.
                    let value = unsafe { _mm512_load_si512(table.add($k * JU + u).cast()) };
                    let value = _mm512_castsi512_ph(value);
                    for tile in 0..NT {
                        let d = _mm512_sub_ph(value, targets[tile]);
                        let at = costs[tile]
                            .wrapping_add($k * Shape::<B>::BRANCH + (Shape::<B>::first(0, u, JU) >> B));
                        // SAFETY: as above.
                        let cost = _mm512_fmadd_ph(d, d, unsafe { broadcast::<B>(at) });
                        least[tile][u] = if $first { cost } else { _mm512_min_ph(least[tile][u], cost) };
                    }
                }
            };
        }
        macro_rules! advance {
            ($branches:expr) => {
                table = table.wrapping_add($branches * JU);
                costs = costs.map(|costs| costs.wrapping_add($branches * Shape::<B>::BRANCH));
            };
        }
        branch!(0, true);
        branch!(1, false);
        branch!(2, false);
        branch!(3, false);
        if B == 2 {
            advance!(4);
        } else {
            branch!(4, false);
            branch!(5, false);
            branch!(6, false);
            branch!(7, false);
            advance!(8);
            for _ in 1..Shape::<B>::Q / 8 {
                branch!(0, false);
                branch!(1, false);
                branch!(2, false);
                branch!(3, false);
                branch!(4, false);
                branch!(5, false);
                branch!(6, false);
                branch!(7, false);
                advance!(8);
            }
        }
        for tile in 0..NT {
            for (u, least) in least[tile].into_iter().enumerate() {
                let costs = _mm512_castph_si512(least);
                let costs = if B <= 4 { _mm512_permutexvar_epi16(order, costs) } else { costs };
                let at = Shape::<B>::at(Shape::<B>::first(block, u, JU));
                // SAFETY: a vector's out-states are adjacent in the row: J is a multiple of 32, or there is no padding.
                unsafe { _mm512_store_si512(after[tile].add(at).cast(), costs) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::scalar::search_given_boundary;
    use super::*;

    /// Pass two from boundaries that pass one would not choose, among them some that infinite costs cut it off from.
    #[test]
    fn pass_two_is_the_reference_from_any_boundary() {
        if Avx512Fp16::detect().is_none() {
            println!("no AVX512-FP16 here: not run");
            return;
        }
        let wave = std::array::from_fn(|i| (i as f32 * 0.7).sin() * 2.0);
        let mut late = wave;
        late[250] = 3000.0;
        // Infinite throughout, from the first position on, near the end, and not at all.
        let mut early = wave;
        early[0] = -3000.0;
        let tiles: [Tile; 4] = [[1000.0; TILE_LEN], early, late, wave];
        for boundary in [0, 5, 1023] {
            // SAFETY: the instructions are there.
            unsafe {
                agree::<2, 1>(&tiles, boundary);
                agree::<3, 2>(&tiles, boundary);
                agree::<4, 2>(&tiles, boundary);
                agree::<5, 2>(&tiles, boundary);
                agree::<6, 2>(&tiles, boundary);
            }
        }
    }

    #[target_feature(enable = "avx512fp16,avx512bw,avx512vl")]
    fn agree<const B: u32, const JU: usize>(tiles: &[Tile; 4], boundary: u16) {
        let mut buffer = Buffer::new();
        let rows = buffer.halves(4 * Work::<B, 4>::TILE).unwrap();
        let mut states = [[0; TILE_LEN]; 4];
        // SAFETY: room for four tiles, and a boundary below the least number of out-states.
        unsafe {
            let work = Work::<B, 4>::new(Tables::get::<B, JU>(Codebook::Mcg), rows, tiles);
            work.pass_two::<JU>([usize::from(boundary); 4], &mut states);
        }
        for (tile, states) in tiles.iter().zip(states) {
            let mut expected = [0; TILE_LEN];
            search_given_boundary(Codebook::Mcg, B, tile, boundary, &mut expected).unwrap();
            assert_eq!(states, expected, "{B} bits, boundary {boundary}");
            pack::close(&mut expected, B);
            assert_eq!(states, expected, "{B} bits, boundary {boundary}: does not close");
        }
    }
}
