"""Two switches for bits: the same in every run, and the same whatever shares the batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from k3kernels.dispatch import batch_invariant

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACE = ":4096:8"  # with one of its own for each stream, cuBLAS chooses its sums alike every time


@dataclass(frozen=True, slots=True)
class Numerics:
    """deterministic: equal inputs in equal batches give equal bits, run after run. batch_invariant: so do equal inputs in
    any batch, which an engine and its trainer need to agree, since they never compute the same one.

    Both always hold on the CPU: nothing there is a race, and rows are rounded up (`k3core.model.model.ROWS`). On a GPU
    each costs time. An engine reads the second once, when it is made (`K3Engine.is_invariant`).
    """

    deterministic: bool = True
    batch_invariant: bool = True

    @contextmanager
    def scope(self, device: torch.device | str) -> Iterator[None]:
        """In force for all threads while it is open, and as before afterwards.

        On a GPU products are never cut to TF32 or added up in bf16. cuBLAS reads its workspace when a process first uses
        it, so the first scope comes before the first product. Under `deterministic` torch warns of an operation that has
        no such form: there is one, the cumulative sum that a token is drawn from, which decides the draw and no logprob.
        """
        with ExitStack() as stack:
            stack.enter_context(batch_invariant(self.batch_invariant))
            if torch.device(device).type == "cuda":
                stack.enter_context(_whole_sums())
                if self.deterministic:
                    stack.enter_context(_deterministic())
            yield


@contextmanager
def _whole_sums() -> Iterator[None]:
    products = torch.backends.cuda.matmul
    before = products.allow_tf32, products.allow_bf16_reduced_precision_reduction
    products.allow_tf32 = products.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        products.allow_tf32, products.allow_bf16_reduced_precision_reduction = before


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(WORKSPACE)
    os.environ.setdefault(WORKSPACE, FIXED_WORKSPACE)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        if workspace is None:
            del os.environ[WORKSPACE]
