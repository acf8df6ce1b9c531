"""Text <-> token ids: one interface over the two forms in which checkpoints bring their vocabulary."""

from __future__ import annotations

from k3core.tokenizer.byte_pairs import CONTROL_TOKENS as CONTROL_TOKENS
from k3core.tokenizer.tokenizer import Tokenizer as Tokenizer
