"""Continuous batching: what a sequence gets, when it gets it, and what happens when something goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig
from k3core.model.model import ROWS, K3Model
from k3core.model.state import PAGE
from k3core.model.weights import load_tensors, named_tensors
from k3core.rl.optim import OptimConfig
from k3core.rl.trainer import Trainer
from k3core.rollout.engine import K3Engine, require_served
from k3core.rollout.protocol import GenerateRequest, Generation
from k3core.rollout.scheduling import Free
from k3core.types import SamplingParams
from k3kernels.kda import CHUNK
from k3kernels.packing import Packing

RandomModel = Callable[[K3Config], K3Model]
MakeEngine = Callable[..., K3Engine]

STOP = 60
MAX_LENGTH = 150
STEP = 4


@pytest.fixture
def make_engine(cfg: K3Config, random_model: RandomModel) -> MakeEngine:
    weights = named_tensors(random_model(cfg))

    def make(num_slots: int = ROWS, max_length: int = MAX_LENGTH, stop_token: int = STOP, **settings: Any) -> K3Engine:
        engine = K3Engine(cfg, stop_token, num_slots, max_length, **settings)
        engine.load(STEP, weights)
        return engine

    return make


@pytest.fixture
def cfg(k3: K3Config) -> K3Config:
    return k3


def some_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, STOP, count).tolist()


def request(
    name: str, tokens: Sequence[int], seed: int = 0, max_tokens: int = 12, temperature: float = 1.0
) -> GenerateRequest:
    return GenerateRequest(name, tokens, SamplingParams(temperature=temperature, max_tokens=max_tokens), seed)


@dataclass
class Played:
    """A multi-turn sequence: its tokens, where the policy's lie, and the turns."""

    tokens: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    turns: list[Generation] = field(default_factory=list)

    @property
    def logprobs(self) -> np.ndarray:
        return np.concatenate([turn.logprobs_T for turn in self.turns])

    @property
    def routes(self) -> np.ndarray:
        """Of every input; each turn tells them all again."""
        return self.turns[-1].routed_experts_TLk

    @property
    def num_drawn(self) -> int:
        return sum(len(turn.tokens_T) for turn in self.turns)


async def play(
    engine: K3Engine, seed: int, delay: int = 0, num_turns: int = 3, max_tokens: int = 12, temperature: float = 1.0
) -> Played:
    """What an episode does: it comes at some time, answers each turn with a few tokens, and leaves."""
    for _ in range(delay):
        await asyncio.sleep(0)
    rng = np.random.default_rng(seed)
    played = Played(tokens=some_tokens(seed, int(rng.integers(1, 50))))
    for turn in range(num_turns):
        if turn:
            played.tokens += rng.integers(0, STOP, int(rng.integers(1, 9))).tolist()
        asked = request(f"s{seed}", played.tokens, seed, max_tokens, temperature)
        generation = await engine.generate(replace(asked, num_drawn=played.num_drawn))
        played.sampled += range(len(played.tokens), len(played.tokens) + len(generation.tokens_T))
        played.tokens += generation.tokens_T.tolist()
        played.turns.append(generation)
    engine.release(f"s{seed}")
    return played


async def gather(*coroutines: Awaitable[Any]) -> list[Any]:
    """All results; an exception is a result too."""
    return await asyncio.wait_for(asyncio.gather(*coroutines, return_exceptions=True), timeout=60)


def assert_same(got: Played, want: Played) -> None:
    assert got.tokens == want.tokens
    assert np.array_equal(got.logprobs, want.logprobs)
    assert np.array_equal(got.routes, want.routes)


@contextmanager
def prefills(engine: K3Engine) -> Iterator[list[tuple[int, ...]]]:
    """The lengths of every prefill's pieces."""
    seen: list[tuple[int, ...]] = []
    handle = engine.model.register_forward_pre_hook(lambda _, args: seen.append(args[1].lengths))
    yield seen
    handle.remove()


@contextmanager
def broken_after(engine: K3Engine, num_passes: int) -> Iterator[None]:
    """The pass after these many (prefills and decodes alike) dies in the middle of the layers."""
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1
        if passes > num_passes:
            raise MemoryError("out of memory")

    handle = engine.model.get_submodule("layers.2.input_layernorm").register_forward_hook(count)
    yield
    handle.remove()


