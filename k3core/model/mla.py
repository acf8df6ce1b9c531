"""Gated multi-head latent attention without positions (K3) or ungated with a plain q_proj (Kimi-Linear)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3core.model.config import K3Config
from k3core.model.layers import Linear, RMSNorm
from k3core.model.state import SlotState
from k3kernels.mla import mla_absorbed, mla_attention, mla_attention_from_start
from k3kernels.packing import Packing


class MultiHeadLatentAttention(nn.Module):
    def __init__(self, cfg: K3Config, layer: int) -> None:
        super().__init__()
        D, H = cfg.hidden_size, cfg.num_attention_heads
        self.cfg, self.layer = cfg, layer
        self.qk_head_dim = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim
        if cfg.q_lora_rank is None:
            self.q_proj = Linear(D, H * self.qk_head_dim)
        else:
            self.q_a_proj = Linear(D, cfg.q_lora_rank)
            self.q_a_layernorm = RMSNorm(cfg.q_lora_rank, cfg.latent_norm_eps)
            self.q_b_proj = Linear(cfg.q_lora_rank, H * self.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(D, cfg.kv_lora_rank + cfg.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(cfg.kv_lora_rank, cfg.latent_norm_eps)
        self.kv_b_proj = Linear(cfg.kv_lora_rank, H * (cfg.qk_nope_head_dim + cfg.v_head_dim))
        if cfg.mla_use_output_gate:
            self.g_proj = Linear(D, H * cfg.v_head_dim)
        self.o_proj = Linear(H * cfg.v_head_dim, D)

    def forward(self, x_TD: Tensor, packing: Packing, state: SlotState | None, slots_N: Tensor | None) -> Tensor:
        """x_TD normed. With a state, queries also see the slot's history, and the new latent rows are appended to it."""
        q_THX = self._queries(x_TD).unflatten(-1, (self.cfg.num_attention_heads, self.qk_head_dim))
        latent_TC = self._latent(x_TD)
        if state is not None:
            assert slots_N is not None
            o_THV = self._attend_histories(q_THX, latent_TC, packing, state, slots_N)
        else:
            length = packing.max_length
            k_NHSX, v_NHSV = self._keys_and_values(packing.pad(latent_TC, length))
            q_NHQX = packing.pad(q_THX, length).transpose(1, 2)
            o_NHQV = mla_attention_from_start(q_NHQX, k_NHSX, v_NHSV, self.qk_head_dim**-0.5)
            o_THV = packing.unpad(o_NHQV.transpose(1, 2))
        return self._output(o_THV.flatten(1), x_TD)

    def _attend_histories(
        self, q_THX: Tensor, latent_TC: Tensor, packing: Packing, state: SlotState, slots_N: Tensor
    ) -> Tensor:
        """Sequence by sequence: what one sums over has its own length, so its rounding does not depend on neighbours."""
        outputs = []
        places = zip(slots_N.tolist(), state.length_N[slots_N].tolist(), strict=True)
        pieces = zip(q_THX.split(packing.lengths), latent_TC.split(packing.lengths), strict=True)
        for (slot, start), (q_QHX, latent_QC) in zip(places, pieces, strict=True):
            end = start + len(q_QHX)
            assert end <= state.max_length, (slot, end)
            cache_SC = state.cache_NSC[self.layer][slot]
            cache_SC[start:end] = latent_QC
            k_NHSX, v_NHSV = self._keys_and_values(cache_SC[None, :end])
            pos_NQ = torch.arange(start, end, device=q_THX.device).unsqueeze(0)
            o_NHQV = mla_attention(q_QHX.transpose(0, 1)[None], k_NHSX, v_NHSV, pos_NQ, self.qk_head_dim**-0.5)
            outputs.append(o_NHQV[0].transpose(0, 1))
        return torch.cat(outputs)

    def decode(self, x_ND: Tensor, state: SlotState, is_active_N: Tensor) -> Tensor:
        """One token for the first N slots; slots that are not active keep their rows."""
        cfg, H, N = self.cfg, self.cfg.num_attention_heads, x_ND.shape[0]
        pos_N = state.length_N[:N]
        assert int((pos_N * is_active_N).max()) < state.max_length
        cache_NSC = state.cache_NSC[self.layer]
        active = is_active_N.nonzero().squeeze(-1)
        cache_NSC[active, pos_N[active]] = self._latent(x_ND)[active]
        # Rounded up, so that a sum's whole vectors do not move with the longest neighbour.
        longest = min(-(-(int((pos_N * is_active_N).max()) + 1) // 32) * 32, state.max_length)
        q_NHX = self._queries(x_ND).unflatten(-1, (H, self.qk_head_dim))
        kv_b = self.kv_b_proj.effective_weight().unflatten(0, (H, -1))
        o_NHV = mla_absorbed(
            q_NHX[..., : cfg.qk_nope_head_dim],
            q_NHX[..., cfg.qk_nope_head_dim :],
            cache_NSC[:N, :longest],
            kv_b[:, : cfg.qk_nope_head_dim],
            kv_b[:, cfg.qk_nope_head_dim :],
            pos_N,
            self.qk_head_dim**-0.5,
        )
        return self._output(o_NHV.flatten(1), x_ND)

    @torch.no_grad()
    def init_as_copying(self) -> None:
        """Queries start from the keys' projections, so equal inputs attend to each other (where the ranks agree)."""
        cfg = self.cfg
        if cfg.q_lora_rank == cfg.kv_lora_rank:
            self.q_a_proj.weight.copy_(self.kv_a_proj_with_mqa.weight[: cfg.kv_lora_rank])
            q_b = self.q_b_proj.weight.unflatten(0, (cfg.num_attention_heads, -1))
            kv_b = self.kv_b_proj.weight.unflatten(0, (cfg.num_attention_heads, -1))
            q_b[:, : cfg.qk_nope_head_dim] = kv_b[:, : cfg.qk_nope_head_dim]

    def _keys_and_values(self, latent_NSC: Tensor) -> tuple[Tensor, Tensor]:
        cfg, H = self.cfg, self.cfg.num_attention_heads
        kv_NSHX = self.kv_b_proj(latent_NSC[..., : cfg.kv_lora_rank]).unflatten(-1, (H, -1))
        k_nope, v_NSHV = kv_NSHX.split([cfg.qk_nope_head_dim, cfg.v_head_dim], -1)
        k_pe = latent_NSC[..., cfg.kv_lora_rank :].unsqueeze(2).expand(-1, -1, H, -1)
        return torch.cat([k_nope, k_pe], -1).transpose(1, 2), v_NSHV.transpose(1, 2)

    def _queries(self, x_TD: Tensor) -> Tensor:
        if self.cfg.q_lora_rank is None:
            return self.q_proj(x_TD)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)))

    def _latent(self, x_TD: Tensor) -> Tensor:
        ckv = self.kv_a_proj_with_mqa(x_TD)
        c = self.kv_a_layernorm(ckv[..., : self.cfg.kv_lora_rank])
        return torch.cat([c, ckv[..., self.cfg.kv_lora_rank :]], -1)

    def _output(self, o_TP: Tensor, x_TD: Tensor) -> Tensor:
        if self.cfg.mla_use_output_gate:
            o_TP = o_TP * torch.sigmoid(self.g_proj(x_TD))
        return self.o_proj(o_TP)
