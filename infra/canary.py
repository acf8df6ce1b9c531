"""The canary: a few sequences that an engine samples from a version before anybody is shown it, computed again by the trainer.

Equal weights do not make equal numbers: an operation that went wrong in one of the two forms, a cache that gives back
another state. What differs here is numeric drift, and every rollout of the version would carry it into its ratios.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from k3core.rollout.protocol import GenerateRequest
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


def compare_canary(context: Context, version: PolicyVersion, optimizer: Ref | None, limit: float) -> Canary:
    """This process's engine against its trainer, both at `version`; optimizer: the state that the trainer goes on with.

    Raises NumericDrift, which names the first module that differs, when logprobs differ by more than `limit` nats.
    """
    engine = context.pool.engine_at(version, context.tokenizer())
    trainer = context.pool.trainer_at(version, optimizer)
    with Numerics().scope(trainer.device):
        played = sample_canary(engine, canary_prompts(context, engine.max_length), context.cfg.seed)
        case = compare("canary", played, trainer.model)
    found = Canary(case.num_tokens, case.num_differing, case.max_abs)
    if not found.is_within(limit):
        raise NumericDrift(
            f"step {version.step}: {found.num_differing} of {found.num_tokens} canary logprobs differ by up to"
            f" {found.max_abs:.2g} nat; {_first(trainer.model, engine, played)};"
            f" publish.max_numeric_drift allows {limit:g}"
        )
    return found


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
        return "none differs when they are computed again from nothing: look at the prefix cache"
    return f"first at {found}"
