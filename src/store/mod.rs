//! Files: hashing, canonical JSON, atomic publication, safetensors, locks.
