"""The log-probability on a GPU: logits stay inside their tile, and gradients take one product less where they can.

Forward (`_reduce`), one product: every tile of logits leaves a maximum and a sum a row, which are merged in fp64.

Gradients, in one of two ways:
* ahead, with one more product. d logprob / d hidden is (W[token] - sum p W) / temperature whatever comes from above, but
  for a factor a row. So where only hidden wants a gradient, and none of the entropy, forward takes it along: its tiles
  also write exponentials, AHEAD elements at a time, which a second product multiplies by W.
* block by block, with one or two more and a part of the first again. A block is all rows by a piece of the vocabulary:
  backward writes its logits' gradient, and its words' rows of W get theirs at once. Forward keeps the logits of the first
  blocks, which become their gradient in place: in the memory that W's gradient is going to fill (`lent.py`), and BLOCK
  elements more. Later blocks are computed again and written over the last.

A row's logprob and entropy have the same bits in every batch, with and without a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, repeat
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from k3kernels.linear.triton import INTERPRETED
from k3kernels.linear_logprob.lent import lent_blocks, spread
from k3kernels.linear_logprob.triton_kernels import (
    align_kernel,
    hidden_slope_kernel,
    kept_gradient_kernel,
    logits_gradient_kernel,
    merge_kernel,
    reduce_logits_kernel,
)
from k3kernels.linear_logprob.wide import add_product_in_fp32, product_in_fp32

ALIGNMENT = 16  # bytes: of the rows and of the start of what TMA reads
AHEAD = 1792 * 163840  # exponentials that exist at a time: 560 MiB in bf16
BLOCK = 5 << 27  # logits kept, then gradients of logits, beside those in W's gradient: 1.25 GiB in 16 bits
LENT_WORDS = 33 * 256  # of a block in W's gradient; beside 4 tiles of rows they fill an H200's 132 multiprocessors
KEPT_TYPES = {torch.bfloat16: torch.float16}  # as wide; an exponent needs the finer steps and not the range
MERGED_ROWS, MERGED_TILES = 32, 32
SLOPE_COLUMNS = 1024
KEPT_ROWS = 16


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
    exponentials, one [M, D] of hidden's type kept for backward; block by block, BLOCK elements from forward to backward
    and one [M, D] in fp32, and where BLOCK elements are not all logits, the weight's gradient is allocated by forward. A
    second backward pass through one graph computes all logits again, since the first has written over them.
    """
    has_gradient = torch.is_grad_enabled() and (hidden_MD.requires_grad or weight_VD.requires_grad)
    is_ahead = has_gradient and not weight_VD.requires_grad and not with_entropy
    way = None if not has_gradient else "ahead" if is_ahead else "blocks"
    logprob_M, entropy_M = _LinearLogprob.apply(
        hidden_MD, weight_VD, tokens_M, temperature, with_entropy, way, tile or TILE
    )
    return logprob_M, entropy_M


class Reduced(NamedTuple):
    """Of some rows, fp32: logprob, entropy (zeros without) and log2 sum exp2(logit scale) [M]; tiles' maxima [tiles, M]."""

    logprob: Tensor
    entropy: Tensor
    normalizer: Tensor
    highest: Tensor


