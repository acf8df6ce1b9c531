from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import k3core.eval.suite
from k3core.envs.contracts import SYSTEM_PROMPT, generate
from k3core.eval.suite import MANIFEST, frozen_suite, prompt_sha256, write_manifest
from k3core.types import Prompt


def test_the_suite_is_what_the_manifest_froze() -> None:
    suite = frozen_suite()
    assert (suite.name, len(suite.prompts)) == ("contracts_eval", 50)
    assert suite.sha256 == json.loads(MANIFEST.read_text())["sha256"]
    assert sum(prompt.hidden["answer"]["verdict"] == "breach" for prompt in suite.prompts) == 25


def test_the_suite_shares_nothing_with_training() -> None:
    def documents(prompt: Prompt) -> str:
        return json.dumps(prompt.hidden["documents"], sort_keys=True)

    evaluated = {documents(prompt) for prompt in frozen_suite().prompts}
    trained = {documents(generate(0, n, split)) for split in ("train", "warm") for n in range(500)}
    assert not evaluated & trained


def test_a_prompt_that_changed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def drifted(seed: int, index: int, split: Any) -> Prompt:
        prompt = generate(seed, index, split)
        if index == 7:
            prompt.hidden["documents"]["playbook.md"] += "\n"  # type: ignore[index]
        return prompt

    monkeypatch.setattr(k3core.eval.suite, "generate", drifted)
    with pytest.raises(ValueError, match="prompt contracts/eval-0-000007 is not what was frozen"):
        frozen_suite()
    assert len(frozen_suite(7).prompts) == 7


def test_a_manifest_that_was_edited_is_refused(tmp_path: Path) -> None:
    manifest = json.loads(MANIFEST.read_text())
    manifest["prompts"].pop()
    path = tmp_path / "contracts_eval.json"
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"contracts_eval\.json: sha256 does not digest the prompts"):
        frozen_suite(10, manifest=path)


def test_another_size_is_a_prefix_and_has_another_digest() -> None:
    assert frozen_suite(10).prompts == frozen_suite().prompts[:10]
    assert frozen_suite(10).sha256 != frozen_suite().sha256
    for n in (0, 51):
        with pytest.raises(ValueError, match=f"has 50 prompts; asked for {n}"):
            frozen_suite(n)
    with pytest.raises(ValueError, match="seed: the suite is frozen for 0, not 1"):
        frozen_suite(seed=1)


def test_a_system_prompt_is_part_of_the_suites_identity() -> None:
    told = frozen_suite(5, system_prompt=SYSTEM_PROMPT)
    assert told.prompts[0].messages[0].content == SYSTEM_PROMPT
    assert told.sha256 != frozen_suite(5).sha256


def test_a_rewritten_manifest_freezes_what_is_generated_now(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    write_manifest(path, 3, 9)
    suite = frozen_suite(3, 9, manifest=path)
    assert suite.prompts == tuple(generate(9, n, "eval") for n in range(3))


def test_the_digest_sees_every_part_of_a_prompt() -> None:
    prompt = generate(0, 0, "eval")
    others = [
        Prompt("x", prompt.environment, prompt.messages, prompt.hidden),
        Prompt(prompt.id, "x", prompt.messages, prompt.hidden),
        Prompt(prompt.id, prompt.environment, (), prompt.hidden),
        Prompt(prompt.id, prompt.environment, prompt.messages, {**prompt.hidden, "criteria": []}),
    ]
    assert len({prompt_sha256(each) for each in [prompt, *others]}) == 5
