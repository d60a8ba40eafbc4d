//! The engines a machine can run.

use super::PointSearch;
use super::pruned::Pruned;
use super::scalar::Scalar;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use crate::codec::kaiju::search::lanes::{Avx2, Avx512};
    use crate::codec::kaiju::search::pruned::search;
    use crate::codec::kaiju::search::{Block, Coset, PointSearch, Region};

    macro_rules! engine {
        ($engine:ident, $lanes:ident, $name:tt, $features:tt) => {
            #[doc = concat!("The pruned search on ", $name, ".")]
            pub struct $engine(());

            impl $engine {
                /// The engine, where the machine has its instructions.
                pub fn get() -> Option<&'static Self> {
                    static ENGINE: $engine = $engine(());
                    (is_x86_feature_detected!($name)).then_some(&ENGINE)
                }

                #[target_feature(enable = $features)]
                fn run(region: Region, target: &Block, weight: &Block, bound: f32) -> Option<Coset> {
                    search::<$lanes>(region, target, weight, bound)
                }
            }

            impl PointSearch for $engine {
                fn name(&self) -> &'static str {
                    $name
                }

                fn coset(&self, region: Region, target: &Block, weight: &Block, bound: f32) -> Option<Coset> {
                    // SAFETY: an engine is only made where the machine has its instructions.
                    unsafe { Self::run(region, target, weight, bound) }
                }
            }
        };
    }

    engine!(Avx2Search, Avx2, "avx2", "avx2");
    engine!(Avx512Search, Avx512, "avx512f", "avx512f");
}

/// Every engine this machine can run, slowest first.
pub fn available_searches() -> Vec<&'static dyn PointSearch> {
    #[allow(unused_mut)]
    let mut engines: Vec<&'static dyn PointSearch> = vec![&Scalar, &Pruned];
    #[cfg(target_arch = "x86_64")]
    {
        engines.extend(x86::Avx2Search::get().map(|engine| engine as &dyn PointSearch));
        engines.extend(x86::Avx512Search::get().map(|engine| engine as &dyn PointSearch));
    }
    engines
}

/// The fastest of them.
pub fn best_search() -> &'static dyn PointSearch {
    available_searches().pop().expect("the scalar engine runs anywhere")
}
