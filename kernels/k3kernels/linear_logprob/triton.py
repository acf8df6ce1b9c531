"""The log-probability on a GPU: logits stay inside their tile, and gradients take one product less where they can.

Forward (`_reduce`), one product: every tile of logits leaves a maximum and a sum a row, which are merged in fp64.

Gradients, in one of two ways:
* ahead, with one more product. d logprob / d hidden is (W[token] - sum p W) / temperature whatever comes from above, but
  for a factor a row. So where only hidden wants a gradient, and none of the entropy, forward takes it along: its tiles
  also write exponentials, AHEAD elements at a time, which a second product multiplies by W.
* again, with two or three more. Backward computes the logits again and writes their gradient, BLOCK elements at a time:
  all rows by a piece of the vocabulary, whose rows of W get their gradient at once.

A row's logprob and entropy have the same bits in every batch, with and without a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from k3kernels.linear.triton import INTERPRETED
from k3kernels.linear_logprob.triton_kernels import (
    align_kernel,
    hidden_slope_kernel,
    logits_gradient_kernel,
    merge_kernel,
    reduce_logits_kernel,
)
from k3kernels.linear_logprob.wide import product_in_fp32

ALIGNMENT = 16  # bytes: of the rows and of the start of what TMA reads
AHEAD = 1792 * 163840  # exponentials that exist at a time: 560 MiB in bf16
BLOCK = 1 << 28  # gradients of logits that exist at a time: 512 MiB in bf16
MERGED_ROWS, MERGED_TILES = 32, 32
SLOPE_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes at a time; block_n and block_k set the order of a row's sums."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    writing_stages: int = 3  # where the tile itself is written, from shared memory too
    group: int = 16
    flatten: bool = True  # loads of the next tile begin before this one is reduced


TILE = Tile()


def takes(hidden_MD: Tensor, weight_VD: Tensor, temperature: float) -> bool:
    """Whether the kernels can run: bf16 on Hopper or newer, rows that TMA can read, a temperature that keeps order."""
    return (
        hidden_MD.is_cuda
        and hidden_MD.dtype == weight_VD.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(hidden_MD.device) >= (9, 0)
        and weight_VD.shape[1] > 0
        and is_readable(weight_VD)
        and weight_VD.shape[1] * weight_VD.itemsize % ALIGNMENT == 0
        and temperature > 0
    )


def is_readable(x: Tensor) -> bool:
    """By TMA, where it lies."""
    aligned = x.data_ptr() % ALIGNMENT == 0 and x.stride(0) * x.itemsize % ALIGNMENT == 0
    return aligned and x.stride(1) == 1


def linear_logprob_and_entropy(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    tokens_M: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """See `eager.linear_logprob_and_entropy`: logprob and entropy, fp32 [M]. bf16 on a GPU, see `takes`.

    Memory beside inputs, results and gradients: forward, two or three numbers a row and tile; gradients ahead, AHEAD
    exponentials, one [M, D] of hidden's type kept for backward; again, BLOCK gradients and two [M, D] in fp32.
    """
    gradients = torch.is_grad_enabled()
    is_ahead = gradients and hidden_MD.requires_grad and not weight_VD.requires_grad and not with_entropy
    logprob_M, entropy_M = _LinearLogprob.apply(
        hidden_MD, weight_VD, tokens_M, temperature, with_entropy, is_ahead, tile or TILE
    )
    return logprob_M, entropy_M


class _Head:
    """The tiles of logits of one head."""

    def __init__(self, hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, tile: Tile) -> None:
        self.hidden = hidden if is_readable(hidden) else hidden.clone(memory_format=torch.contiguous_format)
        self.weight, self.tokens, self.temperature, self.tile = weight, tokens.contiguous(), temperature, tile
        (self.M, self.D), self.V = hidden.shape, weight.shape[0]
        self.num_tiles = -(-self.V // tile.block_n)
        self.scale = math.log2(math.e) / temperature

    def numbers(self, *shape: int, fill: float | None = None) -> Tensor:
        """fp32."""
        out = self.hidden.new_empty(shape, dtype=torch.float32)
        return out if fill is None else out.fill_(fill)

    def block(self, rows: int, columns: int) -> Tensor:
        """Of hidden's type, with rows that TMA can write."""
        unit = ALIGNMENT // self.hidden.itemsize
        return self.hidden.new_empty(rows, -(-columns // unit) * unit)[:, :columns]

    def launch(self, rows: int, words: int, writes: bool) -> tuple[tuple[int], dict[str, object]]:
        """The grid for rows by words, and the options of a tile; writes: its own elements too."""
        tile = self.tile
        programs = -(-rows // tile.block_m) * -(-words // tile.block_n)
        options: dict[str, object] = {"BM": tile.block_m, "BN": tile.block_n, "BK": tile.block_k, "GROUP": tile.group}
        options |= {"FLATTEN": tile.flatten, "INTERPRETED": INTERPRETED}
        options |= {"num_warps": tile.num_warps, "num_stages": tile.writing_stages if writes else tile.num_stages}
        return (min(programs, num_multiprocessors(self.hidden.device)),), options

    def read(self, x: Tensor, block_rows: int, block_columns: int | None = None) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(x, [block_rows, block_columns or self.tile.block_k])

    def reduce(
        self, rows: slice, with_entropy: bool, exps: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(logprob, entropy, normalizer of some rows; their tiles' maxima [tiles, rows]); fp32."""
        hidden, tokens, tile = self.hidden[rows], self.tokens[rows], self.tile
        M = hidden.shape[0]
        highest, total = self.numbers(self.num_tiles, M), self.numbers(self.num_tiles, M)
        weighted = self.numbers(self.num_tiles, M) if with_entropy else None
        chosen = self.numbers(M, fill=math.nan)
        grid, options = self.launch(M, self.V, exps is not None)
        reduce_logits_kernel[grid](
            self.read(hidden, tile.block_m),
            self.read(self.weight, tile.block_n),
            None if exps is None else self.read(exps, tile.block_m, tile.block_n),
            *(tokens, highest, total, weighted, chosen, M, self.V, self.D, self.scale),
            EVEN_V=self.V % tile.block_n == 0,
            **options,
        )
        logprob, normalizer = self.numbers(M), self.numbers(M)
        entropy = self.numbers(M, fill=0.0)
        merge_kernel[(-(-M // MERGED_ROWS),)](
            *(highest, total, weighted, chosen, logprob, entropy, normalizer, M, self.num_tiles, self.scale),
            ROWS=MERGED_ROWS,
            TILES=MERGED_TILES,
        )
        return logprob, entropy, normalizer, highest

    def with_slopes(self) -> tuple[Tensor, Tensor, Tensor]:
        """(logprob, entropy of zeros, d logprob / d hidden of hidden's type), some rows at a time."""
        logprob, slope = self.numbers(self.M), self.hidden.new_empty(self.M, self.D)
        exps = None
        for rows in pieces(self.M, AHEAD // self.V, self.tile.block_m):
            count = rows.stop - rows.start
            exps = self.block(count, self.V) if exps is None else exps[:count]
            unit = self.numbers(count)
            logprob[rows], _, normalizer, highest = self.reduce(rows, False, exps)
            align_kernel[(count,)](
                *(exps, highest, self.tokens[rows], unit, count, self.V, self.num_tiles, exps.stride(0), self.scale),
                BN=self.tile.block_n,
                TILES=triton.next_power_of_2(self.num_tiles),
            )
            hidden_slope_kernel[(count, -(-self.D // SLOPE_COLUMNS))](
                *(product_in_fp32(exps, self.weight), self.weight, self.tokens[rows], unit, normalizer, logprob[rows]),
                *(slope[rows], self.V, self.D, self.weight.stride(0), 1 / self.temperature),
                BLOCK=SLOPE_COLUMNS,
                INTERPRETED=INTERPRETED,
            )
        return logprob, torch.zeros_like(logprob), slope

    def logits_gradients(
        self, normalizer: Tensor, grad: Tensor, entropy: Tensor | None, grad_entropy: Tensor | None
    ) -> Iterator[tuple[slice, Tensor]]:
        """(words, the gradient of their logits [M, words]) over the vocabulary; the next overwrites the last."""
        columns = max(BLOCK // self.M, 1)
        d = None
        for words in pieces(self.V, columns, self.tile.block_n):
            count = words.stop - words.start
            d = self.block(self.M, count) if d is None else d[:, :count]
            grid, options = self.launch(self.M, count, True)
            logits_gradient_kernel[grid](
                self.read(self.hidden, self.tile.block_m),
                self.read(self.weight, self.tile.block_n),
                self.read(d, self.tile.block_m, self.tile.block_n),
                *(self.tokens, normalizer, grad, entropy, grad_entropy, self.M, words.start, count, self.D),
                *(self.scale, 1 / self.temperature),
                **options,
            )
            yield words, d


def pieces(length: int, most: int, unit: int) -> Iterator[slice]:
    """Of a length, each of a multiple of `unit` and at most `most`, or of one unit; the last is what is left."""
    size = max(most // unit, 1) * unit
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


@cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, tokens, temperature, with_entropy, is_ahead, tile):  # type: ignore[no-untyped-def]
        ctx.temperature, ctx.with_entropy, ctx.is_ahead, ctx.tile = temperature, with_entropy, is_ahead, tile
        head = _Head(hidden, weight, tokens, temperature, tile)
        if head.M == 0:
            logprob, entropy = head.numbers(0), head.numbers(0)
            ctx.save_for_backward(hidden, weight)
        elif is_ahead:
            logprob, entropy, slope = head.with_slopes()
            ctx.save_for_backward(slope)
        else:
            logprob, entropy, normalizer, _ = head.reduce(slice(0, head.M), with_entropy)
            ctx.save_for_backward(hidden, weight, tokens, normalizer, entropy)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_entropy):  # type: ignore[no-untyped-def]
        if grad.shape[0] == 0:
            of_inputs = zip(ctx.saved_tensors, ctx.needs_input_grad[:2], strict=True)
            return *(torch.zeros_like(x) if is_needed else None for x, is_needed in of_inputs), *[None] * 5
        if ctx.is_ahead:
            (slope,) = ctx.saved_tensors
            grad_hidden = torch.mul(slope, grad.unsqueeze(-1), out=torch.empty_like(slope))
            return grad_hidden, None, None, None, None, None, None
        hidden, weight, tokens, normalizer, entropy = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        head = _Head(hidden, weight, tokens, ctx.temperature, ctx.tile)
        of_entropy = (entropy, grad_entropy.contiguous()) if ctx.with_entropy else (None, None)
        sums = head.numbers(*hidden.shape, fill=0.0) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        for words, d in head.logits_gradients(normalizer, grad.contiguous(), *of_entropy):
            if sums is not None:
                sums += product_in_fp32(d, weight[words])
            if grad_weight is not None:
                torch.mm(d.T, head.hidden, out=grad_weight[words])
        return None if sums is None else sums.to(hidden.dtype), grad_weight, None, None, None, None, None
