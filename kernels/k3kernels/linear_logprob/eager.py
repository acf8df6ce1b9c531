"""Log-probabilities and entropies of a linear head in blocks of tokens and vocabulary: no [M, V] and no second V x D.

Forward: one pass over the vocabulary with a running maximum and sum for every row (online log-sum-exp, arXiv 1805.02867).
Backward: the blocks of logits are computed again; with p their softmax, dlogit_j = g (1[j = token] - p_j) / temperature
and, for the entropy H, g_H (-p_j (log p_j + H)) / temperature.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from k3kernels.dtypes import wider
from k3kernels.linear_logprob.wide import matmul, operand, vocabulary_block

MAX_LOGITS = 1 << 24  # logits that exist at a time: 64 MiB in fp32, 128 MiB in fp64

LowRank = tuple[Tensor, Tensor]


def linear_logprob(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    tokens_M: Tensor,
    temperature: float = 1.0,
    low_rank: LowRank | None = None,
) -> Tensor:
    """log softmax((hidden W^T [+ z B^T]) / temperature) at each row's token, fp32 [M]; equals the reference to 1e-6.

    low_rank (z_Mr in the next wider type than hidden's, B_Vr): a LoRA branch of the head, never multiplied out.
    A token outside 0..V-1 gets NaN. Types:
    * logits in the next wider type than hidden's (bf16: fp32, fp32: fp64), their running sums in fp64. On CUDA, bf16
      operands are multiplied as they are into fp32, which is exact up to the order of the sum (see `wide.matmul`);
      elsewhere a block of W is converted at a time;
    * gradients for hidden are summed over the vocabulary in the wider type and rounded once. Those of W and B are summed
      over all rows in the wider type, block by block, and rounded once to the weight's own type; they are computed only
      where they are required. On CUDA, bf16 operands make dlogit round to bf16 before it is multiplied.
    """
    return linear_logprob_and_entropy(hidden_MD, weight_VD, tokens_M, temperature, low_rank, with_entropy=False)[0]


def linear_logprob_and_entropy(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    tokens_M: Tensor,
    temperature: float = 1.0,
    low_rank: LowRank | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """`linear_logprob` and each row's entropy -sum p log p in nats, fp32 [M] (zeros without with_entropy)."""
    z_Mr, B_Vr = low_rank if low_rank is not None else (None, None)
    logprobs_M, entropy_M = _LinearLogprob.apply(hidden_MD, weight_VD, tokens_M, temperature, z_Mr, B_Vr, with_entropy)
    return logprobs_M, entropy_M


class _Head:
    """The blocks of logits of one head, in the wide type."""

    def __init__(self, hidden: Tensor, weight: Tensor, temperature: float, z: Tensor | None, B: Tensor | None) -> None:
        self.hidden, self.weight, self.temperature, self.z, self.B = hidden, weight, temperature, z, B
        self.wide = wider(hidden.dtype)

    def vocabulary(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """(rows of W, that block of W, of B), ready for `matmul`."""
        rows = vocabulary_block(self.weight)
        for start in range(0, self.weight.shape[0], rows):
            block = slice(start, min(start + rows, self.weight.shape[0]))
            B = None if self.B is None else self.B[block].to(self.wide)
            yield block, operand(self.weight[block], self.hidden, self.wide), B

    def tokens(self) -> Iterator[slice]:
        """Pieces of the M rows, so that a block has at most MAX_LOGITS logits."""
        rows = max(1, MAX_LOGITS // vocabulary_block(self.weight))
        for start in range(0, self.hidden.shape[0], rows):
            yield slice(start, min(start + rows, self.hidden.shape[0]))

    def rows_of(self, piece: slice) -> Tensor:
        return operand(self.hidden[piece], self.weight, self.wide)

    def logits(self, h: Tensor, piece: slice, W: Tensor, B: Tensor | None) -> Tensor:
        logits = matmul(h, W.T, self.wide)
        if B is not None:
            assert self.z is not None
            logits.addmm_(self.z[piece], B.T)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)


def _local(tokens: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """(index within the block, kept inside it; whether the token lies in the block), both [m, 1]."""
    index = tokens.unsqueeze(-1) - block.start
    is_inside = (index >= 0) & (index < block.stop - block.start)
    return index.clamp(0, block.stop - block.start - 1), is_inside


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, tokens, temperature, z, B, with_entropy):  # type: ignore[no-untyped-def]
        head = _Head(hidden, weight, temperature, z, B)
        M = hidden.shape[0]
        highest = hidden.new_full((M,), float("-inf"), dtype=head.wide)
        total = hidden.new_zeros(M, dtype=torch.float64)
        weighted = torch.zeros_like(total)
        chosen = hidden.new_full((M, 1), float("nan"), dtype=head.wide)
        for block, W, B_block in head.vocabulary():
            for piece in head.tokens():
                logits = head.logits(head.rows_of(piece), piece, W, B_block)
                index, is_inside = _local(tokens[piece], block)
                chosen[piece] = torch.where(is_inside, logits.gather(1, index), chosen[piece])
                above = torch.maximum(highest[piece], logits.amax(-1))
                shrink = (highest[piece] - above).exp().double()
                if with_entropy:
                    scaled = (logits - above.unsqueeze(-1)).exp_()
                    weighted[piece] = weighted[piece] * shrink + logits.mul_(scaled).sum(-1).double()
                else:
                    scaled = logits.sub_(above.unsqueeze(-1)).exp_()
                total[piece] = total[piece] * shrink + scaled.sum(-1).double()
                highest[piece] = above
        normalizer = highest.double() + total.log()
        entropy = normalizer - weighted / total if with_entropy else torch.zeros_like(total)
        ctx.save_for_backward(hidden, weight, tokens, z, B, normalizer.to(head.wide), entropy.to(head.wide))
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        logprobs, entropy = (chosen.squeeze(-1).double() - normalizer).float(), entropy.float()
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_entropy):  # type: ignore[no-untyped-def]
        hidden, weight, tokens, z, B, normalizer, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, _, _, needs_z, needs_B, _ = ctx.needs_input_grad
        head = _Head(hidden, weight, ctx.temperature, z, B)
        wide = head.wide
        grad = grad.to(wide).unsqueeze(-1)
        grad_hidden = torch.zeros_like(hidden, dtype=wide) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_z = torch.zeros_like(z) if needs_z else None
        grad_B = torch.empty_like(B) if needs_B else None
        for block, W, B_block in head.vocabulary():
            of_W = None if grad_weight is None else torch.zeros_like(W, dtype=wide)
            of_B = None if grad_B is None or B_block is None else torch.zeros_like(B_block)
            for piece in head.tokens():
                h = head.rows_of(piece)
                d = head.logits(h, piece, W, B_block).sub_(normalizer[piece].unsqueeze(-1))
                if ctx.with_entropy:
                    slope = (d + entropy[piece].unsqueeze(-1)).mul_(grad_entropy[piece].to(wide).unsqueeze(-1))
                    d = d.exp_().mul_(slope.add_(grad[piece]).neg_())
                else:
                    d = d.exp_().mul_(-grad[piece])
                index, is_inside = _local(tokens[piece], block)
                d.scatter_add_(1, index, torch.where(is_inside, grad[piece], 0.0))
                if ctx.temperature != 1.0:
                    d.div_(ctx.temperature)
                if grad_z is not None and B_block is not None:
                    grad_z[piece].addmm_(d, B_block)
                if of_B is not None:
                    of_B.addmm_(d.T, z[piece])
                narrow = d.to(h.dtype)
                if grad_hidden is not None:
                    grad_hidden[piece] += matmul(narrow, W, wide)
                if of_W is not None:
                    of_W += matmul(narrow.T, h, wide)
            if grad_weight is not None and of_W is not None:
                grad_weight[block] = of_W
            if grad_B is not None and of_B is not None:
                grad_B[block] = of_B
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, grad_z, grad_B, None