class Above(NamedTuple):
    """What the gradient of a row's logits is made of, fp32 [M]; see `triton_kernels._gradient`."""

    normalizer: Tensor
    grad: Tensor
    others: Tensor
    entropy: Tensor | None
    grad_entropy: Tensor | None


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

    def block_words(self) -> int:
        """Of a block: whole tiles, one at least, or all."""
        words = BLOCK // self.M
        return self.V if words >= self.V else min(self.whole_tiles(words), self.V)

    def whole_tiles(self, words: int) -> int:
        return max(words // self.tile.block_n, 1) * self.tile.block_n

    def lent(self, grad_weight: Tensor | None) -> list[Tensor]:
        """Blocks in its memory, for the words that the block beside it has no room for."""
        if grad_weight is None:
            return []
        words = self.whole_tiles(LENT_WORDS)
        return lent_blocks(grad_weight, self.M, words, -(-(self.V - self.block_words()) // words))

    def read(self, x: Tensor, block_rows: int, block_columns: int | None = None) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(x, [block_rows, block_columns or self.tile.block_k])

    def reduce(
        self, rows: slice, with_entropy: bool, exps: Tensor | None = None, kept: Sequence[Tensor] = ()
    ) -> Reduced:
        """Writes exps [rows, V] of hidden's type, or kept: blocks [rows, words] of the first words, see `as_kept`."""
        hidden, tokens, tile = self.hidden[rows], self.tokens[rows], self.tile
        M = hidden.shape[0]
        highest, total = self.numbers(self.num_tiles, M), self.numbers(self.num_tiles, M)
        weighted = self.numbers(self.num_tiles, M) if with_entropy else None
        chosen = self.numbers(M, fill=math.nan)
        parts: list[tuple[slice, Tensor | None]] = [*spread(self.V, kept)]
        start = parts[-1][0].stop if parts else 0
        if start < self.V:
            parts.append((slice(start, self.V), None))
        for words, block in parts:
            count, tiles = words.stop - words.start, slice(words.start // tile.block_n, None)
            grid, options = self.launch(M, count, block is not None or exps is not None)
            reduce_logits_kernel[grid](
                self.read(hidden, tile.block_m),
                self.read(self.weight, tile.block_n),
                None if exps is None else self.read(exps, tile.block_m, tile.block_n),
                None if block is None else self.read(as_kept(block), tile.block_m, tile.block_n),
                *(tokens, highest[tiles], total[tiles], None if weighted is None else weighted[tiles], chosen),
                *(M, words.start, count, self.D, self.scale),
                EVEN=count % tile.block_n == 0,
                **options,
            )
        logprob, normalizer = self.numbers(M), self.numbers(M)
        entropy = self.numbers(M, fill=0.0)
        merge_kernel[(-(-M // MERGED_ROWS),)](
            *(highest, total, weighted, chosen, logprob, entropy, normalizer, M, self.num_tiles, self.scale),
            ROWS=MERGED_ROWS,
            TILES=MERGED_TILES,
        )
        return Reduced(logprob, entropy, normalizer, highest)

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
        self, above: Above, kept: Sequence[Tensor], block: Tensor, highest: Tensor
    ) -> Iterator[tuple[slice, Tensor]]:
        """(words, the gradient of their logits [M, words]) over the vocabulary, each in the place of its block: of those
        kept by `reduce`, which gave highest, then of `block` again and again. Take each before the next."""
        of_rows = (self.tokens, *above, self.M)
        for i, (words, d) in enumerate(spread(self.V, chain(kept, repeat(block)))):
            count, tile = words.stop - words.start, words.start // self.tile.block_n
            if i < len(kept):
                programs = -(-self.M // KEPT_ROWS) * -(-count // self.tile.block_n)
                kept_gradient_kernel[(programs,)](
                    *(as_kept(d), d, highest[tile:], *of_rows, words.start, count, d.stride(0)),
                    *(self.scale, 1 / self.temperature),
                    ROWS=KEPT_ROWS,
                    BN=self.tile.block_n,
                    INTERPRETED=INTERPRETED,
                )
            else:
                grid, options = self.launch(self.M, count, True)
                logits_gradient_kernel[grid](
                    self.read(self.hidden, self.tile.block_m),
                    self.read(self.weight, self.tile.block_n),
                    self.read(d, self.tile.block_m, self.tile.block_n),
                    *(*of_rows, words.start, count, self.D, self.scale, 1 / self.temperature),
                    **options,
                )
            yield words, d


def as_kept(block: Tensor) -> Tensor:
    """A block [M, words], as it is for logits that are kept: powers of 2 below their tile's maximum."""
    return block.view(KEPT_TYPES.get(block.dtype, block.dtype))


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
    def forward(ctx, hidden, weight, tokens, temperature, with_entropy, way, tile):  # type: ignore[no-untyped-def]
        ctx.temperature, ctx.with_entropy, ctx.way, ctx.tile = temperature, with_entropy, way, tile
        ctx.is_kept = False  # whether the saved block still has logits
        head = _Head(hidden, weight, tokens, temperature, tile)
        if head.M == 0:
            logprob, entropy = head.numbers(0), head.numbers(0)
            ctx.save_for_backward(hidden, weight)
        elif way == "ahead":
            logprob, entropy, slope = head.with_slopes()
            ctx.save_for_backward(slope)
        else:
            words = head.block_words()
            ctx.is_kept = way == "blocks" and words * head.M <= BLOCK
            block = head.block(head.M, words) if ctx.is_kept else None
            lends = ctx.is_kept and words < head.V and weight.requires_grad
            lent = weight.new_empty(weight.shape) if lends else None
            kept = [] if block is None else [*head.lent(lent), block]
            logprob, entropy, normalizer, highest = head.reduce(slice(0, head.M), with_entropy, kept=kept)
            if way == "blocks":
                others = torch.expm1(logprob).neg_()
                of_rows = (tokens, normalizer, others, entropy, highest)
                ctx.save_for_backward(hidden, weight, *of_rows, block, lent)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_entropy):  # type: ignore[no-untyped-def]
        if grad.shape[0] == 0:
            of_inputs = zip(ctx.saved_tensors, ctx.needs_input_grad[:2], strict=True)
            return *(torch.zeros_like(x) if is_needed else None for x, is_needed in of_inputs), *[None] * 5
        if ctx.way == "ahead":
            (slope,) = ctx.saved_tensors
            grad_hidden = torch.mul(slope, grad.unsqueeze(-1), out=torch.empty_like(slope))
            return grad_hidden, None, None, None, None, None, None
        hidden, weight, tokens, normalizer, others, entropy, highest, block, lent = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        head = _Head(hidden, weight, tokens, ctx.temperature, ctx.tile)
        of_entropy = (entropy, grad_entropy.contiguous()) if ctx.with_entropy else (None, None)
        above = Above(normalizer, grad.contiguous(), others, *of_entropy)
        kept = [*head.lent(lent), block] if ctx.is_kept else []
        if block is None:
            block = head.block(head.M, head.block_words())
        grad_weight = None
        if needs_weight:  # lent memory is the first pass's result; as `data`, or autograd refuses it to a second pass
            grad_weight = weight.new_empty(weight.shape) if lent is None or not ctx.is_kept else lent.data
        ctx.is_kept = False
        sums = None
        for words, d in head.logits_gradients(above, kept, block, highest):
            if needs_hidden:
                if sums is None:
                    sums = product_in_fp32(d, weight[words])
                else:
                    add_product_in_fp32(sums, d, weight[words])
            if grad_weight is not None:
                torch.mm(d.T, head.hidden, out=grad_weight[words])
        return None if sums is None else sums.to(hidden.dtype), grad_weight, None, None, None, None, None
