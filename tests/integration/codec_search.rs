//! The trellis tile codec and its search against tiles made by exllamav3's own kernel source (`tests/golden/exl3`), and
//! every engine of this machine against the scalar reference (`search/scalar.rs`), to the bit.

use half::f16;
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensors};
use std::sync::LazyLock;
use walk::codec::trellis::codebook::Codebook;
use walk::codec::trellis::search::scalar::{Scalar, search_given_boundary};
use walk::codec::trellis::search::{
    Platform, States, TILE_LEN, Tile, TileSearch, available_searches, best_search,
};
use walk::codec::trellis::tile::{TILE_ORDER, decode};
use walk::codec::trellis::{f16 as exact, pack};

/// Golden tiles of one codebook and bit width.
struct Golden {
    codebook: Codebook,
    bits: u32,
    tiles: Vec<Tile>,
    states: Vec<States>,
    decoded: Vec<Tile>,
    packed: Vec<Vec<u16>>,
}

static FILE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/exl3/tiles.safetensors");
    fs_err::read(path).expect("golden tiles")
});

fn tensor<const N: usize, T>(name: &str, dtype: Dtype, value: impl Fn([u8; N]) -> T) -> Vec<T> {
    let file = SafeTensors::deserialize(&FILE).expect("golden tiles are safetensors");
    let view = file.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(view.dtype(), dtype, "{name}");
    view.data().as_chunks::<N>().0.iter().map(|bytes| value(*bytes)).collect()
}

fn golden() -> Vec<Golden> {
    let tiles = |name: &str| -> Vec<Tile> {
        tensor(name, Dtype::F32, f32::from_le_bytes).as_chunks::<TILE_LEN>().0.to_vec()
    };
    let mut all = Vec::new();
    for codebook in Codebook::ALL {
        for bits in 1..=8 {
            let name = |what: &str| format!("{}.k{bits}.{what}", codebook.name());
            let states =
                tensor(&name("states"), Dtype::I32, |b| u16::try_from(i32::from_le_bytes(b)).unwrap());
            let packed = tensor(&name("packed"), Dtype::I16, u16::from_le_bytes);
            all.push(Golden {
                codebook,
                bits,
                tiles: tiles(&name("tiles")),
                states: states.as_chunks::<TILE_LEN>().0.to_vec(),
                decoded: tiles(&name("decoded")),
                packed: packed.chunks(pack::words(bits)).map(<[u16]>::to_vec).collect(),
            });
        }
    }
    all
}

fn error(codebook: Codebook, tiles: &[Tile], states: &[States]) -> f64 {
    let squares = tiles.iter().zip(states).flat_map(|(tile, states)| {
        let decoded = decode(codebook, states);
        tile.iter().zip(decoded).map(|(w, q)| f64::from(w - q).powi(2)).collect::<Vec<_>>()
    });
    squares.sum::<f64>() / (tiles.len() * TILE_LEN) as f64
}

fn assert_closes(states: &States, bits: u32, what: &str) {
    let mut closed = *states;
    pack::close(&mut closed, bits);
    assert_eq!(*states, closed, "{what}: a state does not follow from the one before it");
}

#[test]
fn codebooks_and_tile_order_are_the_peers() {
    for codebook in Codebook::ALL {
        let table = tensor(&format!("{}.codebook", codebook.name()), Dtype::F16, u16::from_le_bytes);
        assert_eq!(table.len(), 1 << 16);
        for (state, bits) in (0..=u16::MAX).zip(table) {
            assert_eq!(codebook.value(state).to_bits(), bits, "{} state {state}", codebook.name());
            assert_eq!(codebook.values()[usize::from(state)], f16::from_bits(bits).to_f32());
            assert!(f16::from_bits(bits).to_f32().abs() < 4.0);
        }
    }
    assert_eq!(TILE_ORDER.map(i32::from).to_vec(), tensor("tile_order", Dtype::I32, i32::from_le_bytes));
}

