//! What a layer's captured rows say: routing mass, row plans, covariances.
