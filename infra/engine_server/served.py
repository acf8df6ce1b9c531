"""The engine as the server sees it, and our own engine in that form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from k3core.rollout.engine import GenerateRequest, Generation, K3Engine
from k3core.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token. raw_logprob is under temperature 1 without truncation; None where the engine does not tell."""

    token: int
    logprob: float
    raw_logprob: float | None
    policy_step: int


@dataclass(frozen=True, slots=True)
class Turn:
    """adapter: the name of one that was loaded; None for the policy itself."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """One finished turn; routed_experts_TLk as in `Generation`. is_cut: it ended at a limit, not by a stop token."""

    tokens: tuple[Sampled, ...]
    is_cut: bool
    cached_tokens: int = 0
    first_routed: int = 0
    routed_experts_TLk: np.ndarray | None = None


class ServedEngine(Protocol):
    @property
    def policy_step(self) -> int: ...

    async def generate(self, turn: Turn, on_token: Callable[[Sampled], None]) -> Served:
        """`on_token` sees every token once, in order. Cancelling the caller frees what the turn holds.

        Raises ValueError for a turn that it cannot serve; anything else is the engine's own fault.
        """


CAN_STREAM = "on_token" in {field.name for field in dataclasses.fields(GenerateRequest)}


class OwnEngine:
    """K3Engine. Each turn is a sequence of its own. Where the engine has no `on_token`, all come at the end."""

    def __init__(self, engine: K3Engine) -> None:
        self._engine = engine

    @property
    def policy_step(self) -> int:
        return self._engine.policy_step

    async def generate(self, turn: Turn, on_token: Callable[[Sampled], None]) -> Served:
        if turn.adapter is not None:
            raise ValueError(f"model {turn.adapter!r}: this engine serves no adapter beside its policy")

        def hear(token: Any) -> None:
            on_token(Sampled(token.token, token.logprob, token.raw_logprob, token.policy_step))

        more: dict[str, Any] = {"on_token": hear} if CAN_STREAM else {}
        try:
            generation = await self._engine.generate(
                GenerateRequest(turn.id, turn.prompt, turn.sampling, turn.seed, **more)
            )
        finally:
            self._engine.release(turn.id)
        tokens = _tokens(generation)
        if not CAN_STREAM:
            for token in tokens:
                on_token(token)
        return Served(
            tokens,
            is_cut=generation.stop in ("max_tokens", "max_length"),
            cached_tokens=getattr(generation, "cached_tokens", 0),
            first_routed=generation.first_routed,
            routed_experts_TLk=generation.routed_experts_TLk,
        )


def _tokens(generation: Generation) -> tuple[Sampled, ...]:
    raw_T = getattr(generation, "raw_logprobs_T", None)
    raw: list[float | None] = [None] * len(generation.tokens_T) if raw_T is None else raw_T.tolist()
    return tuple(
        Sampled(*values)
        for values in zip(
            generation.tokens_T.tolist(),
            generation.logprobs_T.tolist(),
            raw,
            generation.policy_step_T.tolist(),
            strict=True,
        )
    )
