//! The GLM-MoE-DSA forward pass on Candle, a layer at a time.
