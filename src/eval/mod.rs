//! Perplexity, divergence and the final report.
