"""What a run's prompts say besides their messages: [chat]."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import pytest

from infra.config import ChatConfig, ConfigError, RunConfig, load
from infra.parts import build_environment, chat_settings, train_prompts
from infra.stages import rollout as stage
from infra.stages.context import Context
from infra.stages.prepare import find_inputs, prepare_run
from infra.stages.rollout import run_episodes
from infra.store import Store
from k3core.chat import PLAIN, ChatSettings
from k3core.rollout.episodes import EpisodeSpec
from k3core.tokenizer import Tokenizer
from k3core.types import PolicyVersion, Ref, SamplingParams

POLICY = PolicyVersion("talk", 0, "base", Ref("file:///nowhere", "0" * 64, 1), "1" * 64, None)


def smoke(tmp_path: Path, *overrides: str) -> RunConfig:
    return load("smoke", [f"root={tmp_path}/runs", "run=talk", *overrides])


def test_the_tiny_policy_is_told_nothing(tmp_path: Path) -> None:
    cfg = smoke(tmp_path)
    context = Context.open(prepare_run(cfg), cfg.root)
    assert chat_settings(cfg, build_environment(cfg), context.tokenizer()) == PLAIN


def test_episodes_of_a_run_declare_the_environments_tools_when_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = smoke(tmp_path, "chat.declare_tools=true", "chat.thinking=true", "chat.thinking_effort=low")
    context = Context.open(prepare_run(cfg), cfg.root)
    asked: list[ChatSettings] = []

    async def no_rollout(*arguments: object) -> list[object]:
        asked.append(next(a for a in arguments if isinstance(a, ChatSettings)))
        return []

    monkeypatch.setattr(stage, "rollout", no_rollout)
    monkeypatch.setattr(type(context.pool), "engine_at", lambda *_: None)
    run_episodes(context, POLICY, [EpisodeSpec(train_prompts(cfg, 0, 0)[0], 0, 1)], SamplingParams(), lambda *_: None)
    (settings,) = asked
    names = [tool["function"]["name"] for tool in settings.tools]
    assert names == [tool.name for tool in build_environment(cfg).tools]
    assert names
    assert (settings.thinking, settings.thinking_effort) == (True, "low")


def test_an_effort_without_thinking_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'^chat.thinking_effort "low" and chat.thinking false: .*chat.thinking=true'):
        smoke(tmp_path, "chat.thinking_effort=low")


def test_thinking_in_a_format_without_the_channel_is_refused_before_anything_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer_without_thinking: Tokenizer
) -> None:
    cfg = replace(smoke(tmp_path), chat=ChatConfig(thinking=True))
    monkeypatch.setattr("infra.stages.prepare.build_tokenizer", lambda _: tokenizer_without_thinking)
    with pytest.raises(ValueError, match=r"chat.thinking true: .* set chat.thinking=false"):
        prepare_run(cfg)
    assert find_inputs(Store(cfg.root), cfg.run) is None


@pytest.fixture
def tokenizer_without_thinking(tmp_path: Path) -> Tokenizer:
    """Kimi-Linear's control tokens, over the 256 bytes."""
    names = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"]
    names += [f"<|tool_{part}|>" for part in ("calls_section_begin", "calls_section_end", "call_begin", "call_end")]
    names += ["<|tool_call_argument_begin|>", "[UNK]", "[PAD]"]
    ranks = "".join(f"{base64.b64encode(bytes([n])).decode()} {n}\n" for n in range(256))
    entries = {str(256 + n): {"content": name, "special": True} for n, name in enumerate(names)}
    (tmp_path / "tiktoken.model").write_text(ranks)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}))
    return Tokenizer.from_folder(tmp_path)
