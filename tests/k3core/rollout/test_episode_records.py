"""What an episode records of its sampling, and what a stop of the sampling does to a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from k3core.chat import chat_format
from k3core.chat.im import THINK, THINK_END, Im
from k3core.envs.contracts import ContractsEnvironment, generate
from k3core.envs.environment import Limits
from k3core.rollout.episodes import EpisodeSpec, run_episode
from k3core.rollout.protocol import GenerateRequest, Generation, Stop
from k3core.tokenizer import Tokenizer
from k3core.tokenizer.ranks import Ranks
from k3core.types import Message, SamplingParams, ToolCall, Trajectory

LIMITS = Limits(max_tokens=20_000, max_turn_tokens=5_000)
PROMPT = generate(0, 0, "train")
GREP = Message("assistant", tool_calls=(ToolCall("grep", {"pattern": "payment"}),))
SAMPLING = SamplingParams(top_p=0.9, stop=("enough",), max_tokens=5_000)


@dataclass
class Says:
    """An engine that says these turns; everything that it says of a token is a number of its place in the history."""

    turns: Sequence[tuple[list[int], Stop]]
    records: bool = True
    requests: list[GenerateRequest] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> Generation:
        number = len(self.requests)
        self.requests.append(request)
        tokens, stop = self.turns[number]
        start, n = len(request.tokens), len(tokens)
        place_n = np.arange(start, start + n, dtype=np.float32)
        kept = tuple(None if (start + i) % 2 else np.array([tokens[i], 999], np.int32) for i in range(n))
        return Generation(
            tokens_T=np.array(tokens, np.int32),
            logprobs_T=-place_n,
            raw_logprobs_T=-2 * place_n if self.records else np.zeros(0, np.float32),
            policy_step_T=np.full(n, number, np.int32),
            supports=kept if self.records else (),
            num_cached=0,
            routed_experts_TLk=np.full((start + n - 1, 1, 1), number, np.uint8),
            routed_layers=("layers.1.block_sparse_moe",),
            stop=stop,
        )

    def release(self, sequence: str) -> None:
        assert sequence == f"{PROMPT.id}#0"


@pytest.fixture(scope="module")
def im() -> Tokenizer:
    names = (*Im.controls, THINK, THINK_END)
    slots = {300 + n: control.name for n, control in enumerate(names)}
    return Tokenizer(Ranks([bytes([byte]) for byte in range(256)], slots))


def play(tokenizer: Tokenizer, engine: Says, limits: Limits = LIMITS) -> Trajectory:
    spec, environment = EpisodeSpec(PROMPT, 0, seed=3), ContractsEnvironment(limits)
    return asyncio.run(run_episode(engine, environment, tokenizer, spec, SAMPLING, limits))  # type: ignore[arg-type]


def said(tokenizer: Tokenizer, message: Message) -> list[int]:
    return chat_format(tokenizer).render_turn(message, thinking=False)


def test_what_sampling_kept_and_the_raw_logprobs_stand_at_their_tokens(im: Tokenizer) -> None:
    turn = said(im, GREP)
    t = play(im, Says([(turn, "end_of_turn"), (turn[:-1], "max_tokens")]))
    place_T = np.arange(len(t.tokens_T))
    assert t.raw_logprobs_T is not None
    assert t.raw_logprobs_T.dtype == np.float32
    assert np.array_equal(t.raw_logprobs_T, np.where(t.loss_mask_T, -2 * place_T, 0))
    assert t.supports is not None
    for place, support in enumerate(t.supports.rows()):
        if t.loss_mask_T[place] and place % 2 == 0:
            assert support is not None
            assert support.tolist() == [t.tokens_T[place], 999]
        else:
            assert support is None


def test_an_engine_that_records_neither_leaves_no_record_of_nothing(im: Tokenizer) -> None:
    t = play(im, Says([(said(im, Message("assistant", "Done.")), "end_of_turn")], records=False))
    assert (t.raw_logprobs_T, t.supports, t.stop_reason) == (None, None, "no_tool_call")


def test_an_input_keeps_the_experts_that_drew_the_token_after_it(im: Tokenizer) -> None:
    """Newer weights may choose others when they compute the history again."""
    turn = said(im, GREP)
    engine = Says(
        [(turn, "end_of_turn"), (turn, "end_of_turn"), (said(im, Message("assistant", "Done.")), "end_of_turn")]
    )
    t = play(im, engine)
    assert len(engine.requests) == 3
    drew_next = t.loss_mask_T[1:]
    assert (t.routed_experts_TLk[:-1, 0, 0][drew_next] == t.policy_step_T[1:][drew_next]).all()
    assert t.routed_experts_TLk[-1, 0, 0] == 255


def test_each_turn_goes_on_where_the_seeds_stream_was_left(im: Tokenizer) -> None:
    turn = said(im, GREP)
    engine = Says([(turn, "end_of_turn"), (turn[:-1], "stop"), (turn[:3], "max_tokens")])
    play(im, engine)
    assert [request.num_drawn for request in engine.requests] == [0, len(turn), 2 * len(turn) - 1]


def test_a_turn_that_a_stop_ended_is_read_as_a_finished_one_and_closed_for_the_policy(im: Tokenizer) -> None:
    turn, done = said(im, GREP), said(im, Message("assistant", "That is enough"))
    cut = play(im, Says([(turn[:-1], "stop"), (done[:-1], "stop")]))
    whole = play(im, Says([(turn, "end_of_turn"), (done, "end_of_turn")]))
    assert cut.tokens_T.tolist() == whole.tokens_T.tolist()
    assert (cut.stop_reason, cut.num_turns, cut.num_tool_calls) == ("no_tool_call", 2, 1)
    ends = np.flatnonzero(whole.loss_mask_T & ~cut.loss_mask_T)
    assert cut.tokens_T[ends].tolist() == [chat_format(im).stop_token] * 2
    assert (cut.rollout_logprobs_T[ends] == 0).all()
    assert (cut.policy_step_T[ends] == -1).all()


def test_a_turn_that_a_stop_cuts_where_it_is_no_turn_is_a_parse_error(im: Tokenizer) -> None:
    turn = said(im, GREP)
    t = play(im, Says([(turn[:-3], "stop")]))
    assert t.stop_reason == "parse_error"
    assert t.tokens_T[t.loss_mask_T].tolist() == turn[:-3]
    assert t.loss_mask_T[-1]


def test_a_turn_that_leaves_no_room_to_close_it_ends_the_episode(im: Tokenizer) -> None:
    turn = said(im, GREP)
    engine = Says([(turn[:-1], "stop")])
    before = len(play(im, replace(engine, requests=[], turns=[(turn[:-3], "stop")])).tokens_T) - len(turn[:-3])
    t = play(im, engine, replace(LIMITS, max_tokens=before + len(turn) - 1))
    assert (t.stop_reason, len(t.tokens_T)) == ("max_tokens", before + len(turn) - 1)
