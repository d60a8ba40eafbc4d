//! Decisions made by measurement: vectors, probes, bit allocation.
