"""Small models in both forms, with every weight random: at their initial values many parameters change nothing.

And small tokenizers in the form in which checkpoints bring theirs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, trainers

from k3core.model.config import K3Config
from k3core.model.model import K3Model
from k3core.tokenizer.byte_pairs import BYTE_OF_SYMBOL
from k3core.tokenizer.ranks import PATTERN

RandomModel = Callable[[K3Config], K3Model]

WRITERS = ("o_proj.weight", "down_proj.weight", "experts.w2", "routed_expert_up_proj.weight")


@pytest.fixture
def k3() -> K3Config:
    """Five layers in blocks of two, the last block short; no two widths agree."""
    return K3Config(
        vocab_size=61,
        hidden_size=20,
        num_hidden_layers=5,
        num_attention_heads=2,
        full_attn_layers=(3, 5),
        q_lora_rank=14,
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        kda_num_heads=3,
        kda_head_dim=8,
        intermediate_size=28,
        num_experts=6,
        num_experts_per_token=2,
        num_shared_experts=2,
        moe_intermediate_size=9,
        routed_expert_hidden_size=12,
    )


@pytest.fixture
def kimi_linear(k3: K3Config) -> K3Config:
    return replace(
        k3,
        q_lora_rank=None,
        mla_use_output_gate=False,
        use_full_rank_gate=False,
        gate_lower_bound=None,
        num_shared_experts=1,
        routed_expert_hidden_size=None,
        routed_scaling_factor=2.446,
        hidden_act="silu",
        attn_res_block_size=None,
    )


@pytest.fixture(params=["k3", "kimi_linear"])
def cfg(request: pytest.FixtureRequest) -> K3Config:
    """Each form of the model in turn."""
    cfg: K3Config = request.getfixturevalue(request.param)
    return cfg


@pytest.fixture
def random_model() -> RandomModel:
    """Well scaled, as a trained model is: sublayers add little and reads are soft, so rounding is hardly amplified."""

    @torch.no_grad()
    def make(cfg: K3Config) -> K3Model:
        model, generator = K3Model(cfg), torch.Generator().manual_seed(0)
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("norm.weight"):
                p.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith("dt_bias"):
                p.normal_(-4.0, 1.0, generator=generator)
            elif p.ndim == 1:  # A_log, e_score_correction_bias
                p.normal_(0.0, 0.2, generator=generator)
            elif name.endswith("res_proj.weight"):
                p.normal_(0.0, 0.1, generator=generator)
            elif name.endswith(WRITERS):
                p.normal_(0.0, 0.3 * p.shape[-1] ** -0.5, generator=generator)
            else:
                p.normal_(0.0, 1.0 if "embed" in name else p.shape[-1] ** -0.5, generator=generator)
        return model

    return make


K3_SLOTS = {
    0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>", 6: "[start_header_id]",
    7: "[end_header_id]", 9: "[EOT]", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>",
    21: "<|media_pad|>", 65: "<osagent_mode>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
KIMI_LINEAR_SLOTS = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 6: "<|start_header_id|>",
    7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>", 11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>", 14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>", 17: "<|im_middle|>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
SLOTS = {
    "k3": K3_SLOTS,
    "kimi_linear": KIMI_LINEAR_SLOTS,
    "kimi_thinking": KIMI_LINEAR_SLOTS | {22: "<think>", 23: "</think>"},
}
SPEECH = [
    f"The tenant pays {rent} EUR a month; notice is {days} days, don't be late.\n\nHeIsJSON {{'a': [1, 2]}} 租户必须付款"
    for rent, days in zip(range(700, 760), range(10, 70), strict=True)
]


class WriteKimiFolder(Protocol):
    """Writes a small tiktoken.model, its merges learnt from `texts`, and a tokenizer_config.json of a model family."""

    def __call__(self, folder: Path, family: str, texts: Sequence[str] = SPEECH, num_ranks: int = 400) -> Path: ...


@pytest.fixture(scope="session")
def write_kimi_folder() -> WriteKimiFolder:
    def write(folder: Path, family: str, texts: Sequence[str] = SPEECH, num_ranks: int = 400) -> Path:
        library = tokenizers.Tokenizer(models.BPE())
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        library.train_from_iterator(
            texts, trainers.BpeTrainer(vocab_size=num_ranks, initial_alphabet=alphabet, show_progress=False)
        )
        symbols = sorted(library.get_vocab().items(), key=lambda item: item[1])
        assert len(symbols) == num_ranks, f"the texts give only {len(symbols)} ranks"
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{base64.b64encode(bytes(BYTE_OF_SYMBOL[c] for c in word)).decode()} {n}" for word, n in symbols]
        (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
        # As in the releases, not all of them are marked special.
        entries = {
            str(num_ranks + n): {"content": name, "special": name.startswith("[")} for n, name in SLOTS[family].items()
        }
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}))
        return folder

    return write
