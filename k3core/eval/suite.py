"""Evaluation prompts that cannot change unnoticed: a manifest holds the hash of each.

`python -m k3core.eval.suite` writes the manifest anew, which makes earlier evaluations incomparable.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3core.envs.contracts import generate, with_system_prompt
from k3core.types import Prompt

MANIFEST = Path(__file__).with_name("contracts_eval.json")
NUM_PROMPTS = 50


@dataclass(frozen=True, slots=True)
class Suite:
    """sha256 digests the prompts' own digests, in order."""

    name: str
    prompts: tuple[Prompt, ...]
    sha256: str


def frozen_suite(
    n: int = NUM_PROMPTS, seed: int = 0, system_prompt: str | None = None, manifest: Path = MANIFEST
) -> Suite:
    """The first n evaluation prompts. The manifest freezes them as they are without a system prompt.

    Raises ValueError naming the prompt that is no longer what the manifest says.
    """
    frozen = json.loads(manifest.read_text())
    if seed != frozen["seed"]:
        raise ValueError(f"{manifest.name}: seed: the suite is frozen for {frozen['seed']}, not {seed}")
    if not 1 <= n <= len(frozen["prompts"]):
        raise ValueError(f"{manifest.name}: the suite has {len(frozen['prompts'])} prompts; asked for {n}")
    if suite_sha256([row["sha256"] for row in frozen["prompts"]]) != frozen["sha256"]:
        raise ValueError(f"{manifest.name}: sha256 does not digest the prompts listed; restore the file")
    prompts = tuple(generate(seed, index, "eval") for index in range(n))
    for prompt, row in zip(prompts, frozen["prompts"], strict=False):
        if (prompt.id, prompt_sha256(prompt)) != (row["id"], row["sha256"]):
            raise ValueError(
                f"{manifest.name}: prompt {row['id']} is not what was frozen; undo the change of the generator or, "
                "giving up comparability, run python -m k3core.eval.suite"
            )
    prompts = tuple(with_system_prompt(prompt, system_prompt) for prompt in prompts)
    return Suite(frozen["name"], prompts, suite_sha256([prompt_sha256(prompt) for prompt in prompts]))


def prompt_sha256(prompt: Prompt) -> str:
    """Of canonical JSON. Messages count by role and content, so a new optional field of theirs changes nothing."""
    assert all(not message.tool_calls for message in prompt.messages)
    value: dict[str, Any] = {
        "id": prompt.id,
        "environment": prompt.environment,
        "messages": [{"role": message.role, "content": message.content} for message in prompt.messages],
        "hidden": prompt.hidden,
    }
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def suite_sha256(prompt_sha256s: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(prompt_sha256s).encode()).hexdigest()


def write_manifest(path: Path, n: int, seed: int) -> None:
    rows = [
        {"id": prompt.id, "sha256": prompt_sha256(prompt)} for prompt in (generate(seed, i, "eval") for i in range(n))
    ]
    total = suite_sha256([row["sha256"] for row in rows])
    path.write_text(
        json.dumps({"name": "contracts_eval", "seed": seed, "sha256": total, "prompts": rows}, indent=1) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="freeze the evaluation prompts as they are generated now")
    parser.add_argument("--path", type=Path, default=MANIFEST)
    parser.add_argument("--num-prompts", type=int, default=NUM_PROMPTS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_manifest(args.path, args.num_prompts, args.seed)


if __name__ == "__main__":
    main()
