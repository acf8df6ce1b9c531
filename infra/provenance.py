"""What a record says beside its inputs: the code, the rubric and the prompts that were in force, by digest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import k3core.model
import k3core.rewards
import k3core.rl
import k3core.rollout
import k3kernels
from infra.parts import rubric_sha256
from k3core.eval.suite import Suite, prompt_sha256, suite_sha256
from k3core.rewards.judge import Judge
from k3core.types import Prompt

ENGINE_CODE = (k3core.rollout, k3core.model, k3kernels)
TRAINER_CODE = (k3core.rl, k3core.model, k3kernels)
JUDGE_CODE = (k3core.rewards,)


@cache
def code_sha256(packages: tuple[ModuleType, ...]) -> str:
    """Over the names and bytes of their source files, as they lie there when this process first asks."""
    digest = hashlib.sha256()
    for package in packages:
        folder = Path(str(package.__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{package.__name__}/{path.relative_to(folder).as_posix()}\n".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def engine_build(engine: object) -> dict[str, str]:
    return _build(engine, ENGINE_CODE)


def trainer_build(trainer: object) -> dict[str, str]:
    return _build(trainer, TRAINER_CODE)


def judge_version(judge: Judge) -> dict[str, str]:
    """`id` names model and prompt where there are any; `code_sha256` is of what turns verdicts into a score."""
    return {"id": judge.id, "class": type(judge).__qualname__, "code_sha256": code_sha256(JUDGE_CODE)}


def prompts_and_rubric(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The prompts by id and digest (hidden data included), and one digest of all their criteria."""
    batch = Suite("batch", tuple(prompts), suite_sha256([prompt_sha256(prompt) for prompt in prompts]))
    return {
        "prompts": {"ids": [prompt.id for prompt in prompts], "sha256": batch.sha256},
        "rubric_sha256": rubric_sha256(batch),
    }


def _build(part: object, code: tuple[ModuleType, ...]) -> dict[str, str]:
    return {"class": type(part).__qualname__, "code_sha256": code_sha256(code), "torch": torch.__version__}
