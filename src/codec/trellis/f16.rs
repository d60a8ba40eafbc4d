//! Exact scalar half-precision arithmetic: the oracle of every faster kernel.
//!
//! The format's costs are defined in IEEE binary16 with one rounding an operation, as the GPU kernels and AVX512-FP16
//! compute them. Everything here goes through f64 and rounds to f16 once.
//!
//! Why f64 is wide enough. A sum, difference or product of two f16 is exact in f64. In `a*b + c` the product (22 bits)
//! is exact, and the f64 sum is inexact only if its terms span more than 53 bits. If `c` is the larger term, the exact
//! sum differs from the f16 number `c` by less than half a step and rounding returns `c` (or, at a power of two, stays
//! on the same side of the midpoint below it); if the product is the larger, it exceeds 2^29 and overflows anyway.
//!
//! `half::f16::from_f64` (half 2.7) drops low bits before it rounds and is not used; rounding the f32 value of `a*b + c`
//! is wrong too (double rounding). NaN payloads are not specified.

use half::f16;

/// `x` rounded once to the nearest f16, ties to even. Overflows to infinity from 65520 on.
pub fn round(x: f64) -> f16 {
    // To f32 by round-to-odd: its 24 bits are at least two more than f16's 11, so the second rounding is the only one.
    let near = x as f32;
    let bits = near.to_bits();
    let back = f64::from(near);
    if back == x || x.is_nan() {
        return f16::from_f32(near);
    }
    let truncated = if back.abs() > x.abs() { bits - 1 } else { bits };
    f16::from_f32(f32::from_bits(truncated | 1))
}

/// `a + b`, rounded once.
pub fn add(a: f16, b: f16) -> f16 {
    round(a.to_f64() + b.to_f64())
}

/// `a - b`, rounded once.
pub fn sub(a: f16, b: f16) -> f16 {
    round(a.to_f64() - b.to_f64())
}

/// `a * b + c`, rounded once.
pub fn fma(a: f16, b: f16, c: f16) -> f16 {
    round(a.to_f64() * b.to_f64() + c.to_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The nearest f16 to `x` by looking at all finite neighbours: slow, and independent of any rounding trick.
    fn nearest(x: f64) -> f16 {
        let magnitude = x.abs();
        if magnitude >= 65520.0 {
            return if x < 0.0 { f16::NEG_INFINITY } else { f16::INFINITY };
        }
        // Non-negative f16 order as their bits do: the last one at or below the magnitude.
        let (mut low, mut high) = (0u16, 0x7bff);
        while low < high {
            let mid = low + (high - low).div_ceil(2);
            if f16::from_bits(mid).to_f64() <= magnitude { low = mid } else { high = mid - 1 }
        }
        let below = f16::from_bits(low).to_f64();
        let above = if low == 0x7bff { 65536.0 } else { f16::from_bits(low + 1).to_f64() };
        let up =
            magnitude - below > above - magnitude || (magnitude - below == above - magnitude && low & 1 == 1);
        f16::from_bits((low + u16::from(up)) | if x.is_sign_negative() { 0x8000 } else { 0 })
    }

    #[test]
    fn every_f16_and_every_midpoint_rounds_as_it_should() {
        for bits in 0..0x7bffu16 {
            let (low, high) = (f16::from_bits(bits), f16::from_bits(bits + 1));
            let mid = (low.to_f64() + high.to_f64()) / 2.0;
            let even = if bits & 1 == 0 { low } else { high };
            assert_eq!(round(low.to_f64()), low);
            assert_eq!(round(mid), even);
            assert_eq!(round(mid.next_down()), low);
            assert_eq!(round(mid.next_up()), high);
            assert_eq!(round(-mid.next_up()), -high);
        }
        assert_eq!(round(65520f64.next_down()), f16::MAX);
        assert_eq!(round(65520.0), f16::INFINITY);
        assert_eq!(round(1e300), f16::INFINITY);
        assert_eq!(round(-f64::INFINITY), f16::NEG_INFINITY);
        assert_eq!(round(1e-300).to_bits(), 0);
    }

    #[test]
    fn known_traps_of_double_rounding() {
        // 1 + 2^-11 + 2^-40: through f32 it becomes the midpoint 1 + 2^-11 and then, ties to even, 1.
        let x = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
        assert_eq!(round(x).to_bits(), 0x3c01);
        assert_eq!(f16::from_f32(x as f32).to_bits(), 0x3c00);
    }

    fn finite() -> impl Strategy<Value = f16> {
        (0..0x7c00u16, any::<bool>()).prop_map(|(bits, minus)| f16::from_bits(bits | u16::from(minus) << 15))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]
        #[test]
        fn operations_round_once(a in finite(), b in finite(), c in finite()) {
            prop_assert_eq!(sub(a, b), nearest(a.to_f64() - b.to_f64()));
            prop_assert_eq!(add(a, b), nearest(a.to_f64() + b.to_f64()));
            // Exact in integers of 2^-48 wherever the result can be finite.
            let scaled = |x: f16| (x.to_f64() * 2f64.powi(24)) as i128;
            let exact = scaled(a) * scaled(b) + (scaled(c) << 24);
            prop_assert_eq!(fma(a, b, c), nearest_of_fixed(exact));
        }
    }

    /// As [`nearest`], of `value * 2^-48`: compared in integers, so nothing is rounded before the choice.
    fn nearest_of_fixed(value: i128) -> f16 {
        let magnitude = value.abs();
        let fixed = |bits: u16| (f16::from_bits(bits).to_f64() * 2f64.powi(24)) as i128 * (1 << 24);
        let sign = if value < 0 { 0x8000 } else { 0 };
        if magnitude >= 65520 << 48 {
            return f16::from_bits(0x7c00 | sign);
        }
        let (mut low, mut high) = (0u16, 0x7bff);
        while low < high {
            let mid = low + (high - low).div_ceil(2);
            if fixed(mid) <= magnitude { low = mid } else { high = mid - 1 }
        }
        let above = if low == 0x7bff { 65536 << 48 } else { fixed(low + 1) };
        let (down, up) = (magnitude - fixed(low), above - magnitude);
        f16::from_bits((low + u16::from(down > up || (down == up && low & 1 == 1))) | sign)
    }
}
