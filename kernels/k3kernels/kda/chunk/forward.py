"""KDA forward in chunks of 64 tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.kda.chunk.inter import kda_inter_kernel
from k3kernels.kda.chunk.intra import kda_intra_kernel
from k3kernels.kda.chunk.segments import Segment, rows_of
from k3kernels.kda.chunk.table import ROWS, ChunkTable
from k3kernels.linear.triton import INTERPRETED
from k3kernels.nvrtc import CudaSource, load


@dataclass(frozen=True, slots=True)
class Settings:
    """Measured once, never chosen by the size of a call: bits depend on some of them."""

    intra_warps: int = 4
    intra_block_k: int = 64
    gradient_warps: int = 8
    gradient_block_k: int = 64
    inter_warps: int = 4
    inter_block_v: int = 32
    inter_stages: int = 3
    inverse_precision: str = "tf32x3"


SETTINGS = Settings()


@dataclass(frozen=True, slots=True)
class KdaInputs:
    """Raw: before normalisation, gate and sigmoid. q, k, f [T, H, K] and v [T, H, V] in one type; b [T, H] bf16 or fp32;
    A_log [H], dt_bias [H, K] fp32."""

    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    f_THK: Tensor
    b_TH: Tensor
    A_log_H: Tensor
    dt_bias_HK: Tensor

    def contiguous(self) -> KdaInputs:
        return KdaInputs(*(x.contiguous() for x in self.tensors()))

    def at(self, segment: Segment) -> KdaInputs:
        tensors = self.tensors()
        return KdaInputs(*(rows_of(x, segment.tokens) for x in tensors[:5]), *tensors[5:])

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.q_THK, self.k_THK, self.v_THV, self.f_THK, self.b_TH, self.A_log_H, self.dt_bias_HK)


@dataclass(frozen=True, slots=True)
class Gate:
    """lower_bound < 0 (K3), or None for the softplus form (Kimi-Linear); scale of q."""

    lower_bound: float | None
    scale: float


@dataclass(frozen=True, slots=True)
class Intra:
    """Of every chunk and head, 64 rows: scale q e^G, k e^G, k e^(G_last - G) [.., 64, K], P and A [.., 64, 64] in the
    inputs' type, the decay of the whole chunk [.., K] and 1 / |k| and 1 / |q| [.., 2, 64] in fp32."""

    q_decayed: Tensor
    k_decayed: Tensor
    k_to_end: Tensor
    P: Tensor
    A: Tensor
    decay: Tensor
    norms: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.q_decayed, self.k_decayed, self.k_to_end, self.P, self.A, self.decay)


def dot_type() -> tuple[tl.dtype, str]:
    """Type and precision of products: the interpreter gets bf16 wrong."""
    return (tl.float32, "ieee") if INTERPRETED else (tl.bfloat16, "tf32")


def is_bounded(gate: Gate) -> bool:
    """Whether 16 rows' decay stays finite when it is divided by."""
    return gate.lower_bound is not None and gate.lower_bound >= -5.0


CUDA = CudaSource(Path(__file__).with_name("intra.cu"), "kda_intra", threads=128, shared_bytes=64_768)


def has_cuda_form(inputs: KdaInputs, gate: Gate) -> bool:
    """From Hopper on, whose blocks have the shared memory that it takes."""
    k_THK = inputs.k_THK
    if not (k_THK.is_cuda and k_THK.dtype == torch.bfloat16 and k_THK.shape[-1] == 128 and is_bounded(gate)):
        return False
    return torch.cuda.get_device_capability(k_THK.device) >= (9, 0)


def cuda_defines(inputs: KdaInputs) -> tuple[tuple[str, int], ...]:
    return (("B_IS_BF16", 1),) if inputs.b_TH.dtype == torch.bfloat16 else ()


def is_width(channels: int) -> bool:
    return channels >= 16 and channels & (channels - 1) == 0


def intra(inputs: KdaInputs, gate: Gate, table: ChunkTable) -> Intra:
    H, K = inputs.k_THK.shape[1:]
    n = table.num_chunks
    assert is_width(K), K

    def empty(*shape: int, dtype: torch.dtype = inputs.k_THK.dtype) -> Tensor:
        return torch.empty(n, H, *shape, dtype=dtype, device=inputs.k_THK.device)

    out = Intra(
        q_decayed=empty(ROWS, K),
        k_decayed=empty(ROWS, K),
        k_to_end=empty(ROWS, K),
        P=empty(ROWS, ROWS),
        A=empty(ROWS, ROWS),
        decay=empty(K, dtype=torch.float32),
        norms=empty(2, ROWS, dtype=torch.float32),
    )
    raw: tuple[Tensor, ...] = (inputs.q_THK, inputs.k_THK, inputs.f_THK, inputs.b_TH, inputs.A_log_H, inputs.dt_bias_HK)
    if has_cuda_form(inputs, gate):
        kernel = load(CUDA, inputs.k_THK.device.index, cuda_defines(inputs))
        arguments: tuple[Tensor | int | float, ...] = (
            *raw,
            table.starts_C,
            table.lengths_C,
            *out.tensors(),
            out.norms,
            gate.scale,
            gate.lower_bound or 0.0,
            H,
        )
        kernel(n * H, arguments)
        return out
    dot, precision = dot_type()
    kda_intra_kernel[(n * H,)](
        *raw,
        *(table.starts_C, table.lengths_C),
        *out.tensors(),
        out.norms,
        gate.scale,
        gate.lower_bound or 0.0,
        H=H,
        K=K,
        BK=min(K, SETTINGS.intra_block_k),
        R=ROWS // 2,
        DOT=dot,
        PRECISION=precision,
        INVERSE_PRECISION="ieee" if INTERPRETED else SETTINGS.inverse_precision,
        IS_BOUNDED=is_bounded(gate),
        num_warps=SETTINGS.intra_warps,
    )
    return out


