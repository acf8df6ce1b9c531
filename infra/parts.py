"""The parts that a config names: model settings, optimizer, environment, prompts, judge. Data in, values out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from infra.config import RunConfig
from infra.init_checkpoint import folder_of
from infra.settings import sampling_of
from k3core.chat import ChatSettings, chat_format, training_texts
from k3core.envs.contracts import ContractsEnvironment, generate
from k3core.envs.demonstrations import mixture
from k3core.envs.environment import Environment
from k3core.envs.lab import read_tasks
from k3core.eval.suite import Suite, frozen_suite, prompt_sha256, suite_sha256
from k3core.rewards.judge import Judge, RuleJudge
from k3core.rl.optim import OptimConfig
from k3core.tokenizer import Tokenizer
from k3core.types import Prompt, SamplingParams


@dataclass(frozen=True, slots=True)
class Arm:
    """A run of supervised steps: which demonstrations, from which index on."""

    name: str
    expert_share: float
    first_index: int


def build_environment(cfg: RunConfig) -> Environment:
    return ContractsEnvironment(cfg.environment.limits)


def chat_settings(cfg: RunConfig, environment: Environment, tokenizer: Tokenizer) -> ChatSettings:
    """Raises ValueError for thinking in a chat format that has no such channel."""
    if cfg.chat.thinking and not chat_format(tokenizer).has_thinking:
        raise ValueError(
            "chat.thinking true: the tokenizer's chat format has no think channel; set chat.thinking=false"
        )
    tools = tuple(tool.declaration for tool in environment.tools) if cfg.chat.declare_tools else ()
    return ChatSettings(thinking=cfg.chat.thinking, tools=tools, thinking_effort=cfg.chat.thinking_effort)


def build_judge(cfg: RunConfig) -> Judge:
    del cfg  # one judge so far: the rubric's own checks
    return RuleJudge()


def build_tokenizer(cfg: RunConfig) -> Tokenizer:
    """The checkpoint's, where the run starts from one; else byte-pair merges learnt from demonstrations that no arm
    trains on (negative indices). Raises ValueError for a tokenizer that the model has no embeddings for."""
    if cfg.warm_start.init is not None:
        folder = folder_of(cfg.warm_start.init)
        brought = Tokenizer.from_folder(folder)
        if brought.vocab_size > cfg.model.vocab_size:
            raise ValueError(
                f"{folder}: its tokenizer has {brought.vocab_size} tokens and its config.json vocab_size "
                f"{cfg.model.vocab_size}: the model has no embedding for the last ones; the files do not belong together"
            )
        return brought
    conversations = (
        mixture(cfg.warm_start.seed, -1 - i, cfg.warm_start.expert_share)[2]
        for i in range(cfg.tokenizer.corpus_prompts)
    )
    return Tokenizer.train((text for c in conversations for text in training_texts(c)), cfg.tokenizer.vocab_size)


def train_prompts(cfg: RunConfig, step: int, attempt: int) -> list[Prompt]:
    """The prompts of one step; another attempt (after a batch without variance) draws others."""
    count = cfg.rollout.prompts_per_step
    if cfg.environment.name == "lab":
        pool = _lab_prompts(cfg)[cfg.evaluate.prompts :]
        if not pool:
            raise ValueError(
                f"environment.path: {cfg.environment.path} has no task left for training after evaluate.prompts ="
                f" {cfg.evaluate.prompts} for evaluation; lower evaluate.prompts"
            )
        start = (step + attempt * cfg.steps) * count
        return [pool[(start + i) % len(pool)] for i in range(count)]
    start = (step + attempt * 1_000_000) * count
    return [generate(cfg.seed, start + i, "train") for i in range(count)]


def eval_suite(cfg: RunConfig) -> Suite:
    if cfg.environment.name == "lab":
        prompts = _lab_prompts(cfg)[: cfg.evaluate.prompts]
        return Suite("lab", prompts, suite_sha256([prompt_sha256(prompt) for prompt in prompts]))
    return frozen_suite(cfg.evaluate.prompts)


def rubric_sha256(suite: Suite) -> str:
    """Digest of every criterion of the suite."""
    text = repr([prompt.hidden["criteria"] for prompt in suite.prompts])
    return hashlib.sha256(text.encode()).hexdigest()


def _lab_prompts(cfg: RunConfig) -> tuple[Prompt, ...]:
    assert cfg.environment.path is not None, "the config's rules ask for it"
    return read_tasks(Path(cfg.environment.path))


def train_sampling(cfg: RunConfig) -> SamplingParams:
    return sampling_of(cfg.rollout, cfg.environment)


def eval_sampling(cfg: RunConfig) -> SamplingParams:
    return sampling_of(cfg.evaluate, cfg.environment)


def supervised_optim(cfg: RunConfig) -> OptimConfig:
    return replace(cfg.train.optim, learning_rate=cfg.warm_start.learning_rate)
