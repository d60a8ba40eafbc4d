//! Everything that needs golden data, the tiny model, or the built binary: a module an area.

mod audits;
mod batching;
mod carrier;
mod codec_linear;
mod codec_search;
mod cold;
mod dequantize;
mod estimate;
mod eval;
mod forward;
mod hostile;
mod inputs;
mod inspect;
mod inventory;
mod kaiju;
mod kaiju_walk;
mod publish;
mod replay;
mod search;
mod seeds;
mod study;
mod support;
mod synthetic;
mod tiny_walk;
mod trust;
mod walk;
