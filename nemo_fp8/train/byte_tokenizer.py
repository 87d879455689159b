"""Write the byte tokenizer of the stories corpus as Hugging Face files, for engines that take text.

Token ``i`` is the byte ``i``: a byte-level BPE with 256 tokens and no merges. Its special tokens are the control
characters U+0000 to U+0002, to which ``ByteTokenizer`` gives the same meaning. Both encode every text alike, and both
leave special tokens out when they decode.
"""

from __future__ import annotations

import json
from typing import Any

SIZE = 256
PAD, BOS, EOS = 0, 1, 2
TARGETS = ("nemo_fp8.experiments.stories.ByteTokenizer", "nemo_fp8.train.data.ByteTokenizer")
"""What NeMo's checkpoints call it: the name of today, and that of version 0.1."""


def files() -> dict[str, bytes]:
    """Return the tokenizer's files, name -> content, to be written beside a model."""
    special = {"pad_token": chr(PAD), "bos_token": chr(BOS), "eos_token": chr(EOS)}
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "model_max_length": 10**9,
        **special,
    }
    return {
        "tokenizer.json": _text(_tokenizer()),
        "tokenizer_config.json": _text(about),
        "special_tokens_map.json": _text(special),
    }


def _tokenizer() -> dict[str, Any]:
    control = (PAD, BOS, EOS)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    letters = _letters()
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": chr(i), **flags} for i in control],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {chr(i) if i in control else letters[i]: i for i in range(SIZE)},
            "merges": [],
        },
    }


def _letters() -> list[str]:
    """Return the letter with which byte-level tokenizers write each byte: itself if printable, else U+0100 and up."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(0x100, 0x100 + SIZE))
    return [chr(i if i in seen else next(hidden)) for i in range(SIZE)]


def _text(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"