#[test]
fn packing_and_decoding_are_the_peers() {
    for golden in golden() {
        assert_eq!(golden.states.len(), 3);
        for (tile, states) in golden.states.iter().enumerate() {
            let what = format!("{}.k{} tile {tile}", golden.codebook.name(), golden.bits);
            let mut packed = vec![0; pack::words(golden.bits)];
            pack::pack(states, golden.bits, &mut packed);
            assert_eq!(packed, golden.packed[tile], "{what}");
            let mut back = [0; TILE_LEN];
            pack::unpack(&packed, golden.bits, &mut back);
            assert_eq!(back, *states, "{what}");
            assert_eq!(decode(golden.codebook, states), golden.decoded[tile], "{what}");
        }
    }
}

#[test]
fn given_the_boundary_pass_two_finds_the_peers_states() {
    for golden in golden() {
        for (tile, states) in golden.tiles.iter().zip(&golden.states) {
            let boundary = (usize::from(states[255]) % ((1 << 16) >> golden.bits)) as u16;
            let mut found = [0; TILE_LEN];
            search_given_boundary(golden.codebook, golden.bits, tile, boundary, &mut found).unwrap();
            assert_eq!(found, *states, "{}.k{}", golden.codebook.name(), golden.bits);
        }
    }
}

/// The scalar engine against the definition, written as plainly as it can be.
#[test]
fn the_scalar_engine_is_the_definition() {
    let oracle = |codebook: Codebook, bits: u32, tile: &Tile| -> States {
        let rows = (1usize << 16) >> bits;
        let values: Vec<f16> = (0..=u16::MAX).map(|s| codebook.value(s)).collect();
        let step = |before: &[f16], w: f32| -> (Vec<f16>, Vec<u16>) {
            let w = f16::from_f32(w);
            let out = |e: usize| {
                let mut best = (f16::INFINITY, e as u16);
                for k in 0..1usize << bits {
                    let s = k * rows + e;
                    let d = exact::sub(values[s], w);
                    let cost = exact::fma(d, d, before[s >> bits]);
                    if cost < best.0 {
                        best = (cost, s as u16);
                    }
                }
                best
            };
            (0..rows).map(out).unzip()
        };
        let run = |start: usize, mut costs: Vec<f16>, end: Option<usize>| -> States {
            let mut chosen = Vec::new();
            for i in 0..TILE_LEN {
                let (after, from) = step(&costs, tile[(start + i) % TILE_LEN]);
                costs = after;
                chosen.push(from);
            }
            let least = |costs: &[f16]| (0..rows).fold(0, |b, e| if costs[e] < costs[b] { e } else { b });
            let mut end = end.unwrap_or_else(|| least(&costs));
            let mut states = [0; TILE_LEN];
            for i in (0..TILE_LEN).rev() {
                states[(start + i) % TILE_LEN] = chosen[i][end];
                end = usize::from(chosen[i][end] >> bits);
            }
            states
        };
        let boundary = usize::from(run(128, vec![f16::ZERO; rows], None)[0] >> bits);
        let mut start = vec![f16::INFINITY; rows];
        start[boundary] = f16::ZERO;
        run(0, start, Some(boundary))
    };
    // The number of branches changes the shape of the loops, not the arithmetic: few, some and many.
    for (codebook, bits, seed) in [(Codebook::Mcg, 3, 1), (Codebook::Mul1, 8, 2), (Codebook::ThreeInst, 1, 3)]
    {
        let tile = random_tile(seed, 1.3);
        let mut states = [[0; TILE_LEN]];
        Scalar.search(codebook, bits, &[tile], &mut states).unwrap();
        assert_eq!(states[0], oracle(codebook, bits, &tile), "{} at {bits} bits", codebook.name());
    }
}

/// Seeded by SplitMix64; a sum of twelve uniforms is normal enough.
fn random_tile(seed: u64, scale: f32) -> Tile {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut uniform = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 40) as f32 / (1 << 24) as f32
    };
    std::array::from_fn(|_| (0..12).map(|_| uniform()).sum::<f32>() * scale - 6.0 * scale)
}