# What a sequence gets


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_every_sampled_token_equal_the_trainers_with_replayed_routes(
    cfg: K3Config, random_model: RandomModel, make_engine: MakeEngine, temperature: float
) -> None:
    engine = make_engine()
    played = asyncio.run(gather(*[play(engine, seed, delay=seed, temperature=temperature) for seed in range(9)]))
    trainer = Trainer(cfg, OptimConfig())
    load_tensors(trainer.model, named_tensors(random_model(cfg)))
    packing = Packing(tuple(len(p.tokens) for p in played))
    no_route = np.full((1, *played[0].routes.shape[1:]), -1)
    replay_TLk = np.concatenate([row for p in played for row in (p.routes.astype(np.int64), no_route)])
    starts = packing.starts_N.tolist()
    target_M = torch.tensor([start + t for start, p in zip(starts, played, strict=True) for t in p.sampled])
    tokens_T = torch.tensor([token for p in played for token in p.tokens])
    with torch.no_grad():
        logprobs_M = trainer.logprobs(tokens_T, packing, target_M, torch.from_numpy(replay_TLk), temperature)
    reported_M = np.concatenate([p.logprobs for p in played])
    assert len(reported_M) > 100
    assert np.array_equal(reported_M, logprobs_M.numpy())


@pytest.mark.parametrize("num_others", [5, 40])
def test_a_trajectory_has_the_same_bits_whoever_its_neighbours_are(make_engine: MakeEngine, num_others: int) -> None:
    """Alone; and among others in other slots, at other times, with and without waiting for a slot.

    Equality to the last bit is possible because sums run over a sequence's own history, in blocks of fixed length, and
    because batches are whole multiples of ROWS, in which BLAS and vector loops round each row alike. One thread.
    """
    alone = {seed: asyncio.run(play(make_engine(), seed)) for seed in (0, 1, 2)}
    rng = np.random.default_rng(num_others)
    for num_slots in (ROWS, 3 * ROWS):
        engine = make_engine(num_slots)
        seeds = rng.permutation(3 + num_others).tolist()
        delays = rng.integers(0, 20, len(seeds)).tolist()
        played = asyncio.run(gather(*[play(engine, seed, delay) for seed, delay in zip(seeds, delays, strict=True)]))
        for seed in alone:
            assert_same(played[seeds.index(seed)], alone[seed])


def test_another_seed_gives_another_trajectory(make_engine: MakeEngine) -> None:
    async def both() -> list[Generation]:
        return await gather(*[engine.generate(request(f"s{seed}", [1, 2, 3], seed)) for seed in (0, 1)])

    engine = make_engine(stop_token=-1)
    a, b = asyncio.run(both())
    assert a.tokens_T.tolist() != b.tokens_T.tolist()


