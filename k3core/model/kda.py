"""The KDA layer: projections, short convolution, gates, recurrence, gated output norm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3core.model.config import K3Config
from k3core.model.layers import Linear
from k3core.model.state import Emit, SlotState
from k3kernels.dispatch import uses_kernel
from k3kernels.dtypes import wider
from k3kernels.kda import CHUNK, kda_aligned, kda_aligned_from, kda_aligned_step, kda_chunked, kda_gate, l2_norm
from k3kernels.kda.aligned import Places
from k3kernels.packing import Packing
from k3kernels.rms_norm import gated_rms_norm
from k3kernels.short_conv import short_conv
from k3kernels.two_forms import forward_and_gradient

if TYPE_CHECKING:
    from k3core.model.packed import PackedWork


class Conv1d(nn.Module):
    """Holds a depthwise kernel under the checkpoint's name and shape [P, 1, J]."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))


class OutputNorm(nn.Module):
    """The weight of the gated output norm, one per value channel, shared by the heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class KimiDeltaAttention(nn.Module):
    """The recurrence and its state are in the next wider type than the activations (float32 for bf16, as in the release;
    float64 for float32). Chunks lie at fixed positions of a sequence, so that training, prefill in any pieces and decoding
    give a token the same bits (k3kernels.kda.aligned).
    """

    def __init__(self, cfg: K3Config, layer: int) -> None:
        super().__init__()
        D, H, K = cfg.hidden_size, cfg.kda_num_heads, cfg.kda_head_dim
        P, J = H * K, cfg.short_conv_kernel_size
        self.cfg, self.layer = cfg, layer
        self.q_proj, self.k_proj, self.v_proj = Linear(D, P), Linear(D, P), Linear(D, P)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = Conv1d(P, J), Conv1d(P, J), Conv1d(P, J)
        self.f_a_proj, self.f_b_proj = Linear(D, K), Linear(K, P)
        self.b_proj = Linear(D, H)
        self.A_log = nn.Parameter(torch.zeros(H))
        self.dt_bias = nn.Parameter(torch.zeros(P))
        if cfg.use_full_rank_gate:
            self.g_proj = Linear(D, P)
        else:
            self.g_a_proj, self.g_b_proj = Linear(D, K), Linear(K, P)
        self.o_norm = OutputNorm(K)
        self.o_proj = Linear(P, D)

    def forward(
        self,
        x_TD: Tensor,
        packing: Packing,
        state: SlotState | None,
        slots_N: Tensor | None,
        emits: Sequence[Emit] = (),
    ) -> Tensor:
        """x_TD normed, its rows those of the packing and perhaps more, which get zeros.

        With a state, each sequence goes on where its slot stands and leaves the slot after its last token; its state on
        the way there is kept where `emits` says so.
        """
        T = packing.num_tokens
        qkv_TP = torch.cat([self.q_proj(x_TD), self.k_proj(x_TD), self.v_proj(x_TD)], -1)[:T]
        if (
            state is None and x_TD.device.type != "cpu"
        ):  # chunk after chunk in small operations would keep a GPU waiting
            return self._output(self._chunked(packing, qkv_TP, *self._raw_gates(x_TD)), x_TD)
        g_THK, beta_TH = (gate[:T] for gate in self._gates(x_TD))
        if state is None:
            o_THV = self._from_start(qkv_TP, g_THK, beta_TH, packing)
        else:
            assert slots_N is not None
            o_THV = self._from_slots(qkv_TP, g_THK, beta_TH, packing, state, slots_N, emits)
        return self._output(F.pad(o_THV, (0, 0, 0, 0, 0, len(x_TD) - T)), x_TD)

    def _from_start(self, qkv_TP: Tensor, g_THK: Tensor, beta_TH: Tensor, packing: Packing) -> Tensor:
        H, K, J = self.cfg.kda_num_heads, self.cfg.kda_head_dim, self.cfg.short_conv_kernel_size
        N, length = packing.num_sequences, -(-packing.max_length // CHUNK) * CHUNK
        qkv_NLP = packing.pad(qkv_TP, length)
        q, k, v = self._convolve(torch.cat([qkv_NLP.new_zeros(N, J - 1, qkv_NLP.shape[-1]), qkv_NLP], 1))
        state_NHKV = qkv_NLP.new_zeros(N, H, K, K, dtype=wider(qkv_TP.dtype))
        bound, scale = self.cfg.gate_lower_bound, K**-0.5
        # Zeros behind the end: the state stays as it is there.
        inputs = (q, k, v, packing.pad(g_THK, length), packing.pad(beta_TH, length), state_NHKV)

        def chunked(*inputs: Tensor) -> Tensor:
            q, k, v, g, beta, S = inputs
            return kda_chunked(q, k, v, g, beta, S, CHUNK, bound, scale)[0]

        o_NLHV = forward_and_gradient(partial(kda_aligned, lower_bound=bound, scale=scale), chunked, *inputs)
        return packing.unpad(o_NLHV.contiguous())

    def _from_slots(
        self,
        qkv_TP: Tensor,
        g_THK: Tensor,
        beta_TH: Tensor,
        packing: Packing,
        state: SlotState,
        slots_N: Tensor,
        emits: Sequence[Emit],
    ) -> Tensor:
        """In the chunks in which the slots stand: the new rows lie behind those that were seen of them."""
        J, N = self.cfg.short_conv_kernel_size, packing.num_sequences
        num_seen_N = state.length_N[slots_N] % CHUNK
        length = -(-int((num_seen_N + packing.lengths_N).max()) // CHUNK) * CHUNK
        index_T = packing.seq_T * length + packing.pos_T + num_seen_N[packing.seq_T]

        def place(x_T: Tensor) -> Tensor:
            out = x_T.new_zeros(N * length, *x_T.shape[1:])
            out[index_T] = x_T
            return out.unflatten(0, (N, length))

        window_and_qkv = torch.cat([state.window_NJP[self.layer][slots_N], packing.pad(qkv_TP, length)], 1)
        q, k, v = (place(packing.unpad(x)) for x in self._convolve(window_and_qkv))
        starts = state.length_N[slots_N].tolist() if emits else []
        o_NLHV, S_NHKV, rows, emitted = kda_aligned_from(
            *(q, k, v, place(g_THK), place(beta_TH)),
            state.kda_NHKV[self.layer][slots_N],
            state.chunk_rows[self.layer].of(slots_N),
            num_seen_N,
            packing.lengths_N,
            self.cfg.gate_lower_bound,
            self.cfg.kda_head_dim**-0.5,
            [(emit.n, emit.position // CHUNK - starts[emit.n] // CHUNK) for emit in emits],
        )
        for emit, S_HKV in zip(emits, emitted, strict=True):
            first = emit.position - starts[emit.n]
            state.save_layer(self.layer, emit.checkpoint, S_HKV, window_and_qkv[emit.n, first : first + J - 1])
        state.kda_NHKV[self.layer][slots_N] = S_NHKV
        state.chunk_rows[self.layer].write(slots_N, rows)
        rows_NJ = packing.lengths_N.unsqueeze(-1) + torch.arange(J - 1, device=qkv_TP.device)
        sequences_N1 = torch.arange(N, device=qkv_TP.device).unsqueeze(-1)
        state.window_NJP[self.layer][slots_N] = window_and_qkv[sequences_N1, rows_NJ]
        return o_NLHV.flatten(0, 1)[index_T]

    def decode(self, x_ND: Tensor, state: SlotState, places: Places) -> Tensor:
        """One token for the first N slots; slots that are not active keep their state, window and seen rows."""
        N, n = x_ND.shape[0], places.num
        window_NJP = state.window_NJP[self.layer]
        new_N1P = torch.cat([self.q_proj(x_ND), self.k_proj(x_ND), self.v_proj(x_ND)], -1).unsqueeze(1)
        window_and_qkv = torch.cat([window_NJP[:N], new_N1P], 1)
        q, k, v = (x.squeeze(1) for x in self._convolve(window_and_qkv))
        g_NHK, beta_NH = self._gates(x_ND)
        o_nHV = kda_aligned_step(
            *(q[:n], k[:n], v[:n], g_NHK[:n], beta_NH[:n]),
            state.kda_NHKV[self.layer][:n],
            state.chunk_rows[self.layer].of(slice(n)),
            places,
            self.cfg.gate_lower_bound,
            self.cfg.kda_head_dim**-0.5,
        )
        if len(places.active) == N:
            window_NJP[:N] = window_and_qkv[:, 1:]
        else:
            window_NJP[places.active] = window_and_qkv[places.active, 1:]
        return self._output(F.pad(o_nHV, (0, 0, 0, 0, 0, N - n)), x_ND)

    def packed(self, x_TD: Tensor, work: PackedWork, packing: Packing | None, state: SlotState | None) -> Tensor:
        """On a GPU, for a trainer (which gives its packing, for the gradient's form), a prefill and a decode alike."""
        qkv_TP = torch.cat([self.q_proj(x_TD), self.k_proj(x_TD), self.v_proj(x_TD)], -1)
        forms = (partial(self._kernels, work, state), partial(self._chunked, packing))
        return self._output(forward_and_gradient(*forms, qkv_TP, *self._raw_gates(x_TD)), x_TD)

    def _kernels(
        self,
        work: PackedWork,
        state: SlotState | None,
        qkv_TP: Tensor,
        f_TP: Tensor,
        b_TH: Tensor,
        taps_PJ: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
    ) -> Tensor:
        from k3kernels.kda.triton import empty_pool, kda_aligned_packed
        from k3kernels.short_conv.triton import kda_gates, short_conv_packed

        H, K, J = self.cfg.kda_num_heads, self.cfg.kda_head_dim, self.cfg.short_conv_kernel_size
        bound = self.cfg.gate_lower_bound
        states, windows = None, None
        if state is None:
            pool = empty_pool(1, H, K, K, qkv_TP.dtype, wider(qkv_TP.dtype), qkv_TP.device)
            window = qkv_TP.new_zeros(1, J - 1, 3 * H * K)
        else:
            pool, window = state.kda_pool[self.layer], state.window_NJP[self.layer]
            if work.has_emits:
                states, windows = state.checkpoints_of(self.layer)
        taps_JP = taps_PJ.T.contiguous()
        q, k, v = short_conv_packed(qkv_TP, taps_JP, window, work.kda, H, work.max_new, windows)
        g_THK, beta_TH = kda_gates(f_TP, b_TH, A_log, dt_bias, bound)
        return kda_aligned_packed(q, k, v, g_THK, beta_TH, pool, work.kda, K**-0.5, states)

    def _chunked(
        self,
        packing: Packing | None,
        qkv_TP: Tensor,
        f_TP: Tensor,
        b_TH: Tensor,
        taps_PJ: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
    ) -> Tensor:
        """The same, up to rounding, in the form that has a gradient: of whole sequences."""
        assert packing is not None
        H, K, J = self.cfg.kda_num_heads, self.cfg.kda_head_dim, self.cfg.short_conv_kernel_size
        bound = self.cfg.gate_lower_bound
        if uses_kernel(qkv_TP) and qkv_TP.dtype == torch.bfloat16:
            return self._chunk_kernels(packing, qkv_TP, f_TP, b_TH, taps_PJ, A_log, dt_bias)
        N, length = packing.num_sequences, -(-packing.max_length // CHUNK) * CHUNK
        qkv_NLP = packing.pad(qkv_TP, length)
        window_and_qkv = torch.cat([qkv_NLP.new_zeros(N, J - 1, qkv_NLP.shape[-1]), qkv_NLP], 1)
        q, k, v = short_conv(window_and_qkv, taps_PJ).unflatten(-1, (3, H, K)).unbind(2)
        g_THK = kda_gate(f_TP.unflatten(-1, (H, K)), A_log, dt_bias.view(H, K), bound)
        beta_TH = torch.sigmoid(b_TH.to(g_THK.dtype))
        S = qkv_NLP.new_zeros(N, H, K, K, dtype=wider(qkv_TP.dtype))
        inputs = (l2_norm(q), l2_norm(k), v, packing.pad(g_THK, length), packing.pad(beta_TH, length), S)
        return packing.unpad(kda_chunked(*inputs, CHUNK, bound, K**-0.5)[0].contiguous())

    def _chunk_kernels(
        self,
        packing: Packing,
        qkv_TP: Tensor,
        f_TP: Tensor,
        b_TH: Tensor,
        taps_PJ: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
    ) -> Tensor:
        from k3kernels.kda.chunk.op import kda_chunk
        from k3kernels.kda.chunk.table import chunk_table
        from k3kernels.short_conv.train import short_conv_train

        H, K = self.cfg.kda_num_heads, self.cfg.kda_head_dim
        table = chunk_table(packing.lengths, qkv_TP.device)
        q, k, v = (x.unflatten(-1, (H, K)) for x in short_conv_train(qkv_TP, taps_PJ, packing, 3))
        gate = (self.cfg.gate_lower_bound, K**-0.5)
        f_THK, dt_bias_HK = f_TP.unflatten(-1, (H, K)), dt_bias.view(H, K)
        return kda_chunk(q, k, v, f_THK, b_TH, A_log, dt_bias_HK, table, *gate)[0]

    @torch.no_grad()
    def init_as_copying(self) -> None:
        """Queries match equal tokens, whose successors come back: keys look 1 to J-1 tokens back, head by head.

        q and k start from one projection, so equal inputs match; it is small, where SiLU is nearly linear and unequal
        keys are nearly orthogonal. Of the convolution's taps one is 1: q and v take the current token. What is read is
        written back through v's transpose, so that it comes out as the token that went in.
        """
        H, J = self.cfg.kda_num_heads, self.cfg.short_conv_kernel_size
        self.q_proj.weight.mul_(0.1)
        self.k_proj.weight.copy_(self.q_proj.weight)
        for conv in (self.q_conv1d, self.v_conv1d):
            conv.weight[..., -1] += 1
        self.o_proj.weight.copy_(self.v_proj.weight.T * (2 * self.cfg.num_hidden_layers) ** -0.5)
        for head, taps in enumerate(self.k_conv1d.weight.unflatten(0, (H, -1))):
            taps[..., -1 - (1 + max(0, head - 1) % (J - 1))] += 1

    def _convolve(self, window_and_qkv_NLP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k, normalised, and v [N, L, H, K] from the inputs of L tokens and the J - 1 before them."""
        H, K = self.cfg.kda_num_heads, self.cfg.kda_head_dim
        taps_PJ = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]).squeeze(1)
        qkv = short_conv(window_and_qkv_NLP, taps_PJ).unflatten(-1, (3, H, K))
        q, k = l2_norm(qkv[:, :, :2]).unbind(2)
        return q, k, qkv[:, :, 2]

    def _raw_gates(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """f and b before their nonlinearities, the convolution's taps, and the gate's parameters."""
        taps_PJ = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]).squeeze(1)
        return self.f_b_proj(self.f_a_proj(x_TD)), self.b_proj(x_TD), taps_PJ, self.A_log, self.dt_bias

    def _gates(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay and write strength, in at least fp32."""
        H, K = self.cfg.kda_num_heads, self.cfg.kda_head_dim
        f_THK = self.f_b_proj(self.f_a_proj(x_TD)).unflatten(-1, (H, K))
        g_THK = kda_gate(f_THK, self.A_log, self.dt_bias.view(H, K), self.cfg.gate_lower_bound)
        return g_THK, torch.sigmoid(self.b_proj(x_TD).to(g_THK.dtype))

    def _output(self, o_THV: Tensor, x_TD: Tensor) -> Tensor:
        gate_TP = self.g_proj(x_TD) if self.cfg.use_full_rank_gate else self.g_b_proj(self.g_a_proj(x_TD))
        y_THV = gated_rms_norm(o_THV, gate_TP.view(o_THV.shape), self.o_norm.weight, self.cfg.rms_norm_eps)
        return self.o_proj(y_THV.flatten(1))
