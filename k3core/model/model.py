"""The decoder: embeddings, layers joined by Attention Residuals (or plain residuals), final mix, norm, head."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3core.model.config import MXFP4_GROUP, K3Config
from k3core.model.kda import KimiDeltaAttention
from k3core.model.layers import MLP, Linear, RMSNorm, product
from k3core.model.mla import MultiHeadLatentAttention
from k3core.model.moe import LatentMoE
from k3core.model.precision import FP32_KEPT as FP32_KEPT
from k3core.model.precision import cast_model
from k3core.model.recompute import Run, run_and_recompute, run_once
from k3core.model.state import Emit, SlotState
from k3kernels.attn_res import attn_res, attn_res_mix
from k3kernels.dispatch import uses_invariant_product, uses_kernel
from k3kernels.dtypes import wider
from k3kernels.linear import linear
from k3kernels.linear_logprob import MAX_LOGITS, MAX_WEIGHT, linear_logprob, wide_logits
from k3kernels.linear_logprob.reference import linear_logprob as linear_logprob_whole
from k3kernels.packing import Packing

if TYPE_CHECKING:
    from k3core.model.packed import PackedWork

EMBEDDING_STD = 0.3  # of a model from scratch
FP4_CODES_RMS = 2.926  # of uniformly drawn E2M1 codes: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, of either sign
E8M0_BIAS = 127  # a scale byte b stands for 2^(b - 127)

# Tokens are computed in whole multiples of this: BLAS (16 rows) and vector loops (32 floats) round remainders differently.
ROWS = 32

Attention = KimiDeltaAttention | MultiHeadLatentAttention
Attend = Callable[[Attention, Tensor], Tensor]


@dataclass(frozen=True)
class Forward:
    """hidden_TD after the final norm; routed_experts_TLk the chosen experts of each MoE layer."""

    hidden_TD: Tensor
    routed_experts_TLk: Tensor


class ResidualProj(nn.Module):
    """The query of one Attention Residual read, under the checkpoint's shape [1, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))