INTER_SOURCE = Path(__file__).with_name("inter.cu")
INTER_SHARED_BYTES = 2 * (4 * ROWS * 128 * 2 + 2 * ROWS * ROWS * 2 + 1024) + 2 * ROWS * 72 * 2
INTER_CUDA = CudaSource(INTER_SOURCE, "kda_inter", threads=256, shared_bytes=INTER_SHARED_BYTES)


def inter_defines(keeps_states: bool) -> tuple[tuple[str, int], ...]:
    return (("KEEPS_STATES", int(keeps_states)),)


def has_inter_cuda_form(k_THK: Tensor, v_THV: Tensor) -> bool:
    """On Hopper alone, whose products of warpgroups no other GPU has."""
    is_wide = k_THK.shape[-1] == 128 and v_THV.shape[-1] == 128
    if not (v_THV.is_cuda and v_THV.dtype == torch.bfloat16 and is_wide):
        return False
    return torch.cuda.get_device_capability(v_THV.device)[0] == 9


def inter(
    inputs: KdaInputs,
    parts: Intra,
    table: ChunkTable,
    initial_NHKV: Tensor | None = None,
    emitted: Tensor | None = None,
    kept: tuple[Tensor, Tensor] | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """o [T, H, V] and the final states [N, H, K, V] fp32, in out where it is given. kept, for a backward pass: not o but
    the states at each chunk's start [chunks, H, K, V] and u [T, H, V] are written."""
    H, K, V = parts.k_decayed.shape[1], parts.k_decayed.shape[-1], inputs.v_THV.shape[-1]
    assert is_width(V), V
    if out is None:
        o_THV = torch.empty_like(inputs.v_THV) if kept is None else kept[1]
        out = (o_THV, torch.empty(table.num_sequences, H, K, V, dtype=torch.float32, device=o_THV.device))
    o_THV, final = out
    if has_inter_cuda_form(inputs.k_THK, inputs.v_THV):
        where = (initial_NHKV, table.edges_N, table.tokens_N)
        written = (o_THV, final, *(kept or (None, None)))
        emits = (table.emits_C, emitted) if emitted is not None else (None, None)
        kernel = load(INTER_CUDA, o_THV.device.index, inter_defines(kept is not None))
        kernel(table.num_sequences * H, (inputs.v_THV, *parts.tensors(), *where, *written, *emits, H))
        return o_THV, final
    block_v = min(V, SETTINGS.inter_block_v)
    dot, precision = dot_type()
    kda_inter_kernel[(table.num_sequences * H * triton.cdiv(V, block_v),)](
        inputs.v_THV,
        *parts.tensors(),
        final if initial_NHKV is None else initial_NHKV,
        *(table.edges_N, table.tokens_N),
        *(o_THV, final, *(kept or (o_THV, o_THV))),
        table.edges_N if table.emits_C is None else table.emits_C,
        final if emitted is None else emitted,
        H=H,
        K=K,
        V=V,
        BV=block_v,
        C=ROWS,
        DOT=dot,
        PRECISION=precision,
        HAS_INITIAL=initial_NHKV is not None,
        KEEPS_STATES=kept is not None,
        HAS_EMITS=emitted is not None,
        WRITES_O=kept is None,
        STAGES=SETTINGS.inter_stages,
        num_warps=SETTINGS.inter_warps,
    )
    return o_THV, final


def outputs(
    inputs: KdaInputs,
    gate: Gate,
    segments: tuple[Segment, ...],
    initial_NHKV: Tensor | None = None,
    emitted: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o [T, H, V], the final states [N, H, K, V] fp32, and the states [H, K, V] fp32 where sequences are cut, in order."""
    H, K, V = *inputs.k_THK.shape[1:], inputs.v_THV.shape[-1]
    o_THV = torch.empty_like(inputs.v_THV)
    final_NHKV = torch.empty(segments[-1].sequences.stop, H, K, V, dtype=torch.float32, device=o_THV.device)
    between: list[Tensor] = []
    for segment in segments:
        own, table = inputs.at(segment), segment.table
        initial = segment.states(initial_NHKV, between[-1] if segment.continues else None, 0)
        out = (rows_of(o_THV, segment.tokens), rows_of(final_NHKV, segment.sequences))
        inter(own, intra(own, gate, table), table, initial, None if table.emits_C is None else emitted, out=out)
        if segment.is_continued:
            between.append(out[1][-1].clone())  # the next segment writes its own there
    return o_THV, final_NHKV, between