/// Ordinary tiles and those at the edges of f16: subnormal differences and costs, overflow early, late and throughout.
fn edge_tiles(seed: u64) -> Vec<Tile> {
    let random = random_tile(seed, 1.24);
    let replaced = |at: &[usize], value: f32| {
        let mut tile = random;
        at.iter().for_each(|&i| tile[i] = value);
        tile
    };
    vec![
        random,
        random_tile(seed + 1, 0.05),
        // Sums of thousands: coarse costs, many ties.
        random_tile(seed + 2, 12.0),
        [0.0; TILE_LEN],
        [-0.0; TILE_LEN],
        [0.75; TILE_LEN],
        [-3.5; TILE_LEN],
        // Subnormal targets, some below f16's smallest.
        random_tile(seed + 3, 1.0e-6),
        random_tile(seed + 4, 1.0e-8),
        // Costs overflow throughout; at f16's infinity; at f32's.
        [1000.0; TILE_LEN],
        [-70000.0; TILE_LEN],
        [f32::INFINITY; TILE_LEN],
        random_tile(seed + 5, 300.0),
        // About where one square overflows: some states infinite, others not, at both sides of the boundary.
        replaced(&[0], 255.5),
        replaced(&[127], -255.9),
        replaced(&[128], 254.0),
        replaced(&[255], -254.0),
        replaced(&[3, 200], 180.0),
        replaced(&[60, 130, 190], 140.0),
        replaced(&[17], f32::NEG_INFINITY),
        // Slow growth to overflow.
        [18.0; TILE_LEN],
        std::array::from_fn(|i| if i % 2 == 0 { 1.0e-7 } else { 15.9 }),
    ]
}

/// Edge tiles at a codebook and width, and what the reference finds for them.
struct Expected {
    codebook: Codebook,
    bits: u32,
    tiles: Vec<Tile>,
    states: Vec<States>,
}

/// Found once for all engines: the reference is slow.
fn expected() -> Vec<Expected> {
    let mut all = Vec::new();
    for bits in 1..=8 {
        for (index, codebook) in Codebook::ALL.into_iter().enumerate() {
            let mut tiles = edge_tiles(100 * u64::from(bits) + 10 * index as u64);
            if (2..=6).contains(&bits) {
                all.push((codebook, bits, tiles));
            } else if codebook == Codebook::Mcg {
                // Widths without a kernel of their own are there to see that they are passed on.
                tiles.truncate(14);
                all.push((codebook, bits, tiles));
            }
        }
    }
    let find = |(codebook, bits, tiles): (Codebook, u32, Vec<Tile>)| {
        let mut states = vec![[0; TILE_LEN]; tiles.len()];
        Scalar.search(codebook, bits, &tiles, &mut states).unwrap();
        Expected { codebook, bits, tiles, states }
    };
    all.into_par_iter().map(find).collect()
}

/// What any engine has to meet: the same bits as the scalar one, in any company; sequences that close; refusals.
fn engine_contract(engine: &dyn TileSearch, expected: &[Expected]) {
    expected.par_iter().for_each(|Expected { codebook, bits, tiles, states: expected }| {
        let what = |tile| format!("{}, {} at {bits} bits, tile {tile}", engine.name(), codebook.name());
        let mut states = vec![[0xa5a5; TILE_LEN]; tiles.len()];
        engine.search(*codebook, *bits, tiles, &mut states).unwrap();
        for tile in 0..tiles.len() {
            assert_eq!(states[tile], expected[tile], "{}", what(tile));
            assert_closes(&states[tile], *bits, &what(tile));
        }
        if *codebook != Codebook::Mcg {
            return;
        }
        // Any number of tiles, from none to beyond what a kernel takes at once, beginning anywhere.
        for (first, count) in [(0, 0), (0, 1), (1, 2), (11, 3), (8, 5)] {
            let mut states = vec![[0x5a5a; TILE_LEN]; count];
            engine.search(*codebook, *bits, &tiles[first..first + count], &mut states).unwrap();
            assert_eq!(states, expected[first..first + count], "{} and {count} more", what(first));
        }
    });
    let mut tiles = [random_tile(1, 1.0), random_tile(2, 1.0)];
    tiles[1][77] = f32::NAN;
    let mut states = [[0; TILE_LEN]; 2];
    let refusal = engine.search(Codebook::Mcg, 3, &tiles, &mut states).unwrap_err().to_string();
    assert!(refusal.contains("tile 1, position 77"), "{refusal}");
    tiles[1][77] = 0.0;
    assert!(engine.search(Codebook::Mcg, 0, &tiles, &mut states).is_err());
    assert!(engine.search(Codebook::Mcg, 9, &tiles, &mut states).is_err());
    assert!(engine.search(Codebook::Mcg, 3, &tiles, &mut states[..1]).is_err());
}

