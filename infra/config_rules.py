"""Which settings do not go together. Each rule names all the settings that it is about."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from infra.settings import sampling_of
from k3core.eval.suite import NUM_PROMPTS
from k3core.model.config import MXFP4
from k3core.model.rules import model_problems
from k3core.rl.gspo import GspoConfig
from k3core.rollout import sampling_rules

if TYPE_CHECKING:  # infra.config calls these rules
    from infra.config import RunConfig

SCHEMES = ("file", "memory", "s3")
TRACKING_URI = "MLFLOW_TRACKING_URI"
API_URL = "PREFECT_API_URL"

# Between two sound implementations of one model a token's log-probability differs by about this much (nat).
TOKEN_NOISE = 0.04

SUPERVISED = "supervised steps train all parameters, and packed experts cannot be trained"

Problem = tuple[tuple[str, ...], str]  # the settings it is about, its line


def contradictions(cfg: RunConfig, written: Collection[str]) -> Iterator[Problem]:
    """Settings that are each fine and cannot be honoured as they stand: (the settings, one line)."""
    for keys, line in model_problems(cfg.model, lambda key: f"model.{key}"):
        yield tuple(f"model.{key}" for key in keys), line
    yield from _packed_problems(cfg)
    yield from _gspo_problems(cfg.gspo)

    scheme, separator, _ = cfg.root.partition("://")
    if separator and scheme not in SCHEMES:
        yield ("root",), f"root: must be a folder or one of file://, memory://, s3://, got {json.dumps(cfg.root)}"
    elif separator and scheme != "file" and cfg.tracking.mlflow_uri is None and not os.environ.get(TRACKING_URI):
        yield (
            ("root", "tracking.mlflow_uri"),
            f"root {cfg.root} and tracking.mlflow_uri none: no SQLite file can lie there; set tracking.mlflow_uri, "
            f"or {TRACKING_URI} in the environment",
        )
    yield from _pool_problems(cfg)
    if (init := cfg.warm_start.init) is not None:
        for key in sorted(key for key in written if key.startswith("tokenizer.")):
            yield (
                (key, "warm_start.init"),
                f"{key} and warm_start.init {json.dumps(init)}: the tokenizer is the checkpoint's; remove the line",
            )
    elif cfg.tokenizer.vocab_size > cfg.model.vocab_size:
        yield (
            ("tokenizer.vocab_size", "model.vocab_size"),
            f"tokenizer.vocab_size {cfg.tokenizer.vocab_size} and model.vocab_size {cfg.model.vocab_size}: "
            "the model has no embedding for the last tokens",
        )

    env = cfg.environment
    if env.max_turn_tokens > env.max_tokens:
        yield (
            ("environment.max_turn_tokens", "environment.max_tokens"),
            f"environment.max_turn_tokens {env.max_turn_tokens} and environment.max_tokens {env.max_tokens}: "
            "one turn cannot be longer than the whole episode",
        )
    if env.name == "lab" and env.path is None:
        yield (
            ("environment.name", "environment.path"),
            'environment.name "lab" and environment.path none: set environment.path to a checkout of the benchmark',
        )
    if env.name != "lab" and env.path is not None:
        yield (
            ("environment.name", "environment.path"),
            f'environment.name "{env.name}" and environment.path {json.dumps(env.path)}: only "lab" reads a path',
        )
    if cfg.chat.thinking_effort is not None and not cfg.chat.thinking:
        yield (
            ("chat.thinking_effort", "chat.thinking"),
            f'chat.thinking_effort "{cfg.chat.thinking_effort}" and chat.thinking false: there is nothing to think; '
            "set chat.thinking=true or remove it",
        )
    if cfg.warm_start.steps == 0 and cfg.warm_start.init is None:
        yield (
            ("warm_start.steps", "warm_start.init"),
            "warm_start.steps 0 and warm_start.init none: a random policy earns no reward to learn from; "
            "set one of them",
        )

    rollout, train = cfg.rollout, cfg.train
    if rollout.group_size < 2:
        yield (
            ("rollout.group_size",),
            "rollout.group_size 1 and gspo: advantages are differences within a group, and a group of one has none; "
            "use at least 2",
        )
    yield from _sampling_problems(cfg)
    trajectories = rollout.prompts_per_step * rollout.group_size
    if train.minibatches > trajectories:
        yield (
            ("train.minibatches", "rollout.prompts_per_step", "rollout.group_size"),
            f"train.minibatches {train.minibatches} and rollout.prompts_per_step x rollout.group_size = "
            f"{trajectories}: a minibatch holds at least one trajectory",
        )
    if train.mode != "lora":
        for key in sorted(key for key in written if key.startswith("train.lora_")):
            yield (
                (key, "train.mode"),
                f'{key} and train.mode "{train.mode}": only mode "lora" reads it; set train.mode or remove it',
            )
    if cfg.evaluate.every > cfg.steps:
        yield (
            ("evaluate.every", "steps"),
            f"evaluate.every {cfg.evaluate.every} and steps {cfg.steps}: no step would be evaluated on the way; "
            "use evaluate.every <= steps",
        )
    if env.name == "contracts" and cfg.evaluate.prompts > NUM_PROMPTS:
        yield (
            ("evaluate.prompts", "environment.name"),
            f'evaluate.prompts {cfg.evaluate.prompts} and environment.name "contracts": its frozen suite has '
            f"{NUM_PROMPTS} prompts",
        )


def warnings(cfg: RunConfig) -> tuple[str, ...]:
    """Settings that are honoured, and that one should know the consequence of. One line each."""
    found: list[str] = []
    noise = 3 * TOKEN_NOISE / math.sqrt(cfg.environment.max_tokens)
    narrowest = min(cfg.gspo.clip_low, cfg.gspo.clip_high)
    if cfg.gspo.tis_cap is None and narrowest < noise:
        found.append(
            f"gspo.tis_cap none, gspo.clip_low {cfg.gspo.clip_low:g} and gspo.clip_high {cfg.gspo.clip_high:g}: engine "
            f"and trainer may differ by {noise:.2g} in a sequence's ratio at equal weights, which is more than the "
            "clip lets the policy move and which nothing then corrects; set gspo.tis_cap, or clip no closer than that"
        )
    sequences = cfg.steps * cfg.rollout.prompts_per_step * cfg.rollout.group_size
    if cfg.control.enabled and cfg.control.sequences != sequences:
        found.append(
            f"control.sequences {cfg.control.sequences} and steps x rollout.prompts_per_step x rollout.group_size = "
            f"{sequences}: the control arm does not see as many sequences as RL does"
        )
    if cfg.evaluate.temperature == 0 and cfg.evaluate.samples > 1:
        found.append(
            f"evaluate.temperature 0 and evaluate.samples {cfg.evaluate.samples}: without chance all samples of a prompt are "
            "the same; one is enough"
        )
    if cfg.environment.name == "lab":
        found.append(
            "environment.name lab: its tasks are a benchmark, so training on them spoils it as one; and the only judge"
            " so far evaluates criteria with a `check`, so tasks without one are not graded"
        )
    return tuple(found)


def _pool_problems(cfg: RunConfig) -> Iterator[Problem]:
    pools = {f"pools.{kind}": getattr(cfg.pools, kind) for kind in ("cpu", "rollout", "train")}
    named = [key for key, pool in pools.items() if pool is not None]
    if named and cfg.root.startswith("memory://"):
        yield (*named, "root"), f"{named[0]} {pools[named[0]]} and root {cfg.root}: other processes cannot read it"
    if cfg.rollout.engine_processes > 1 and cfg.root.startswith("memory://"):
        yield (
            ("rollout.engine_processes", "root"),
            f"rollout.engine_processes {cfg.rollout.engine_processes} and root {cfg.root}: other processes cannot read "
            "it; use rollout.engine_processes=1",
        )
    if not named and cfg.evaluate.between:
        yield (
            ("evaluate.between", "pools.rollout"),
            "evaluate.between true and pools none: only an automation of a Prefect server evaluates between the turns;"
            " name the work pools, or lower evaluate.every",
        )
    if cfg.gates.approve_promotion and not named and not os.environ.get(API_URL):
        yield (
            ("gates.approve_promotion",),
            f"gates.approve_promotion true and no Prefect server: nobody could approve; set {API_URL}",
        )
    for url in cfg.pools.engines:
        if not url.startswith(("http://", "https://")):
            yield ("pools.engines",), f"pools.engines: expected http:// addresses, got {json.dumps(url)}"


def _sampling_problems(cfg: RunConfig) -> Iterator[Problem]:
    """What no type of a single setting says. The trainer follows every positive temperature and every truncation of our
    engine, which records what it kept; a batch without that record is refused where it is packed."""
    for name, section in (("rollout", cfg.rollout), ("evaluate", cfg.evaluate)):
        for line in sampling_rules.problems(sampling_of(section, cfg.environment)):
            yield (f"{name}.{line.split()[0]}",), f"{name}.{line}"
        for token in section.stop_token_ids:
            if token >= cfg.model.vocab_size:
                yield (
                    (f"{name}.stop_token_ids", "model.vocab_size"),
                    f"{name}.stop_token_ids {token} and model.vocab_size {cfg.model.vocab_size}: no such token is ever "
                    "drawn; use ids below it",
                )


def _packed_problems(cfg: RunConfig) -> Iterator[Problem]:
    """Packed experts stay as a checkpoint brought them."""
    if cfg.model.expert_quantization != MXFP4:
        return
    said = f"model.expert_quantization {MXFP4}"
    if cfg.warm_start.init is None:
        yield (
            ("model.expert_quantization", "warm_start.init"),
            f"{said} and warm_start.init none: only a checkpoint brings packed experts; set one of them",
        )
    if cfg.train.mode != "lora":
        yield (
            ("model.expert_quantization", "train.mode"),
            f'{said} and train.mode "{cfg.train.mode}": packed experts cannot be trained; set it to none, or train.mode'
            ' to "lora"',
        )
    if cfg.warm_start.init is not None and cfg.warm_start.steps > 0:
        yield (
            ("warm_start.steps", "model.expert_quantization"),
            f"warm_start.steps {cfg.warm_start.steps} and {said}: {SUPERVISED}; set warm_start.steps to 0",
        )


def _gspo_problems(gspo: GspoConfig) -> Iterator[Problem]:
    if not 0 < gspo.clip_low < 1:
        yield ("gspo.clip_low",), f"gspo.clip_low: must be > 0 and < 1, got {gspo.clip_low:g}"
    if gspo.clip_high <= 0:
        yield ("gspo.clip_high",), f"gspo.clip_high: must be > 0, got {gspo.clip_high:g}"
    elif gspo.dual_clip is not None and gspo.dual_clip <= 1 + gspo.clip_high:
        yield (
            ("gspo.dual_clip", "gspo.clip_high"),
            f"gspo.dual_clip {gspo.dual_clip:g} and gspo.clip_high {gspo.clip_high:g}: the dual clip bounds ratios "
            "that the clip lets through, so it must be > 1 + clip_high (3 is customary)",
        )
    if gspo.mask_ratio_above is not None and gspo.mask_ratio_above <= 1:
        yield (
            ("gspo.mask_ratio_above",),
            f"gspo.mask_ratio_above: must be > 1 or none (an unchanged token has ratio 1), "
            f"got {gspo.mask_ratio_above:g}",
        )
    if gspo.tis_cap is not None and gspo.tis_cap < 1:
        yield (
            ("gspo.tis_cap",),
            f"gspo.tis_cap: must be >= 1 or none (equal log-probabilities weigh 1), got {gspo.tis_cap:g}",
        )
