"""The canary: a few sequences that an engine samples from a version before anybody is shown it, computed again by the trainer.

Equal weights do not make equal numbers: an operation that went wrong in one of the two forms, a cache that gives back
another state. What differs here is numeric drift, and every rollout of the version would carry it into its ratios.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infra.parts import build_environment, chat_settings, train_prompts
from infra.stages.context import Context
from k3core.chat import chat_format
from k3core.errors import RunError
from k3core.first_difference import first_difference
from k3core.model.model import K3Model
from k3core.model.numerics import Numerics
from k3core.parity import Played, compare, play
from k3core.rollout.engine import K3Engine
from k3core.rollout.episodes import trajectory_seed
from k3core.rollout.protocol import GenerateRequest, Generation
from k3core.types import PolicyVersion, Ref, SamplingParams

NUM_PROMPTS = 4
NUM_TURNS = 2  # the second finds the first in the cache
MAX_NEW = 16
MAX_PROMPT = 256  # tokens; of longer prompts their beginning


class NumericDrift(RunError):
    """The engine's log-probabilities are not the trainer's, at equal weights. Another try would end the same way."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Of num_tokens sampled tokens: how many fp32 logprobs differ in any bit, and by how many nats at most."""

    num_tokens: int
    num_differing: int
    max_abs: float

    def is_within(self, limit: float) -> bool:
        """limit 0 asks for equal bits; what is not a number is within nothing."""
        return self.num_differing == 0 if limit == 0 else self.max_abs <= limit

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "publish/canary_tokens": float(self.num_tokens),
            "publish/canary_differing": float(self.num_differing),
            "publish/canary_max_abs": self.max_abs,
        }

    def __add__(self, other: Canary) -> Canary:
        """Of two engines together."""
        counts = (self.num_tokens + other.num_tokens, self.num_differing + other.num_differing)
        return Canary(*counts, max(self.max_abs, other.max_abs))


def play_canary(context: Context, version: PolicyVersion) -> list[Played]:
    """What this process's engine samples at `version`."""
    engine = context.pool.engine_at(version, context.tokenizer())
    with Numerics().scope(engine.device):
        return sample_canary(engine, canary_prompts(context, engine.max_length), context.cfg.seed)


def compare_canary(
    context: Context, version: PolicyVersion, optimizer: Ref | None, limit: float, played: Sequence[Played], at: str
) -> Canary:
    """What an engine (named `at`) sampled against this process's trainer, both at `version`; optimizer: the state that the
    trainer goes on with.

    Raises NumericDrift when logprobs differ by more than `limit` nats. It names the first module that differs between the
    trainer and this process's own engine, which for that is brought to `version`.
    """
    trainer = context.pool.trainer_at(version, optimizer)
    with Numerics().scope(trainer.device):
        case = compare("canary", played, trainer.model)
    found = Canary(case.num_tokens, case.num_differing, case.max_abs)
    if not found.is_within(limit):
        engine = context.pool.engine_at(version, context.tokenizer())
        raise NumericDrift(
            f"step {version.step}: {found.num_differing} of {found.num_tokens} canary logprobs of engine {at} differ by"
            f" up to {found.max_abs:.2g} nat; {_first(trainer.model, engine, played)};"
            f" publish.max_numeric_drift allows {limit:g}"
        )
    return found


_ARRAYS = ("tokens_T", "logprobs_T", "raw_logprobs_T", "policy_step_T", "routed_experts_TLk")


def to_text(played: Sequence[Played]) -> str:
    """Turns of a canary for another process, every bit of their arrays kept: an npz archive in base64."""
    arrays: dict[str, np.ndarray] = {}
    for n, each in enumerate(played):
        arrays[f"{n}/prompt"] = np.array(each.request.tokens, np.int64)
        arrays[f"{n}/routed_layers"] = np.array(each.generation.routed_layers, np.str_)
        arrays |= {f"{n}/{name}": getattr(each.generation, name) for name in _ARRAYS}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # names are keywords
    return base64.b64encode(buffer.getvalue()).decode()


def from_text(text: str) -> list[Played]:
    """Of `to_text`, without sequences' names and seeds, which a comparison does not read."""
    with np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) as arrays:
        count = len({name.partition("/")[0] for name in arrays.files})
        return [
            _turn({name.partition("/")[2]: arrays[name] for name in arrays.files if name.startswith(f"{n}/")})
            for n in range(count)
        ]


def _turn(arrays: dict[str, np.ndarray]) -> Played:
    drawn = len(arrays["tokens_T"])
    request = GenerateRequest("canary", arrays["prompt"].tolist(), SamplingParams(max_tokens=MAX_NEW), 0)
    found = Generation(
        arrays["tokens_T"],
        arrays["logprobs_T"],
        arrays["raw_logprobs_T"],
        arrays["policy_step_T"],
        supports=(None,) * drawn,
        num_cached=0,
        routed_experts_TLk=arrays["routed_experts_TLk"],
        routed_layers=tuple(arrays["routed_layers"].tolist()),
        stop="max_tokens",
    )
    return Played(request, found)


def canary_prompts(context: Context, max_length: int) -> list[list[int]]:
    """Of the run's first training prompts, cut where turns would not fit: the same in every step."""
    cfg, tokenizer = context.cfg, context.tokenizer()
    chat, settings = chat_format(tokenizer), chat_settings(cfg, build_environment(cfg), tokenizer)
    stub = chat.generation_stub(settings.thinking)
    length = max(1, min(MAX_PROMPT, max_length - NUM_TURNS * (MAX_NEW + len(stub)) - 1))
    prompts = train_prompts(cfg, 0, 0)[:NUM_PROMPTS]
    return [[*chat.render_messages(prompt.messages, settings), *stub][:length] for prompt in prompts]


def sample_canary(engine: K3Engine, prompts: Sequence[Sequence[int]], seed: int) -> list[Played]:
    """NUM_TURNS turns of each prompt, those of one turn in one batch."""
    played: list[Played] = []
    histories = [list(prompt) for prompt in prompts]
    for turn in range(NUM_TURNS):
        sampling = SamplingParams(max_tokens=MAX_NEW)
        requests = [
            GenerateRequest(f"canary/{n}", history, sampling, trajectory_seed(seed, "canary", n, turn))
            for n, history in enumerate(histories)
        ]
        played += play(engine, requests)
        histories = [each.tokens for each in played[-len(prompts) :]]
    return played


def _first(trainer: K3Model, engine: K3Engine, played: Sequence[Played]) -> str:
    """Both models compute the canary's histories again, without a cache."""
    engine.served_tensors()  # from here on with the policy's own branches, and no adapter's
    histories, prompts = [each.tokens for each in played], [len(each.request.tokens) for each in played]
    found = first_difference(trainer, engine.model, histories, prompts)
    if found is None:
        return (
            "none differs when this process computes them again from nothing: look at that engine's prefix cache,"
            " or at its machine"
        )
    return f"first at {found}"