/// At most half a percent worse than the peer's own tiles for each codebook and bit width, no worse over all.
fn quality_contract(engine: &dyn TileSearch) {
    let (mut ours, mut theirs) = (0.0, 0.0);
    let search = |golden: Golden| {
        let mut states = vec![[0; TILE_LEN]; golden.tiles.len()];
        engine.search(golden.codebook, golden.bits, &golden.tiles, &mut states).unwrap();
        (golden, states)
    };
    for (golden, states) in golden().into_par_iter().map(search).collect::<Vec<_>>() {
        states.iter().for_each(|s| assert_closes(s, golden.bits, engine.name()));
        let found = error(golden.codebook, &golden.tiles, &states);
        let peer = error(golden.codebook, &golden.tiles, &golden.states);
        let name = golden.codebook.name();
        assert!(found <= peer * 1.005, "{}: {name}.k{}: {found} against {peer}", engine.name(), golden.bits);
        ours += found;
        theirs += peer;
    }
    println!("{}: error {} of the peer's over all golden tiles", engine.name(), ours / theirs);
    assert!(ours <= theirs, "{}: {ours} against {theirs}", engine.name());
}

#[test]
fn every_engine_of_this_machine_meets_the_contract() {
    let engines = available_searches();
    let names: Vec<&str> = engines.iter().map(|engine| engine.name()).collect();
    println!("engines that run here: {names:?}");
    assert_eq!(names[0], "scalar");
    assert_eq!(names.last(), Some(&best_search().name()));
    assert_eq!(Platform::detect().search().name(), best_search().name());
    // An engine the machine could run and that was left out would pass by not being looked at.
    #[cfg(target_arch = "x86_64")]
    {
        assert_eq!(names.contains(&"avx2"), is_x86_feature_detected!("avx2"));
        assert_eq!(names.contains(&"avx512-fp16"), is_x86_feature_detected!("avx512fp16"));
    }
    let expected = expected();
    for engine in engines {
        // The reference equals itself; one width shows that company does not matter to it.
        let mine = if engine.name() == "scalar" { &expected[..1] } else { &expected[..] };
        engine_contract(engine, mine);
        quality_contract(engine);
    }
}

#[test]
fn many_threads_search_at_once() {
    let tiles: Vec<Tile> = (0..6).map(|seed| random_tile(seed + 40, 1.24)).collect();
    let find = |bits| {
        let mut states = vec![[0; TILE_LEN]; tiles.len()];
        best_search().search(Codebook::Mcg, bits, &tiles, &mut states).unwrap();
        states
    };
    let alone = [3, 5].map(find);
    std::thread::scope(|scope| {
        // Threads change width between calls, so that a buffer kept from one is met by the other.
        let find = &find;
        let threads: Vec<_> =
            (0..4).map(|i| scope.spawn(move || [find(5 - i % 2 * 2), find(3), find(5)])).collect();
        for (i, thread) in threads.into_iter().enumerate() {
            let [first, three, five] = thread.join().unwrap();
            assert_eq!(first, alone[1 - i % 2]);
            assert_eq!([three, five], alone);
        }
    });
}
