"""Log-probabilities of given tokens under a linear head: the definition over whole logits, and block by block."""

from __future__ import annotations

from torch import Tensor

from k3kernels.dispatch import is_batch_invariant, uses_kernel
from k3kernels.linear_logprob import eager
from k3kernels.linear_logprob.eager import MAX_LOGITS as MAX_LOGITS
from k3kernels.linear_logprob.wide import MAX_WEIGHT as MAX_WEIGHT
from k3kernels.linear_logprob.wide import wide_logits as wide_logits


def linear_logprob(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    tokens_M: Tensor,
    temperature: float = 1.0,
    low_rank: eager.LowRank | None = None,
) -> Tensor:
    """See `eager.linear_logprob`; on a GPU in kernels where they take the inputs, see `triton.takes`."""
    return linear_logprob_and_entropy(hidden_MD, weight_VD, tokens_M, temperature, low_rank, with_entropy=False)[0]


def linear_logprob_and_entropy(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    tokens_M: Tensor,
    temperature: float = 1.0,
    low_rank: eager.LowRank | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """`linear_logprob` and each row's entropy -sum p log p in nats, fp32 [M] (zeros without with_entropy)."""
    if uses_kernel(hidden_MD) and not is_batch_invariant() and low_rank is None:
        from k3kernels.linear_logprob import triton  # where there is no GPU, Triton need not be installed

        if triton.takes(hidden_MD, weight_VD, temperature):
            return triton.linear_logprob_and_entropy(hidden_MD, weight_VD, tokens_M, temperature, with_entropy)
    return eager.linear_logprob_and_entropy(hidden_MD, weight_VD, tokens_M, temperature, low_rank, with_entropy)
