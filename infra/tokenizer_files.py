"""A run's tokenizer as the files that a checkpoint's folder brings it in."""

from __future__ import annotations

import json
from typing import Any

from k3core.chat import chat_format
from k3core.tokenizer import Tokenizer
from k3core.tokenizer.ranks import Ranks
from k3core.tokenizer.tiktoken_file import RANKS_FILE, SLOTS_FILE
from k3core.tokenizer.tokenizer import MERGES_FILE

BOS, PAD, UNKNOWN = "[BOS]", "[PAD]", "[UNK]"


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """By name: what `Tokenizer.from_folder` reads back to the same tokenizer. Merges also load in transformers; ranks
    need the Python code beside them that their checkpoint ships."""
    named = {role: token_name(tokenizer, token_id) for role, token_id in token_ids(tokenizer).items()}
    settings: dict[str, Any] = {f"{role}_token": name for role, name in named.items()}
    if UNKNOWN in tokenizer.control:
        settings["unk_token"] = UNKNOWN
    settings |= {"clean_up_tokenization_spaces": False, "model_max_length": 1 << 20}
    data = tokenizer.to_bytes()
    if not Ranks.recognise(data):
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        return {MERGES_FILE: data, SLOTS_FILE: _pretty(settings)}
    document = json.loads(data)
    lines = (f"{token} {rank}\n" for rank, token in enumerate(document["tokens"].split(" ")))
    settings["tokenizer_class"] = "TikTokenTokenizer"
    settings["added_tokens_decoder"] = {
        token_id: {"content": name, "special": True} for token_id, name in document["slots"].items()
    }
    return {RANKS_FILE: "".join(lines).encode(), SLOTS_FILE: _pretty(settings)}


def token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """bos, eos and pad of a config.json; eos is what ends a turn. Without those that the tokenizer lacks."""
    ids = {"eos": chat_format(tokenizer).stop_token}
    return ids | {
        role: tokenizer.control[name] for role, name in (("bos", BOS), ("pad", PAD)) if name in tokenizer.control
    }


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    return next(name for name, known in tokenizer.control.items() if known == token_id)


def _pretty(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
