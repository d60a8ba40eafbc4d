//! What a model is (geometry) and how it is to be walked (recipe, registry).
