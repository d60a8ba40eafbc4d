//! Any bytes as a tokenizer.json, and texts through what reads: errors, but no way out of the process.
#![no_main]

use std::path::Path;
use std::sync::Once;

use libfuzzer_sys::fuzz_target;
use walk::corpus::TextEncoder;

/// The tokenizers library may panic on a file it does not expect, which the encoder turns into a refusal. libFuzzer's own
/// hook would end the process at the panic itself.
static QUIET: Once = Once::new();

fuzz_target!(|bytes: &[u8]| {
    QUIET.call_once(|| std::panic::set_hook(Box::new(|_| {})));
    let result = std::panic::catch_unwind(|| match TextEncoder::parse(Path::new("tokenizer.json"), bytes) {
        Ok(encoder) => {
            for text in ["", "a", "Hello, wörld!\n  42 <|endoftext|>\0", "\u{1f600}\u{200d}\u{fe0f} \u{301}"]
            {
                if let Err(error) = encoder.encode(text) {
                    assert!(error.to_string().starts_with("tokenizer.json"));
                }
            }
            let _ = encoder.token_id("<|endoftext|>");
        }
        Err(error) => assert!(error.to_string().starts_with("tokenizer.json")),
    });
    if result.is_err() {
        std::process::abort();
    }
});
