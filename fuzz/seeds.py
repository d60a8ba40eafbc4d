#!/usr/bin/env python3
"""Writes small valid inputs into fuzz/corpus/<target>/, for the fuzzer to change.

    python3 fuzz/seeds.py [WORK]

WORK is the work directory of a finished walk, best of a small model: its records become seeds of `ledger`.
"""

import json
import pathlib
import struct
import sys

FUZZ = pathlib.Path(__file__).resolve().parent
REPO = FUZZ.parent
LONGEST = 1 << 16


def put(target, name, data):
    folder = FUZZ / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    if not isinstance(data, bytes):
        data = (data if isinstance(data, str) else json.dumps(data)).encode()
    if len(data) <= LONGEST:
        (folder / name).write_bytes(data)


def safetensors(tensors, metadata=None):
    """tensors: (name, dtype, shape, payload)."""
    header, payloads, at = {}, b"", 0
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, dtype, shape, payload in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(payload)]}
        payloads += payload
        at += len(payload)
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + payloads


def v2_shard(bits, metadata, loose=False):
    p = "model.layers.1.mlp.experts"
    ones = struct.pack("<128H", *[0x3C00] * 128)
    tensors = []
    if not loose:
        tensors += [(f"{p}.r7_shared.{v}", "F16", [128], ones) for v in ("gate_up_suh", "down_svh")]
    for module, own in (("gate_proj", "svh"), ("up_proj", "svh"), ("down_proj", "suh")):
        name = f"{p}.0.{module}."
        tensors.append((name + "trellis", "I16", [8, 8, 16 * bits], b"\x5a" * (8 * 8 * 16 * bits * 2)))
        tensors += [(name + v, "F16", [128], ones) for v in (("suh", "svh") if loose else (own,))]
        tensors.append((name + "mcg", "I32", [], struct.pack("<I", 0xCBAC1FED)))
    return safetensors(tensors, metadata)


def imatrix():
    """An importance matrix of one weight."""
    text = lambda text: struct.pack("<Q", len(text)) + text.encode()
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 1) + text("general.type") + struct.pack("<I", 8) + text("imatrix")
    head += text("a.in_sum2") + struct.pack("<IQIQ", 1, 4, 0, 0)
    head += text("a.counts") + struct.pack("<IQIQ", 1, 1, 0, 32)
    return head + bytes(-len(head) % 32) + struct.pack("<4f", 1, 2, 3, 4) + bytes(16) + struct.pack("<f", 8)