class DecoderLayer(nn.Module):
    def __init__(self, cfg: K3Config, layer: int) -> None:
        super().__init__()
        D = cfg.hidden_size
        self.self_attn: Attention
        self.self_attn = KimiDeltaAttention(cfg, layer) if cfg.is_kda(layer) else MultiHeadLatentAttention(cfg, layer)
        if cfg.is_moe(layer):
            self.block_sparse_moe = LatentMoE(cfg)
        else:
            self.mlp = MLP(cfg, cfg.intermediate_size)
        self.input_layernorm = RMSNorm(D, cfg.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(D, cfg.rms_norm_eps)
        if cfg.attn_res_block_size is not None:
            self.self_attention_res_norm = RMSNorm(D, cfg.rms_norm_eps)
            self.self_attention_res_proj = ResidualProj(D)
            self.mlp_res_norm = RMSNorm(D, cfg.rms_norm_eps)
            self.mlp_res_proj = ResidualProj(D)


class K3Model(nn.Module):
    """Kimi K3's text model, or Kimi-Linear's where the config says so. Module names are the checkpoint's."""

    def __init__(self, cfg: K3Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(cfg, i) for i in range(cfg.num_hidden_layers))
        if cfg.attn_res_block_size is not None:
            self.output_attn_res_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
            self.output_attn_res_proj = ResidualProj(cfg.hidden_size)
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.lm_head = Linear(cfg.hidden_size, cfg.vocab_size)

    def forward(
        self,
        tokens_T: Tensor,
        packing: Packing,
        replay_TLk: Tensor | None = None,
        state: SlotState | None = None,
        slots_N: Tensor | None = None,
        activation_checkpointing: bool = False,
        emits: Sequence[Emit] = (),
    ) -> Forward:
        """Packed sequences, from nothing (training) or each going on from its slot (prefill, which moves the slot).

        replay_TLk imposes recorded experts; -1 rows choose for themselves.
        emits: what a prefill keeps as checkpoints of the state on its way.
        activation_checkpointing: each layer keeps its input and its experts, and is computed again in the backward pass.
        """
        assert state is None or not activation_checkpointing, "computed again, a layer would move the slots again"
        if state is None and uses_invariant_product(self.norm.weight):
            from k3core.model.packed import whole_sequences

            work = whole_sequences(packing)
            return self.packed(tokens_T, work, packing, None, replay_TLk, activation_checkpointing)
        num_missing = -len(tokens_T) % ROWS if tokens_T.device.type == "cpu" else 0
        x_TD = self.embed_tokens(F.pad(tokens_T, (0, num_missing)))
        run = run_and_recompute if activation_checkpointing and torch.is_grad_enabled() else run_once
        if replay_TLk is not None:
            replay_TLk = F.pad(replay_TLk, (0, 0, 0, 0, 0, len(x_TD) - len(tokens_T)), value=-1)
        forward = self._layers(x_TD, replay_TLk, lambda attn, x: attn(x, packing, state, slots_N, emits), run)
        if state is not None:
            assert slots_N is not None
            state.length_N[slots_N] += packing.lengths_N
        T = packing.num_tokens
        return Forward(forward.hidden_TD[:T], forward.routed_experts_TLk[:T])

    def packed(
        self,
        tokens_T: Tensor,
        work: PackedWork,
        packing: Packing | None = None,
        state: SlotState | None = None,
        replay_TLk: Tensor | None = None,
        activation_checkpointing: bool = False,
    ) -> Forward:
        """Any call on a GPU, in kernels in which a token's bits are its own sequence's; a CUDA graph can hold it.

        packing: a trainer's, for its gradient. The state's length_N is not moved: work has the positions.
        """
        run = run_and_recompute if activation_checkpointing and torch.is_grad_enabled() else run_once
        x_TD = self.embed_tokens(tokens_T)
        return self._layers(x_TD, replay_TLk, lambda attn, x: attn.packed(x, work, packing, state), run)

    def decode(self, tokens_N: Tensor, state: SlotState, is_active_N: Tensor) -> Forward:
        """One token for each of the first N slots; slots that are not active stay as they are."""
        x_ND = self.embed_tokens(tokens_N)
        places = state.places(is_active_N)
        forward = self._layers(x_ND, None, lambda attn, x: attn.decode(x, state, places), run_once)
        state.length_N[: tokens_N.shape[0]] += is_active_N
        return forward

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """The head in the next wider type (bf16 in fp32, fp32 in fp64).

        Logits are the largest numbers of the model: one ulp of a logit of 16 in fp32 is 2e-6 nat, which would be most
        of the difference between trainer and engine. A large head is converted a block of the vocabulary at a time.
        """
        if uses_invariant_product(hidden_TD):
            return self._invariant_logits(hidden_TD)
        if self._is_head_small():
            wide = wider(hidden_TD.dtype)
            return F.linear(hidden_TD.to(wide), self.lm_head.effective_weight().to(wide))
        return wide_logits(hidden_TD, self.lm_head.weight, self._head_branch(hidden_TD))

    def _invariant_logits(self, hidden_TD: Tensor) -> Tensor:
        """fp32 sums of products of narrow factors are those of wide ones."""
        logits_TV = linear(hidden_TD, self.lm_head.weight, torch.float32)
        A_rD, B_Vr = self.lm_head.lora_A, self.lm_head.lora_B
        if A_rD is None or B_Vr is None:
            return logits_TV
        return logits_TV + self.lm_head.lora_scale * linear(linear(hidden_TD.float(), A_rD), B_Vr)

    def logprobs(self, hidden_MD: Tensor, tokens_M: Tensor, temperature: float) -> Tensor:
        """log softmax(logits / temperature) at each row's token, fp32 [M]; blocks of logits where they are many."""
        if self._is_head_small() and hidden_MD.shape[0] * self.cfg.vocab_size <= MAX_LOGITS:
            return linear_logprob_whole(hidden_MD, self.lm_head.effective_weight(), tokens_M, temperature)
        return linear_logprob(hidden_MD, self.lm_head.weight, tokens_M, temperature, self._head_branch(hidden_MD))

    def _is_head_small(self) -> bool:
        return self.lm_head.weight.numel() <= MAX_WEIGHT

    def _head_branch(self, hidden_MD: Tensor) -> tuple[Tensor, Tensor] | None:
        """(scale h A^T in the type of the logits, B): the head's LoRA branch, whose product B A is as large as the head."""
        A_rD, B_Vr = self.lm_head.lora_A, self.lm_head.lora_B
        if A_rD is None or B_Vr is None:
            return None
        wide = wider(hidden_MD.dtype)
        return self.lm_head.lora_scale * product(hidden_MD.to(wide), A_rD.to(wide)), B_Vr

    def _layers(self, x_TD: Tensor, replay_TLk: Tensor | None, attend: Attend, run: Run) -> Forward:
        bank: list[Tensor] = []
        prefix: Tensor | None = x_TD
        routes: list[Tensor] = []
        block = self.cfg.attn_res_block_size
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            assert prefix is not None
            replay_Tk = None if replay_TLk is None or not self.cfg.is_moe(i) else replay_TLk[:, len(routes)]
            commits = block is not None and i % block == 0
            out, experts_Tk = run(partial(self._layer, layer, attend, commits), prefix, replay_Tk, bank)
            if experts_Tk is not None:
                routes.append(experts_Tk)
            if commits:  # after this layer's read: row 0 is the embedding alone
                bank.append(prefix)
            prefix = out
        assert prefix is not None
        rows = [*bank, prefix] if block is not None else [prefix]
        reader = (self.output_attn_res_norm, self.output_attn_res_proj) if block is not None else None
        hidden_TD = self._read(rows, reader, self.norm)
        k = self.cfg.num_experts_per_token
        no_routes = x_TD.new_zeros(x_TD.shape[0], 0, k, dtype=torch.long)
        return Forward(hidden_TD, torch.stack(routes, 1) if routes else no_routes)

    def _layer(
        self,
        layer: DecoderLayer,
        attend: Attend,
        commits: bool,
        prefix: Tensor,
        replay_Tk: Tensor | None,
        *bank: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """One layer: the running sum after it and the experts that it used. commits: it begins a new block, so what came
        before is a row of the bank from its MLP on. The bank is empty where residuals are ordinary."""
        has_bank = self.cfg.attn_res_block_size is not None
        reader = (layer.self_attention_res_norm, layer.self_attention_res_proj) if bank else None
        a_TD = attend(layer.self_attn, self._read([*bank, prefix], reader, layer.input_layernorm))
        rows = [*bank, prefix] if commits else [*bank]
        prefix = a_TD if commits else prefix + a_TD
        reader = (layer.mlp_res_norm, layer.mlp_res_proj) if has_bank else None
        normed_TD = self._read([*rows, prefix], reader, layer.post_attention_layernorm)
        experts_Tk = None
        if hasattr(layer, "block_sparse_moe"):
            m_TD, experts_Tk = layer.block_sparse_moe(normed_TD, replay_Tk)
        else:
            m_TD = layer.mlp(normed_TD)
        return prefix + m_TD, experts_Tk

    def _read(self, rows: list[Tensor], reader: tuple[RMSNorm, ResidualProj] | None, next_norm: RMSNorm) -> Tensor:
        """What a sublayer reads, normed: without a reader, where residuals are ordinary, the last row. On a GPU the read and
        the norm are one kernel, between which nothing is rounded."""
        if reader is None:
            return next_norm(rows[-1])
        norm, proj = reader
        arguments = (rows, norm.weight, proj.weight[0], self.cfg.rms_norm_eps)
        if uses_kernel(rows[0]):
            return attn_res(*arguments, next_norm.weight, next_norm.eps)
        return next_norm(attn_res_mix(*arguments))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """From scratch: embedding std 0.3, linears 1/sqrt(in), residual writers but routed experts further by 1/sqrt(2L),
        reads uniform.

        The decay starts log-uniform in 1e-3..0.3 per channel (dt_bias solves the gate for it at f = 0): a zero dt_bias
        in the lower-bounded form would forget e^-2.5 a token. Attention starts out as copying (`init_as_copying`) and the
        head as the embedding's transpose: a pretrained model brings copying along, a tiny one would need most of its
        training to find it. Packed experts get random codes and the power of two as scale that comes closest to this std.
        Every tensor is written, drawn in its own type where it lies: the generator belongs to the model's device.
        """
        cfg = self.cfg
        writers = ("o_proj.weight", "down_proj.weight", "routed_expert_up_proj.weight")
        for name, p in self.named_parameters():
            if name == "embed_tokens.weight":
                p.normal_(0.0, EMBEDDING_STD, generator=generator)
            elif name.endswith("conv1d.weight"):
                p.uniform_(-0.1, 0.1, generator=generator)
            elif name.endswith("dt_bias"):
                low, high = math.log(1e-3), math.log(0.3)
                decay = torch.empty(p.shape, device=p.device).uniform_(low, high, generator=generator).exp()
                p.copy_(_inverse_gate(decay, cfg.gate_lower_bound))
            elif name.endswith(("A_log", "res_proj.weight")):
                p.zero_()
            elif p.ndim == 1:
                p.fill_(1)  # norms
            else:
                p.normal_(0.0, p.shape[-1] ** -0.5, generator=generator)
                if name.endswith(writers):
                    p.mul_((2 * cfg.num_hidden_layers) ** -0.5)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.self_attn.init_as_copying()
        self.lm_head.weight.copy_(self.embed_tokens.weight).mul_(cfg.hidden_size**-0.5).div_(EMBEDDING_STD)
        for name, buffer in self.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.zero_()
            elif name.endswith("_packed"):
                buffer.random_(generator=generator)
            elif name.endswith("_scale"):
                std = (buffer.shape[-1] * MXFP4_GROUP) ** -0.5
                buffer.fill_(E8M0_BIAS + round(math.log2(std / FP4_CODES_RMS)))


def build_model(cfg: K3Config, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> K3Model:
    """A model whose storage is uninitialised: to be filled by a checkpoint or by `init_weights`.

    Weights have type `dtype`, those of FP32_KEPT at least fp32. It is made on the meta device and cast there, so each
    tensor is allocated once, in its own type. Raises ValueError for a dtype that is not a floating point type.
    """
    with torch.device("meta"):
        model = K3Model(cfg)
    cast_model(model, dtype)
    return model.to_empty(device=device)


def _inverse_gate(decay: Tensor, lower_bound: float | None) -> Tensor:
    """z with kda_gate(z) = -decay at A_log = 0."""
    if lower_bound is None:
        return torch.log(torch.expm1(decay))
    return torch.logit(decay / -lower_bound)
