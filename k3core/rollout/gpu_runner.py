"""Passes on a GPU: prefills as they come, decodes as captured CUDA graphs of fixed numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from k3core.model import packed
from k3core.model.model import Forward, K3Model
from k3core.model.state import Emit, SlotState
from k3kernels.dispatch import batch_invariant
from k3kernels.kda.triton import INACTIVE
from k3kernels.packing import Packing

MIN_ROWS = 1


@dataclass(frozen=True)
class Graph:
    """A decode of as many rows as its inputs have; `replay` reads and writes these tensors."""

    graph: torch.cuda.CUDAGraph
    tokens_N: Tensor
    slots_N: Tensor
    positions_N: Tensor
    forward: Forward
    logits_NV: Tensor


class GpuRunner:
    """Rows of a decode are rounded up to a power of two, and each such number is captured once for each adapter.

    is_invariant: products of matrices have one order for any number of rows, so a token's bits are those of the trainer's
    pass and of any other batch; without it they are torch's, and faster for few rows.
    """

    def __init__(self, model: K3Model, state: SlotState, is_invariant: bool = True) -> None:
        self.model, self.state, self.is_invariant = model, state, is_invariant
        self.device = model.embed_tokens.weight.device
        self._graphs: dict[tuple[object, int], Graph] = {}
        self._memory = torch.cuda.graph_pool_handle()

    @torch.no_grad()
    def prefill(
        self,
        tokens: Sequence[int],
        lengths: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        emits: Sequence[Emit] = (),
    ) -> Forward:
        """Pieces of prompts, packed. Nothing here waits for the device."""
        packing = Packing(tuple(lengths), self.device)
        tokens_T = torch.tensor(tokens).to(self.device, non_blocking=True)
        with batch_invariant(self.is_invariant):
            work = packed.prefill(packing, self.state, slots, positions, emits)
            return self.model.packed(tokens_T, work, None, self.state)

    @torch.no_grad()
    def decode(
        self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int], adapter: object = None
    ) -> tuple[Tensor, Tensor]:
        """One token for each: logits [N, V] and routed experts [N, L, k], which the next decode overwrites."""
        num_rows = max(MIN_ROWS, 1 << (len(tokens) - 1).bit_length())
        graph = self._graphs.get((adapter, num_rows)) or self._capture(adapter, num_rows)
        missing = num_rows - len(tokens)
        rows = torch.tensor([[*tokens, *[0] * missing], [*slots, *[INACTIVE] * missing], [*positions, *[-1] * missing]])
        rows = rows.to(torch.int32).pin_memory().to(self.device, non_blocking=True)
        graph.tokens_N.copy_(rows[0])
        graph.slots_N.copy_(rows[1])
        graph.positions_N.copy_(rows[2])
        graph.graph.replay()
        N = len(tokens)
        return graph.logits_NV[:N], graph.forward.routed_experts_TLk[:N]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        with batch_invariant(self.is_invariant), torch.no_grad():
            return self.model.logits(hidden_ND)

    def forget(self, adapter: object) -> None:
        """Graphs that were captured with an adapter's factors, which are other tensors now."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] != adapter}

    def _capture(self, adapter: object, num_rows: int) -> Graph:
        def inputs(value: int, dtype: torch.dtype) -> Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device=self.device)

        tokens_N, slots_N, positions_N = inputs(0, torch.long), inputs(INACTIVE, torch.int32), inputs(-1, torch.int32)

        def step() -> tuple[Forward, Tensor]:
            forward = self.model.packed(tokens_N, packed.decode(self.state, slots_N, positions_N), None, self.state)
            return forward, self.model.logits(forward.hidden_TD)

        with ExitStack() as stack:
            stack.enter_context(batch_invariant(self.is_invariant))
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()  # compiles; all rows are inactive, so nothing changes
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory):
                forward, logits_NV = step()
        captured = Graph(graph, tokens_N, slots_N, positions_N, forward, logits_NV)
        self._graphs[adapter, num_rows] = captured
        return captured
