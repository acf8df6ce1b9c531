"""Passes on a GPU as captured CUDA graphs: decodes of fixed numbers of rows, prefills of fixed numbers of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3core.model import packed
from k3core.model.model import Forward, K3Model
from k3core.model.state import SlotState
from k3core.rollout.runner import Pieces
from k3kernels.dispatch import batch_invariant
from k3kernels.kda.triton import INACTIVE

PREFILL_TOKENS = (128, 512, 2048, 8192)  # a longer prefill is not captured
PREFILL_SEQUENCES = (8, 64)


@dataclass(frozen=True)
class Graph:
    """`replay` reads `inputs`, int32 in one piece, and writes the outputs. logits_NV: of a decode only."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    forward: Forward
    logits_NV: Tensor | None


class GpuRunner:
    """Rows of a decode are rounded up to a power of two, tokens and sequences of a prefill to one of a few sizes; each
    size is captured once for each adapter, when it first comes.

    is_invariant: products of matrices have one order for any number of rows, so a token's bits are those of the trainer's
    pass and of any other batch; without it they are torch's.
    """

    def __init__(self, model: K3Model, state: SlotState, is_invariant: bool = True) -> None:
        self.model, self.state, self.is_invariant = model, state, is_invariant
        self.device = model.embed_tokens.weight.device
        self._graphs: dict[tuple[object, str, int, int], Graph] = {}
        self._memory = torch.cuda.graph_pool_handle()

    @torch.no_grad()
    def prefill(self, pieces: Pieces) -> Forward:
        wanted = [(emit.n, emit.position, emit.checkpoint) for emit in pieces.emits]
        T, N = len(pieces.tokens), len(pieces.lengths)
        num_tokens = next((size for size in PREFILL_TOKENS if size >= T), T)
        num_sequences = next((size for size in PREFILL_SEQUENCES if size >= N and 2 * size >= len(wanted)), None)
        plan = packed.PrefillPlan(num_tokens, num_sequences or N, 2 * num_sequences if num_sequences else len(wanted))
        values = torch.tensor(
            plan.values(pieces.tokens, pieces.lengths, pieces.slots, pieces.positions, wanted), dtype=torch.int32
        )
        values = values.pin_memory().to(self.device, non_blocking=True)
        if num_sequences is None or num_tokens not in PREFILL_TOKENS:
            with batch_invariant(self.is_invariant):
                forward = self._prefill_of(plan, values)
        else:
            graph = self._graph(
                (pieces.adapter, "prefill", num_tokens, num_sequences),
                plan.nothing(),
                lambda inputs: (self._prefill_of(plan, inputs), None),
            )
            graph.inputs.copy_(values)
            graph.graph.replay()
            forward = graph.forward
        return Forward(forward.hidden_TD[:T], forward.routed_experts_TLk[:T])

    @torch.no_grad()
    def decode(
        self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int], adapter: object = None
    ) -> tuple[Tensor, Tensor]:
        """One token for each: logits [N, V] and routed experts [N, L, k], which the next decode overwrites."""
        N = len(tokens)
        graph = self.decode_graph(N, adapter)
        missing = graph.inputs.shape[1] - N
        rows = [[*tokens, *[0] * missing], [*slots, *[INACTIVE] * missing], [*positions, *[0] * missing]]
        graph.inputs.copy_(torch.tensor(rows, dtype=torch.int32).pin_memory(), non_blocking=True)
        graph.graph.replay()
        assert graph.logits_NV is not None
        return graph.logits_NV[:N], graph.forward.routed_experts_TLk[:N]

    def decode_graph(self, N: int, adapter: object = None) -> Graph:
        num_rows = 1 << (N - 1).bit_length()
        return self._graph(
            (adapter, "decode", num_rows, num_rows),
            [[0] * num_rows, [INACTIVE] * num_rows, [0] * num_rows],
            self._decode_of,
        )

    def logits(self, hidden_ND: Tensor) -> Tensor:
        with batch_invariant(self.is_invariant), torch.no_grad():
            return self.model.logits(hidden_ND)

    def forget(self, adapter: object) -> None:
        """Graphs that were captured with an adapter's factors, which are other tensors now."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] != adapter}

    def _prefill_of(self, plan: packed.PrefillPlan, inputs: Tensor) -> Forward:
        tokens_T, work = plan.work(inputs, self.state)
        return self.model.packed(tokens_T, work, None, self.state)

    def _decode_of(self, inputs: Tensor) -> tuple[Forward, Tensor | None]:
        tokens_N, slots_N, positions_N = inputs
        forward = self.model.packed(tokens_N, packed.decode(self.state, slots_N, positions_N), None, self.state)
        return forward, self.model.logits(forward.hidden_TD)

    def _graph(
        self,
        key: tuple[object, str, int, int],
        nothing: list[int] | list[list[int]],
        step: Callable[[Tensor], tuple[Forward, Tensor | None]],
    ) -> Graph:
        """nothing: inputs under which no sequence takes part, so that a trial changes nothing."""
        if key in self._graphs:
            return self._graphs[key]
        inputs = torch.tensor(nothing, dtype=torch.int32, device=self.device)
        with batch_invariant(self.is_invariant), torch.no_grad():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step(inputs)  # compiles
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory):
                forward, logits_NV = step(inputs)
        self._graphs[key] = Graph(graph, inputs, forward, logits_NV)
        return self._graphs[key]
