"""Gated multi-head latent attention without positions (K3) or ungated with a plain q_proj (Kimi-Linear)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3core.model.config import K3Config
from k3core.model.layers import Linear, RMSNorm
from k3core.model.state import Emit, SlotState
from k3kernels.kda.aligned import Places
from k3kernels.mla import KEYS, absorb_queries, attend_latent, mla_attention_from_start, unabsorb
from k3kernels.packing import Packing
from k3kernels.two_forms import forward_and_gradient

if TYPE_CHECKING:
    from k3core.model.packed import PackedWork

QUERY_BLOCK = 64  # queries whose scores exist at a time; a multiple of KEYS


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

    def forward(
        self,
        x_TD: Tensor,
        packing: Packing,
        state: SlotState | None,
        slots_N: Tensor | None,
        emits: Sequence[Emit] = (),  # noqa: ARG002 the layers share one signature
    ) -> Tensor:
        """x_TD normed, its rows those of the packing and perhaps more, which get zeros.

        With a state, queries also see the slot's history, and the new latent rows are appended to it; they stay as they
        are, so there is nothing to emit.
        """
        q_THX = self._queries(x_TD).unflatten(-1, (self.cfg.num_attention_heads, self.qk_head_dim))
        latent_TC = self._latent(x_TD)
        if state is None and x_TD.device.type == "cpu":
            o_THV = forward_and_gradient(
                partial(self._from_start, packing=packing),
                lambda q, latent, kv_b: self._expanded(q, latent, lambda c: F.linear(c, kv_b.to(c.dtype)), packing),
                *(q_THX, latent_TC, self.kv_b_proj.effective_weight()),
            )
        elif state is None:  # on a GPU torch's fused attention, which keeps no scores
            o_THV = self._expanded(q_THX, latent_TC, self.kv_b_proj, packing)
        else:
            assert slots_N is not None
            attend = partial(self._attend_slots, latent_TC=latent_TC, packing=packing, state=state, slots_N=slots_N)
            o_THV = self._absorbed(q_THX, self.kv_b_proj.effective_weight(), attend)
        return self._output(o_THV.flatten(1), x_TD)

    def _absorbed(self, q_THX: Tensor, kv_b: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        nope = self.cfg.qk_nope_head_dim
        kv_b_HYR = kv_b.unflatten(0, (self.cfg.num_attention_heads, -1))
        read_THR = attend(absorb_queries(q_THX, kv_b_HYR[:, :nope], nope))
        return unabsorb(read_THR, kv_b_HYR[:, nope:], q_THX.dtype)

    def _from_start(self, q_THX: Tensor, latent_TC: Tensor, kv_b: Tensor, packing: Packing) -> Tensor:
        return self._absorbed(q_THX, kv_b, partial(self._attend_packed, latent_TC=latent_TC, packing=packing))

    def _attend_packed(self, q_THC: Tensor, latent_TC: Tensor, packing: Packing) -> Tensor:
        """Whole sequences, a block of queries at a time over the keys up to its end."""
        T, length = packing.num_tokens, -(-packing.max_length // KEYS) * KEYS
        latent_NSC, q_NQHC = packing.pad(latent_TC[:T], length), packing.pad(q_THC[:T], length)
        pos_NQ = torch.arange(length, device=q_THC.device).expand(packing.num_sequences, -1)
        blocks = []
        for start in range(0, length, QUERY_BLOCK):
            block = slice(start, min(start + QUERY_BLOCK, length))
            blocks.append(self._attend(q_NQHC[:, block], latent_NSC[:, : block.stop], pos_NQ[:, block]))
        return F.pad(packing.unpad(torch.cat(blocks, 1)), (0, 0, 0, 0, 0, len(q_THC) - T))

    def _attend_slots(
        self, q_THC: Tensor, latent_TC: Tensor, packing: Packing, state: SlotState, slots_N: Tensor
    ) -> Tensor:
        """Sequence by sequence, each over its slot's history and its own new rows."""
        read_THR = q_THC.new_zeros(*q_THC.shape[:2], self.cfg.kv_lora_rank)
        T = packing.num_tokens
        slots_T, positions_T = slots_N[packing.seq_T], state.length_N[slots_N][packing.seq_T] + packing.pos_T
        state.write_latent(self.layer, slots_T, positions_T, latent_TC[:T])
        places = zip(slots_N.tolist(), state.length_N[slots_N].tolist(), packing.lengths, strict=True)
        first = 0
        for slot, start, num_new in places:
            end = start + num_new
            assert end <= state.max_length, (slot, end)
            rows_SC = state.latent_rows(self.layer, slot, end)
            for a in range(start, end, QUERY_BLOCK):
                b = min(a + QUERY_BLOCK, end)
                tokens = slice(first + a - start, first + b - start)
                pos_NQ = torch.arange(a, b, device=q_THC.device).unsqueeze(0)
                keys = rows_SC[None, : -(-b // KEYS) * KEYS]
                read_THR[tokens] = self._attend(q_THC[None, tokens], keys, pos_NQ)[0]
            first += num_new
        return read_THR

    def _attend(self, q_NQHC: Tensor, latent_NSC: Tensor, pos_NQ: Tensor) -> Tensor:
        return attend_latent(q_NQHC, latent_NSC, pos_NQ, self.cfg.kv_lora_rank, self.qk_head_dim**-0.5)

    def _expanded(self, q_THX: Tensor, latent_TC: Tensor, kv_b: Callable[[Tensor], Tensor], packing: Packing) -> Tensor:
        """The same attention over each head's own keys and values, by torch's fused kernel: it gives the gradient."""
        T, length, H = packing.num_tokens, packing.max_length, self.cfg.num_attention_heads
        latent_NSC = packing.pad(latent_TC[:T], length)
        kv_NSP = kv_b(latent_NSC[..., : self.cfg.kv_lora_rank])
        k_nope, v_NSHV = kv_NSP.unflatten(-1, (H, -1)).split([self.cfg.qk_nope_head_dim, self.cfg.v_head_dim], -1)
        k_pe = latent_NSC[..., self.cfg.kv_lora_rank :].unsqueeze(2).expand(-1, -1, H, -1)
        k_NHSX = torch.cat([k_nope, k_pe], -1).transpose(1, 2)
        q_NHQX = packing.pad(q_THX[:T], length).transpose(1, 2)
        o_NHQV = mla_attention_from_start(q_NHQX, k_NHSX, v_NSHV.transpose(1, 2), self.qk_head_dim**-0.5)
        return F.pad(packing.unpad(o_NHQV.transpose(1, 2)), (0, 0, 0, 0, 0, len(q_THX) - T))

    def decode(self, x_ND: Tensor, state: SlotState, places: Places) -> Tensor:
        """One token for the first N slots; slots that are not active keep their rows."""
        H, N = self.cfg.num_attention_heads, x_ND.shape[0]
        active = places.active
        pos_A = state.length_N[active]
        last = int(pos_A.max())
        assert last < state.max_length
        state.write_latent(self.layer, active, pos_A, self._latent(x_ND)[active])
        rows_ASC = state.latent_rows(self.layer, active, last + 1)
        q_NHX = self._queries(x_ND).unflatten(-1, (H, self.qk_head_dim))

        def attend(q_NHC: Tensor) -> Tensor:
            if len(active) == N:
                return self._attend(q_NHC.unsqueeze(1), rows_ASC, pos_A.unsqueeze(1)).squeeze(1)
            read_NHR = q_NHC.new_zeros(N, H, self.cfg.kv_lora_rank)
            read_NHR[active] = self._attend(q_NHC[active].unsqueeze(1), rows_ASC, pos_A.unsqueeze(1)).squeeze(1)
            return read_NHR

        return self._output(self._absorbed(q_NHX, self.kv_b_proj.effective_weight(), attend).flatten(1), x_ND)

    def packed(self, x_TD: Tensor, work: PackedWork, packing: Packing | None, state: SlotState | None) -> Tensor:
        """On a GPU, for a trainer (which gives its packing, for the gradient's form), a prefill and a decode alike."""
        q_THX = self._queries(x_TD).unflatten(-1, (self.cfg.num_attention_heads, self.qk_head_dim))
        forms = (partial(self._kernels, work, state), partial(self._expanded_packed, packing))
        o_THV = forward_and_gradient(*forms, q_THX, self._latent(x_TD), self.kv_b_proj.effective_weight())
        return self._output(o_THV.flatten(1), x_TD)

    def _kernels(
        self, work: PackedWork, state: SlotState | None, q_THX: Tensor, latent_TC: Tensor, kv_b: Tensor
    ) -> Tensor:
        """An adapter's weight is wider than its inputs; then the products with it are too."""
        from k3kernels.linear.triton import per_head
        from k3kernels.mla.triton import mla_paged

        H, R, nope = self.cfg.num_attention_heads, self.cfg.kv_lora_rank, self.cfg.qk_nope_head_dim
        pages_PSC = latent_TC.unsqueeze(1)
        if state is not None:
            pages_PSC = state.pages_PSC[self.layer]
            pages_PSC[work.page_T, work.offset_T] = latent_TC
        kv_b_HYR, dtype = kv_b.unflatten(0, (H, -1)), q_THX.dtype
        q_THR = per_head(q_THX[..., :nope].to(kv_b.dtype), kv_b_HYR[:, :nope].mT)
        q_THC = torch.cat([q_THR.to(dtype), q_THX[..., nope:]], -1)
        where = (work.table, work.sequence_T, work.position_T)
        read_THR = mla_paged(q_THC, pages_PSC, *where, R, self.qk_head_dim**-0.5, work.max_context)
        return per_head(read_THR.to(kv_b.dtype), kv_b_HYR[:, nope:]).to(dtype)

    def _expanded_packed(self, packing: Packing | None, q_THX: Tensor, latent_TC: Tensor, kv_b: Tensor) -> Tensor:
        assert packing is not None
        return self._expanded(q_THX, latent_TC, lambda c: F.linear(c, kv_b.to(c.dtype)), packing)

    @torch.no_grad()
    def init_as_copying(self) -> None:
        """Queries start from the keys' projections, so equal inputs attend to each other (where the ranks agree)."""
        cfg = self.cfg
        if cfg.q_lora_rank == cfg.kv_lora_rank:
            self.q_a_proj.weight.copy_(self.kv_a_proj_with_mqa.weight[: cfg.kv_lora_rank])
            q_b = self.q_b_proj.weight.unflatten(0, (cfg.num_attention_heads, -1))
            kv_b = self.kv_b_proj.weight.unflatten(0, (cfg.num_attention_heads, -1))
            q_b[:, : cfg.qk_nope_head_dim] = kv_b[:, : cfg.qk_nope_head_dim]

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
