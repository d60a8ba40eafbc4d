//! A tile's states to and from the words of a `trellis` tensor.
//!
//! A tile is its 256 `bits`-bit symbols, most significant bit first, cut into 16-bit words, high bit first; the two words
//! of each pair are swapped, so that read as a little-endian u32 the first is the high half. A state is the last 16 bits
//! of that stream, which closes on itself: the stream before symbol 0 is its end. Only the symbols (the low `bits` bits of
//! each state) are stored; the rest of a state follows.

use super::search::{States, TILE_LEN};

/// 16-bit words of a packed tile.
pub const fn words(bits: u32) -> usize {
    TILE_LEN / 16 * bits as usize
}

/// Packs a tile into the on-disk order. Only the low `bits` bits of each state are read.
///
/// # Panics
/// If `bits` is not in 1..=8 or `words` is not 16 * bits long.
pub fn pack(states: &States, bits: u32, words: &mut [u16]) {
    check(bits, words.len());
    let mask = (1u32 << bits) - 1;
    let (mut stream, mut held, mut word) = (0u32, 0, 0);
    for &state in states {
        stream = stream << bits | (u32::from(state) & mask);
        held += bits;
        if held >= 16 {
            held -= 16;
            words[word ^ 1] = (stream >> held) as u16;
            word += 1;
        }
    }
}

/// Unpacks a tile; the inverse of [`pack`] for states that close on themselves.
///
/// # Panics
/// If `bits` is not in 1..=8 or `words` is not 16 * bits long.
pub fn unpack(words: &[u16], bits: u32, states: &mut States) {
    check(bits, words.len());
    let mask = (1u32 << bits) - 1;
    let (mut stream, mut held, mut word) = (0u32, 0, 0);
    for state in states.iter_mut() {
        if held < bits {
            stream = stream << 16 | u32::from(words[word ^ 1]);
            held += 16;
            word += 1;
        }
        held -= bits;
        *state = (stream >> held & mask) as u16;
    }
    close(states, bits);
}

/// Rebuilds every state from the symbols (low `bits` bits), so that the sequence closes on itself.
pub fn close(states: &mut States, bits: u32) {
    let mask = (1u32 << bits) - 1;
    let shift = |state: u32, symbol: u16| (state << bits | (u32::from(symbol) & mask)) & 0xffff;
    // Whatever it starts from, the state after 256 symbols is the last 16 bits of the stream.
    let mut state = states.iter().fold(0, |state, &symbol| shift(state, symbol));
    for slot in states.iter_mut() {
        state = shift(state, *slot);
        *slot = state as u16;
    }
}

fn check(bits: u32, length: usize) {
    assert!((1..=8).contains(&bits), "{bits} bits a weight; the trellis has 1 to 8");
    assert_eq!(length, words(bits), "words of a tile at {bits} bits");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_symbol_is_the_top_of_the_second_word() {
        let mut states = [0; TILE_LEN];
        states[0] = 0b101;
        close(&mut states, 3);
        let mut packed = [0; words(3)];
        pack(&states, 3, &mut packed);
        assert_eq!(packed[1], 0b101 << 13);
        assert!(packed.iter().enumerate().all(|(i, &w)| i == 1 || w == 0));
    }

    proptest! {
        #[test]
        fn packing_and_unpacking_are_inverse(bits in 1u32..=8, seed in prop::collection::vec(any::<u16>(), 256)) {
            let mut states: States = seed.clone().try_into().unwrap();
            close(&mut states, bits);
            let mask = (1u32 << bits) - 1;
            for i in 0..TILE_LEN {
                let before = u32::from(states[(i + 255) % 256]);
                prop_assert_eq!(u32::from(states[i]), (before << bits | (u32::from(seed[i]) & mask)) & 0xffff);
            }
            let mut packed = vec![0; words(bits)];
            pack(&states, bits, &mut packed);
            let mut back = [0; TILE_LEN];
            unpack(&packed, bits, &mut back);
            prop_assert_eq!(back, states);
            // The other way round: any words are a valid tile.
            let any_words = &seed[..words(bits)];
            unpack(any_words, bits, &mut back);
            pack(&back, bits, &mut packed);
            prop_assert_eq!(&packed[..], any_words);
        }
    }
}