def test_routes_cover_every_input_and_are_those_of_a_full_forward_pass(
    cfg: K3Config, random_model: RandomModel, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    for played in asyncio.run(gather(*[play(engine, seed) for seed in range(5)])):
        T = len(played.tokens)
        for turn, next_turn in itertools.pairwise(played.turns):
            routes = turn.routed_experts_TLk
            assert np.array_equal(routes, next_turn.routed_experts_TLk[: len(routes)])
        with torch.no_grad():
            full = random_model(cfg)(torch.tensor(played.tokens), Packing((T,)))
        assert np.array_equal(played.routes, full.routed_experts_TLk[:-1].numpy())


def test_a_later_turn_prefills_only_what_lies_behind_the_last_checkpoint(make_engine: MakeEngine) -> None:
    engine = make_engine(stop_token=-1)

    async def two_turns() -> None:
        history = some_tokens(0, 40)
        first = await engine.generate(request("s", history, max_tokens=6))
        await engine.generate(request("s", [*history, *first.tokens_T.tolist(), 7, 8], max_tokens=6))

    with prefills(engine) as pieces:
        asyncio.run(two_turns())
    assert [lengths[0] for lengths in pieces] == [40, 48 - 45 // PAGE * PAGE]  # 45 have been inputs


def test_turns_end_at_the_stop_token_the_token_limit_or_the_sequence_limit(make_engine: MakeEngine) -> None:
    engine = make_engine(max_length=30)

    async def generate(tokens: int, max_tokens: int) -> Generation:
        name = f"{tokens}/{max_tokens}"
        generation = await engine.generate(request(name, some_tokens(tokens, tokens), max_tokens=max_tokens))
        engine.release(name)
        return generation

    async def all_of_them() -> list[Generation]:
        return await gather(*[generate(tokens, limit) for tokens in (1, 10, 22, 28, 29) for limit in (1, 5, 99)])

    generations = asyncio.run(all_of_them())
    stops = {generation.stop for generation in generations}
    assert {"max_tokens", "max_length"} <= stops
    for (tokens, limit), generation in zip(
        [(tokens, limit) for tokens in (1, 10, 22, 28, 29) for limit in (1, 5, 99)], generations, strict=True
    ):
        sampled = generation.tokens_T.tolist()
        if generation.stop == "end_of_turn":
            assert sampled[-1] == STOP
        else:
            assert len(sampled) == (limit if generation.stop == "max_tokens" else 30 - tokens)
            assert len(sampled) == min(limit, 30 - tokens)
        assert STOP not in sampled[:-1]


def test_the_stop_token_ends_a_turn_and_belongs_to_it(make_engine: MakeEngine) -> None:
    free = asyncio.run(make_engine(stop_token=-1).generate(request("s", [1, 2], max_tokens=40))).tokens_T.tolist()
    stop = free[9]
    ended = asyncio.run(make_engine(stop_token=stop).generate(request("s", [1, 2], max_tokens=40)))
    assert ended.stop == "end_of_turn"
    assert ended.tokens_T.tolist() == free[: free.index(stop) + 1]


def test_every_token_names_the_policy_step_that_drew_it(
    cfg: K3Config, random_model: RandomModel, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    first = asyncio.run(play(engine, 0))
    engine.load(STEP + 1, named_tensors(random_model(cfg)))
    second = asyncio.run(play(engine, 0))
    assert {int(step) for turn in first.turns for step in turn.policy_step_T} == {STEP}
    assert {int(step) for turn in second.turns for step in turn.policy_step_T} == {STEP + 1} == {engine.policy_step}


# When it gets it


def test_more_sequences_than_slots_all_finish(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_tokens=64)
    played = asyncio.run(gather(*[play(engine, seed, num_turns=2) for seed in range(3 * ROWS + 1)]))
    assert all(len(p.turns) == 2 for p in played)
    assert engine.memory.free == Free(engine.limits.total_pages, engine.num_slots)


def test_a_finished_sequence_leaves_and_a_waiting_one_enters_while_others_run(make_engine: MakeEngine) -> None:
    engine = make_engine(stop_token=-1)
    finished: list[str] = []

    async def one_turn(name: str, max_tokens: int) -> None:
        await engine.generate(request(name, [1, 2, 3], max_tokens=max_tokens))
        engine.release(name)
        finished.append(name)

    long = [one_turn(f"long{n}", 40) for n in range(ROWS - 1)]
    asyncio.run(gather(one_turn("short", 2), *long, one_turn("waiting", 5)))
    assert finished[:2] == ["short", "waiting"]


def test_a_tick_keeps_within_its_budget_and_cuts_long_prompts_to_it(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_tokens=60)
    lengths = [50, 5, 70, 20, 20, 20, 1]
    requests = [request(f"s{n}", some_tokens(n, length)) for n, length in enumerate(lengths)]
    with prefills(engine) as pieces:
        together = asyncio.run(gather(*map(engine.generate, requests)))
    assert all(sum(piece) <= 60 for piece in pieces)
    assert sum(map(sum, pieces)) == sum(lengths)
    assert any(n % CHUNK for piece in pieces for n in piece), "no prompt was cut in mid-chunk"
    alone = [asyncio.run(make_engine().generate(turn)) for turn in requests]
    for a, b in zip(together, alone, strict=True):
        assert np.array_equal(a.logprobs_T, b.logprobs_T)
        assert np.array_equal(a.tokens_T, b.tokens_T)


def test_no_loop_runs_while_no_turn_is_open(make_engine: MakeEngine) -> None:
    engine = make_engine()

    async def run() -> int:
        await engine.generate(request("s", [1, 2, 3]))
        for _ in range(3):
            await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1


def test_an_engine_outlives_its_event_loops(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first, again = (asyncio.run(play(engine, 3)) for _ in range(2))
    assert_same(again, first)


# Weights


def test_new_weights_meet_no_state_of_old_ones(
    cfg: K3Config, random_model: RandomModel, make_engine: MakeEngine
) -> None:
    new = {name: tensor.clone() for name, tensor in named_tensors(random_model(cfg)).items()}
    new["layers.0.self_attn.v_proj.weight"] *= -1
    new["layers.2.self_attn.kv_b_proj.weight"] *= -1
    warm, cold = make_engine(), make_engine()
    old = asyncio.run(play(warm, 0))
    warm.load(5, new)
    cold.load(5, new)
    assert_same(asyncio.run(play(warm, 0)), asyncio.run(play(cold, 0)))
    assert asyncio.run(play(warm, 0)).tokens != old.tokens


def test_weights_that_do_not_fit_leave_the_engine_as_it_was(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tensors: dict[str, Tensor] = {**engine.served_tensors(), "norm.weight": torch.zeros(3)}
    before = asyncio.run(play(engine, 1))
    with pytest.raises(ValueError, match=r"norm\.weight"):
        engine.load(5, tensors)
    assert engine.policy_step == STEP
    assert_same(asyncio.run(play(engine, 1)), before)


# When something goes wrong


@pytest.mark.parametrize("num_passes", [0, 1, 4])
def test_a_fault_reaches_every_turn_and_the_engine_works_afterwards(make_engine: MakeEngine, num_passes: int) -> None:
    """In the first prefill, in a decode step, and in a later one, when turns run and others wait for a slot."""
    engine = make_engine(stop_token=-1)
    with broken_after(engine, num_passes):
        results = asyncio.run(gather(*[play(engine, seed) for seed in range(ROWS + 4)]))
    assert [str(result) for result in results] == ["out of memory"] * (ROWS + 4)
    for seed in range(ROWS + 4):
        engine.release(f"s{seed}")
    assert_same(asyncio.run(play(engine, 2)), asyncio.run(play(make_engine(stop_token=-1), 2)))


class Terminated(BaseException):
    """As Prefect's own: no Exception, raised by a signal's handler wherever the main thread is."""


def test_a_signal_that_comes_while_the_model_runs_ends_the_turns_with_what_its_handler_raised(
    make_engine: MakeEngine,
) -> None:
    """In the engine's own task nobody waits for it: the run would go on, and never hear of it."""

    def terminate(*_: object) -> None:
        raise Terminated

    engine = make_engine(stop_token=-1)
    before = signal.signal(signal.SIGTERM, terminate)
    passes = itertools.count()

    def send(*_: object) -> None:
        if next(passes) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    handle = engine.model.get_submodule("layers.2.input_layernorm").register_forward_hook(send)
    try:
        results = asyncio.run(gather(*[play(engine, seed) for seed in range(3)]))
    finally:
        signal.signal(signal.SIGTERM, before)
        handle.remove()
    assert [type(result) for result in results] == [Terminated] * 3
    assert not engine._turns


def test_a_fault_forgets_its_sequences_whose_states_may_be_torn(make_engine: MakeEngine) -> None:
    engine = make_engine(stop_token=-1)
    with broken_after(engine, 3):
        asyncio.run(gather(play(engine, 0)))
    again = asyncio.run(play(engine, 0))  # nobody released it
    assert_same(again, asyncio.run(play(make_engine(stop_token=-1), 0)))


def test_logits_that_are_not_finite_are_a_fault_and_never_a_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tensors = {name: tensor.clone() for name, tensor in engine.served_tensors().items()}
    good = asyncio.run(play(engine, 0))
    broken = {**tensors, "layers.1.self_attn.o_proj.weight": tensors["layers.1.self_attn.o_proj.weight"] * float("nan")}
    engine.load(5, broken)
    results = asyncio.run(gather(*[play(engine, seed) for seed in range(3)]))
    assert [type(result) for result in results] == [FloatingPointError] * 3
    engine.load(STEP, tensors)
    assert_same(asyncio.run(play(engine, 0)), good)  # no NaN is left in any slot


@pytest.mark.parametrize("victim", [0, ROWS + 1])
def test_a_cancelled_turn_leaves_and_harms_nobody(make_engine: MakeEngine, victim: int) -> None:
    """Victim 0 runs when it is cancelled, the other one waits for a slot."""
    engine = make_engine(stop_token=-1)
    seeds = [seed for seed in range(ROWS + 4) if seed != victim]

    async def run() -> list[Played]:
        tasks = {seed: asyncio.create_task(play(engine, seed)) for seed in range(ROWS + 4)}
        for _ in range(6):
            await asyncio.sleep(0)
        tasks[victim].cancel()
        results = await gather(*tasks.values())
        assert isinstance(results.pop(victim), asyncio.CancelledError)
        return results

    played = asyncio.run(run())
    engine.load(STEP, engine.served_tensors())  # the victim left nothing open
    for seed in (seeds[0], seeds[-1]):
        assert_same(played[seeds.index(seed)], asyncio.run(play(make_engine(stop_token=-1), seed)))
    assert_same(asyncio.run(play(engine, victim)), asyncio.run(play(make_engine(stop_token=-1), victim)))


def test_releasing_a_running_sequence_cancels_its_turn(make_engine: MakeEngine) -> None:
    engine = make_engine(stop_token=-1)

    async def run() -> tuple[object, Played]:
        task = asyncio.create_task(engine.generate(request("s", [1, 2, 3], max_tokens=50)))
        other = asyncio.create_task(play(engine, 1))
        for _ in range(5):
            await asyncio.sleep(0)
        engine.release("s")
        engine.release("s")
        (result,) = await gather(task)
        return result, await other

    result, other = asyncio.run(run())
    assert isinstance(result, asyncio.CancelledError)
    assert_same(other, asyncio.run(play(make_engine(stop_token=-1), 1)))


def test_a_history_without_room_for_a_token_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(max_length=10)
    with pytest.raises(ValueError, match="10 tokens leaves no room below max_length 10"):
        asyncio.run(engine.generate(request("s", [1] * 10)))
    assert len(asyncio.run(engine.generate(request("s", [1] * 9))).tokens_T) == 1


def test_a_stop_string_without_a_tokenizer_is_refused_and_not_ignored(make_engine: MakeEngine) -> None:
    asked = request("s", [1, 2, 3])
    asked = replace(asked, sampling=replace(asked.sampling, stop=("end",)))
    with pytest.raises(ValueError, match="no tokenizer to find stop strings with"):
        asyncio.run(make_engine().generate(asked))


@pytest.mark.parametrize(
    ("quantization", "targets", "line"),
    [
        ("mxfp4", None, "model.expert_quantization mxfp4: the engine serves packed experts on the CPU only"),
        (None, ("q_proj", "w2"), r"adapter of layers\.1\.block_sparse_moe\.experts\.w2: .* on the CPU only"),
    ],
)
def test_what_a_gpus_graphs_cannot_compute_is_refused_before_a_turn_meets_it(
    cfg: K3Config, quantization: str | None, targets: tuple[str, ...] | None, line: str
) -> None:
    cfg = replace(cfg, expert_quantization=quantization)
    lora = None if targets is None else LoraConfig(4, 8.0, targets)
    require_served(cfg, lora, torch.device("cpu"))
    require_served(replace(cfg, expert_quantization=None), LoraConfig(4, 8.0, ("q_proj",)), torch.device("cuda"))
    with pytest.raises(ValueError, match=line):
        require_served(cfg, lora, torch.device("cuda"))


def test_a_stop_id_ends_a_turn_and_belongs_to_it(make_engine: MakeEngine) -> None:
    asked = request("s", [1, 2, 3], max_tokens=40)
    free = asyncio.run(make_engine(stop_token=-1).generate(asked)).tokens_T.tolist()
    asked = replace(asked, sampling=replace(asked.sampling, stop_token_ids=(61, free[7])))
    ended = asyncio.run(make_engine(stop_token=-1).generate(asked))
    assert (ended.stop, ended.matched) == ("stop", free[7])
    assert ended.tokens_T.tolist() == free[: free.index(free[7]) + 1]


def test_sequences_close_ranks_when_others_leave_and_keep_their_bits(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(num_slots=3 * ROWS, stop_token=-1)
    moves: list[tuple[int, int]] = []
    move = engine.memory.state.move

    def record(source: int, target: int) -> None:
        moves.append((source, target))
        move(source, target)

    monkeypatch.setattr(engine.memory.state, "move", record)

    async def run() -> Played:
        brief = [request(f"brief{n}", [1, 2, n % 7], max_tokens=4) for n in range(2 * ROWS)]
        turns = [asyncio.create_task(engine.generate(turn)) for turn in brief]
        long = asyncio.create_task(play(engine, 1, delay=1))
        await asyncio.gather(*turns)
        for turn in brief:
            engine.release(turn.sequence)
        return await long

    together = asyncio.run(run())
    assert moves == [(2 * ROWS, 0)]
    assert_same(together, asyncio.run(play(make_engine(stop_token=-1), 1)))
