"""What the engine keeps of each sequence: MLA history, KDA state and convolution window, all at one position."""

from __future__ import annotations

import torch
from torch import Tensor

from k3core.model.config import K3Config
from k3kernels.dtypes import wider
from k3kernels.kda import CHUNK, ChunkRows
from k3kernels.mla import KEYS


class SlotState:
    """Histories of up to `num_slots` sequences of up to `max_length` tokens.

    kda_NHKV[layer] the recurrent state at the start of the chunk in which the slot stands, in the next wider type;
    chunk_rows[layer] what it has seen of that chunk; window_NJP[layer] the last J-1 inputs of the convolution (q|k|v),
    cache_NSC[layer] one latent row (kv_lora_rank | rope width) per token. length_N counts the tokens that
    all three have seen: there is one position per slot, so they cannot come apart. All lie on `device`, the model's;
    dtype is that of the model's activations.
    """

    def __init__(
        self,
        cfg: K3Config,
        num_slots: int,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_slots, self.max_length = num_slots, max_length
        P = cfg.kda_num_heads * cfg.kda_head_dim
        self.kda_NHKV: dict[int, Tensor] = {}
        self.chunk_rows: dict[int, ChunkRows] = {}
        self.window_NJP: dict[int, Tensor] = {}
        self.cache_NSC: dict[int, Tensor] = {}
        K, J = cfg.kda_head_dim, cfg.short_conv_kernel_size
        C = cfg.kv_lora_rank + cfg.qk_rope_head_dim
        for layer in range(cfg.num_hidden_layers):
            if cfg.is_kda(layer):
                shape = (num_slots, cfg.kda_num_heads, K, K)
                self.kda_NHKV[layer] = torch.zeros(shape, dtype=wider(dtype), device=device)
                rows = [torch.zeros(num_slots, shape[1], CHUNK, K, dtype=wider(dtype), device=device) for _ in range(4)]
                self.chunk_rows[layer] = ChunkRows(*rows)
                self.window_NJP[layer] = torch.zeros(num_slots, J - 1, 3 * P, dtype=dtype, device=device)
            else:
                rounded_up = -(-max_length // KEYS) * KEYS
                self.cache_NSC[layer] = torch.zeros(num_slots, rounded_up, C, dtype=dtype, device=device)
        self.length_N = torch.zeros(num_slots, dtype=torch.long, device=device)

    def move(self, source: int, target: int) -> None:
        """The history of one slot into another, whose own is lost."""
        for rows in self.chunk_rows.values():
            rows.write(torch.tensor([target]), rows.of(torch.tensor([source])))
        for per_layer in (self.kda_NHKV, self.window_NJP, self.cache_NSC):
            for per_slot in per_layer.values():
                per_slot[target] = per_slot[source]
        self.length_N[target] = self.length_N[source]

    def reset(self, slot: int) -> None:
        """Make a slot an empty history. MLA rows behind the length weigh 0 in a batch, but 0 times NaN is NaN: all go."""
        for per_layer in (self.kda_NHKV, self.window_NJP, self.cache_NSC):
            for per_slot in per_layer.values():
                per_slot[slot] = 0
        self.length_N[slot] = 0
