"""What an engine is asked and what it answers, whoever it is: ours in this process, or a server's client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from k3core.model.lora import LoraConfig
from k3core.types import SamplingParams

UpdateRule = Literal["drop", "keep", "continue"]
"""What becomes of histories that older weights computed. drop: they are computed again, for running turns too. keep: as
drop, but they serve again when those weights come back. continue: they go on under the new weights, counted as stale."""

Stop = Literal["end_of_turn", "stop", "max_tokens", "max_length"]
"""end_of_turn: the tokenizer's own; stop: a text or an id of the sampling parameters."""


class UnknownAdapter(ValueError):
    """No adapter of that name is loaded."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """logprob under the distribution that it was drawn from, raw_logprob under softmax of the logits as they were.

    support: the ids that sampling had kept, int32 and ascending; None for the whole vocabulary.
    """

    token: int
    logprob: float
    raw_logprob: float
    policy_step: int
    support: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn. `tokens` is the whole history, of which the engine finds again what it has seen.

    Token i of a sequence is drawn with number i of the seed's stream; num_drawn of them were drawn in earlier turns.
    adapter: its name, None for the policy alone. Tenants never read each other's histories. priority 0 is the most
    urgent. on_token hears each token once, in order, as it is drawn; it must not block.
    """

    sequence: str
    tokens: Sequence[int]
    sampling: SamplingParams
    seed: int
    num_drawn: int = 0
    adapter: str | None = None
    tenant: str = ""
    priority: int = 0
    on_token: Callable[[SampledToken], None] | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """What one turn produced.

    logprobs_T are under the sampling distribution, raw_logprobs_T under softmax of the logits; policy_step_T is the
    version that drew each token; supports as in SampledToken. num_cached: tokens of the history that were not computed
    for this turn. routed_experts_TLk has a row for every input: the history and all drawn tokens but the last;
    routed_layers names the layers, in order. matched: the text or id of stop "stop".
    """

    tokens_T: np.ndarray
    logprobs_T: np.ndarray
    raw_logprobs_T: np.ndarray
    policy_step_T: np.ndarray
    supports: tuple[np.ndarray | None, ...]
    num_cached: int
    routed_experts_TLk: np.ndarray
    routed_layers: tuple[str, ...]
    stop: Stop
    matched: str | int | None = None


class Engine(Protocol):
    """Any engine: ours in this process, or a server's client."""

    @property
    def policy_step(self) -> int: ...

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of those that are loaded."""

    def load(
        self, step: int, tensors: Mapping[str, Tensor], rule: UpdateRule = "drop", base_sha256: str | None = None
    ) -> None:
        """Serve these weights from now on, running turns too: from one token to the next.

        base_sha256: the weights' digest, by which `keep` finds their histories again.
        """

    def load_adapter(self, name: str, tensors: Mapping[str, Tensor], config: LoraConfig) -> None:
        """Serve this adapter beside the policy, in place of an older one of that name. Raises ValueError where it does
        not fit, and changes nothing."""

    def unload_adapter(self, name: str) -> None:
        """Its running turns fail with UnknownAdapter, as does asking for one that is not loaded."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """One turn. When the caller is cancelled, the turn leaves the batch."""

    def release(self, sequence: str) -> None:
        """End a sequence's turn, whatever it is doing. One that is not known is no error."""