def tokenizers():
    base = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": None, "post_processor": None, "decoder": None}
    special = {"id": 0, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
               "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split = {"type": "Split", "pattern": {"Regex": r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}]+|\s+(?!\S)"},
             "behavior": "Isolated", "invert": False}
    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
           "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
           "vocab": {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3, "H": 4, "e": 5, "l": 6},
           "merges": [["a", "b"]]}
    yield "words", base | {"pre_tokenizer": {"type": "WhitespaceSplit"},
                           "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}}
    yield "bpe", base | {"added_tokens": [special], "pre_tokenizer": byte_level, "decoder": byte_level, "model": bpe}
    yield "split", base | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
                           "normalizer": {"type": "NFC"}, "model": bpe | {"byte_fallback": True}}
    yield "unigram", base | {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "_"},
                             "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": False,
                                       "vocab": [["<unk>", 0.0], ["a", -1.5], ["_", -2.0]]}}
    yield "wordpiece", base | {"normalizer": {"type": "BertNormalizer", "clean_text": True, "strip_accents": None,
                                              "handle_chinese_chars": True, "lowercase": True},
                               "pre_tokenizer": {"type": "BertPreTokenizer"},
                               "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                                         "max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "a": 1, "##b": 2}}}
    yield "cut", base | {"truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 1},
                         "padding": {"strategy": {"Fixed": 4}, "direction": "Right", "pad_to_multiple_of": 2,
                                     "pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
                         "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}


def main():
    small = safetensors([("a", "I16", [2], b"\1\0\2\0"), ("b", "U8", [3], b"\7\x08\x09"), ("c", "BF16", [], b"\x80\x3f")],
                        {"format": "pt"})
    put("safetensors_header", "small", small)
    put("safetensors_header", "empty", safetensors([]))
    put("safetensors_header", "zero", safetensors([("z", "F32", [0, 4], b"")]))

    index = {"metadata": {"total_size": 6}, "weight_map": {"a": "a.safetensors", "b": "model-2.safetensors"}}
    put("index", "two", index)
    put("index", "none", {"weight_map": {}})
    shards = [safetensors([("a", "BF16", [2], b"\x80\x3f\0\0")]), safetensors([("b", "F32", [1], b"\0\0\x80\x3f")])]
    put("checkpoint_dir", "two", b"%%\n".join([json.dumps(index).encode(), *shards]))
    one = {"weight_map": {"a": "a.safetensors"}}
    put("checkpoint_dir", "one", b"%%\n".join([json.dumps(one).encode(), shards[0]]))

    for model in ("tiny", "glm52"):
        put("config", model, (REPO / "models" / model / "config.json").read_bytes())
        put("recipe", model, (REPO / "models" / model / "recipe.json").read_bytes())
        put("canonical_json", model, (REPO / "models" / model / "recipe.json").read_bytes())
    tiny = json.loads((REPO / "models/tiny/config.json").read_bytes())
    old = {k: v for k, v in tiny.items() if k not in ("rope_parameters", "indexer_types", "mlp_layer_types")}
    put("config", "old", old | {"rope_theta": 1e4, "index_topk_pattern": "FFSFS", "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "mscale": 1.0,
        "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}})

    for name, tokenizer in tokenizers():
        put("tokenizer", name, tokenizer)

    entry = {"id": "p1", "axis": "prose", "use": "calibrate"}
    put("plan", "text", {"version": 1, "max_tokens": 20, "prompts": [entry | {"text": "hello world"}]})
    put("plan", "file", {"version": 1, "prefix_tokens": ["<|endoftext|>", 3], "prompts": [
        entry | {"file": "a.txt", "lines": [1, 2]}, entry | {"id": "p2", "use": "evaluate", "file": "a.txt", "bytes": [0, 7]},
        entry | {"id": "p3", "file": "sub/b.txt", "split": "\n%%\n", "max_tokens": 9}]})
    put("plan", "ids", {"version": 1, "prefix_tokens": [], "prompts": [entry | {"token_ids": [5, 2047]}]})

    metadata = {"format": "pt", "r7_schema": "2", "r7_layer": "1", "r7_marker": "CODEX_ROUND7"}
    put("v2_shard", "three", v2_shard(3, metadata))
    put("v2_shard", "one", v2_shard(1, metadata))
    put("v2_shard", "loose", v2_shard(1, {"walk_loose_expert": "1.0"}, loose=True))

    put("packed", "v2", v2_shard(2, metadata))
    put("packed", "own", v2_shard(1, {}, loose=True))
    ones = struct.pack("<128H", *[0x3C00] * 128)
    ranks = []
    for rank in range(2):
        name = f"o_proj.rank{rank}."
        ranks.append((name + "trellis", "I16", [8, 8, 16], b"\x5a" * (8 * 8 * 16 * 2)))
        ranks += [(name + vector, "F16", [128], ones) for vector in ("suh", "svh")]
    ranks.append(("gate.weight", "BF16", [1], b"\x80\x3f"))
    put("packed", "ranks", safetensors(ranks))
    put("gguf", "imatrix", imatrix())

    put("canonical_json", "numbers", "[0,-0.0,1e21,1e-7,9007199254740992,-1.5,1e308,5e-324]")
    put("canonical_json", "strings", '{"\\u20ac":1,"\\ud83d\\ude00":[true,false,null],"":"\\u0000\\n\\u007f"}')

    if len(sys.argv) > 1:
        for at, path in enumerate(sorted(pathlib.Path(sys.argv[1]).rglob("*.json"))):
            put("ledger", f"{at:03}-{path.name}", path.read_bytes())
            if path.name == "JOURNAL.json":
                put("journal", path.name, path.read_bytes())
            if path.name.startswith("r7-experts") or path.name.endswith("INVENTORY.json"):
                put("manifest", path.name, path.read_bytes())


main()
