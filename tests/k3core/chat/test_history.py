"""Token in, token out: an episode's tokens are those that were sampled, in every chat format."""

from __future__ import annotations

import random
from typing import Any

from k3core.chat import ChatSettings, History
from k3core.types import Message, ToolCall

WORDS = ("liability cap", "payment term", "notice period", "租户必须", "don't", "  late\n\nfee ", "")


def sampled_spans(history: History) -> list[list[int]]:
    spans: list[list[int]] = []
    previous = False
    for token_id, sampled in zip(history.tokens, history.loss_mask, strict=True):
        if sampled and not previous:
            spans.append([])
        if sampled:
            spans[-1].append(token_id)
        previous = sampled
    return spans


def test_the_history_says_who_made_each_token() -> None:
    history = History()
    history.append_context([5, 6])
    history.append_sampled(token_id for token_id in [7, 7, 8])
    history.append_context([])
    history.append_context([5])
    assert history.tokens == [5, 6, 7, 7, 8, 5]
    assert history.loss_mask == [False, False, True, True, True, False]
    history.tokens.append(9)
    history.loss_mask.append(True)
    assert len(history) == len(history.tokens) == len(history.loss_mask) == 6


def test_sampled_tokens_of_random_episodes_stay_exactly_as_they_were_sampled(speech: Any) -> None:
    """trl #5224: decoding a turn and encoding it again puts gradients on tokens that were never sampled."""
    chat = speech.chat
    num_changed_by_reencoding = 0
    for seed in range(100):
        rng = random.Random(seed)
        thinking = bool(seed % 2) and chat.has_thinking
        history = History()
        history.append_context(chat.render_messages([Message("user", rng.choice(WORDS))], ChatSettings(thinking)))
        sampled: list[list[int]] = []
        context = history.tokens
        for turn_number in range(rng.randint(1, 4)):
            calls = tuple(
                ToolCall("grep", {"pattern": rng.choice(WORDS), "max": rng.randint(1, 99)})
                for _ in range(rng.randint(0, 3))
            )
            turn = Message("assistant", rng.choice(WORDS), rng.choice(WORDS) if thinking else None, calls)
            stub = chat.generation_stub(thinking)
            history.append_context(stub)
            prefix = history.tokens
            ids = speech.misspell(chat.render_turn(turn, thinking), rng)
            sampled.append(ids)
            history.append_sampled(ids)

            assert history.tokens == prefix + ids
            parsed = chat.parse_turn(history.tokens[len(prefix) :], thinking)
            assert parsed == turn, turn_number
            num_changed_by_reencoding += chat.render_turn(parsed, thinking) != ids

            results = [Message("tool", rng.choice(WORDS), tool="grep", index=n + 1) for n in range(len(calls))]
            suffix = chat.render_tool_results(rng.sample(results, len(results)), parsed.tool_calls)
            history.append_context(suffix)
            context += stub + suffix
        assert sampled_spans(history) == sampled
        unsampled = [i for i, made in zip(history.tokens, history.loss_mask, strict=True) if not made]
        assert unsampled == context
    assert num_changed_by_reencoding >= 100
