"""The nouns that travel between stages. Torch-free; a stage makes new values and never edits old ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

StopReason = Literal[
    "finished",  # the agent called `finish`
    "no_tool_call",  # an assistant turn without any call ends the episode
    "parse_error",  # a turn that is not well formed in the tokenizer's chat format
    "max_turns",
    "max_turn_tokens",  # a turn hit its token limit before its end
    "max_tokens",  # the whole history hit its limit
    "timeout",
    "infrastructure_error",  # ours, not the policy's: never graded
]
TRUNCATED: frozenset[str] = frozenset({"max_turns", "max_turn_tokens", "max_tokens", "timeout"})

Verdict = Literal["pass", "fail", "abstained", "infrastructure_error"]
PolicyKind = Literal["base", "delta", "adapter"]


@dataclass(frozen=True, slots=True)
class Ref:
    """Bytes in a store: where they are and what they must hash to."""

    uri: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of an assistant turn. `arguments` is None when they could not be parsed; `error` then says why.

    id: what the policy called the call, in a chat format that has ids; None for the one that its place gives it.
    unparsed: the text that stands where an object of arguments belongs; only with `arguments` None, and None there too
    when no such text can be told.
    """

    name: str
    arguments: Mapping[str, Any] | None
    error: str | None = None
    id: str | None = None
    unparsed: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. `tool` and `index` (1-based) are set on role "tool" only; `type` on typed system messages."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool: str | None = None
    index: int | None = None
    type: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem. `hidden` never reaches the agent: rubric, answers, the documents' contents before they are laid out."""

    id: str
    environment: str
    messages: tuple[Message, ...]
    hidden: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Log-probabilities are reported under exactly this distribution.

    temperature 0 takes the likeliest token, with log-probability 0: the distribution has one token. top_k 0, top_p 1 and
    min_p 0 mean off; min_p is a share of the likeliest token's probability. max_tokens bounds one turn, which also ends
    at a text in `stop` or after a token in `stop_token_ids`; both are beside the tokenizer's own end of a turn.
    `k3core.rollout.sampling_rules` says which values make sense.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 96
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Supports:
    """Which tokens top-k, top-p and min-p had kept at each of T positions.

    ids_K int32: the kept ids, position after position, ascending within each; counts_T int32: how many of them are each
    position's. What is kept is never empty: 0 says that the whole vocabulary was, or that nothing was sampled.
    """

    ids_K: np.ndarray
    counts_T: np.ndarray

    @classmethod
    def of_rows(cls, rows: Sequence[np.ndarray | None]) -> Supports:
        """From the kept ids of each position, None for the whole vocabulary."""
        kept = [row for row in rows if row is not None]
        ids_K = np.concatenate([np.empty(0, np.int32), *kept]).astype(np.int32)
        return cls(ids_K, np.array([0 if row is None else len(row) for row in rows], dtype=np.int32))

    def rows(self) -> list[np.ndarray | None]:
        """The inverse of `of_rows`; views."""
        pieces = np.split(self.ids_K, np.cumsum(self.counts_T))[: len(self.counts_T)]
        return [piece if len(piece) else None for piece in pieces]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode as tokens. All arrays have the episode's length T; numpy, so that no reader needs torch.

    tokens_T int32; loss_mask_T bool, true where the policy sampled the token;
    rollout_logprobs_T float32, 0 where not sampled: under the distribution that the token was drawn from;
    raw_logprobs_T the same under softmax of the untouched logits; policy_step_T int32, -1 where not sampled;
    supports: what sampling had kept, without which a trainer cannot follow a truncated distribution;
    routed_experts_TLk, unsigned, chosen expert ids of each MoE layer when that token was the input,
    the dtype's maximum where there is none (the last token was never an input); routed_layers names those layers in
    order, as the checkpoint does, so that a replay cannot impose one layer's choice on another.
    deliverables: text of the files that the rubric grades, as they stood at the end.
    """

    prompt_id: str
    sample: int
    seed: int
    tokens_T: np.ndarray
    loss_mask_T: np.ndarray
    rollout_logprobs_T: np.ndarray
    routed_experts_TLk: np.ndarray
    policy_step_T: np.ndarray
    sampling: SamplingParams
    stop_reason: StopReason
    num_turns: int
    num_tool_calls: int
    deliverables: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None
    routed_layers: tuple[str, ...] = ()
    raw_logprobs_T: np.ndarray | None = None  # None, here and below: not recorded, as in records of before it was
    supports: Supports | None = None


@dataclass(frozen=True, slots=True)
class CriterionResult:
    id: str
    title: str
    verdict: Verdict
    reasoning: str


@dataclass(frozen=True, slots=True)
class Score:
    """A graded trajectory. `value` is None exactly when a verdict abstained or failed for our own reasons.

    fraction: weighted share of passed criteria; value: the reward that training sees.
    """

    value: float | None
    fraction: float | None
    all_pass: bool | None
    criteria: tuple[CriterionResult, ...]
    reason: Literal["abstained", "infrastructure_error"] | None = None


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """One prompt, its trajectories and their scores, index by index."""

    prompt_id: str
    trajectories: tuple[Trajectory, ...]
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A published policy. `weights` points at the version's manifest; `weights_sha256` digests all tensors."""

    run: str
    step: int
    kind: PolicyKind
    weights: Ref
    weights_sha256: str
    parent: int | None


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Scores by prompt id, samples in order; a missing grade is None and never a number."""

    run: str
    step: int
    label: str
    suite_sha256: str
    sampling: SamplingParams
    rewards: Mapping[str, tuple[float | None, ...]]
    fractions: Mapping[str, tuple[float | None, ...]]
    all_pass: Mapping[str, tuple[bool | None, ...]]
    criteria_pass_rate: Mapping[str, float]
    stop_reasons: Mapping[str, int]
    mean_turns: float
