"""Packed sequences: T tokens of N sequences end to end, without a batch dimension."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Lengths of the N sequences that lie end to end in a packed tensor; all at least 1.

    seq_T, pos_T: the sequence of each token and its place in it. All tensors lie on `device`, which is that of the
    packed tensors. pad/unpad move between [T, ...] and [N, length, ...] with right padding; both are gathers in both
    directions, so gradients are exact and ordered.
    """

    lengths: tuple[int, ...]
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        assert min(self.lengths, default=0) > 0, self.lengths

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def max_length(self) -> int:
        return max(self.lengths)

    @cached_property
    def lengths_N(self) -> Tensor:
        return torch.tensor(self.lengths, device=self.device)

    @cached_property
    def starts_N(self) -> Tensor:
        return self.lengths_N.cumsum(0) - self.lengths_N

    @cached_property
    def seq_T(self) -> Tensor:
        """The number of tokens is given, or a GPU would have to be waited for to know it."""
        sequences_N = torch.arange(self.num_sequences, device=self.device)
        return torch.repeat_interleave(sequences_N, self.lengths_N, output_size=self.num_tokens)

    @cached_property
    def pos_T(self) -> Tensor:
        return torch.arange(self.num_tokens, device=self.device) - self.starts_N[self.seq_T]

    @cached_property
    def last_N(self) -> Tensor:
        """Index of each sequence's last token in the packed tensor."""
        return self.starts_N + self.lengths_N - 1

    def pad(self, x_T: Tensor, length: int) -> Tensor:
        """[T, ...] to [N, length, ...], zeros to the right of each sequence."""
        if self.num_tokens == self.num_sequences * length:
            return x_T.unflatten(0, (self.num_sequences, length))
        out: Tensor = _Pad.apply(x_T, self.seq_T * length + self.pos_T, self.num_sequences * length)
        return out.unflatten(0, (self.num_sequences, length))

    def unpad(self, x_NL: Tensor) -> Tensor:
        """[N, length, ...] back to [T, ...]; the padding receives no gradient."""
        length = x_NL.shape[1]
        if self.num_tokens == self.num_sequences * length:
            return x_NL.flatten(0, 1)
        out: Tensor = _Unpad.apply(x_NL.flatten(0, 1), self.seq_T * length + self.pos_T)
        return out


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_T, index_T, rows):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(index_T)
        out = x_T.new_zeros((rows, *x_T.shape[1:]))
        out[index_T] = x_T
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (index_T,) = ctx.saved_tensors
        return grad.index_select(0, index_T), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index_T):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(index_T)
        ctx.rows = x.shape[0]
        return x.index_select(0, index_T)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (index_T,) = ctx.saved_tensors
        out = grad.new_zeros((ctx.rows, *grad.shape[1:]))
        out[index_T] = grad
        return out, None
