"""The engine with its prefix cache: what is found again, what that saves, and that no bit tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig, attach_lora
from k3core.model.model import ROWS, K3Model
from k3core.model.presets import PRESETS
from k3core.model.state import PAGE
from k3core.model.weights import is_adapter_tensor, named_tensors
from k3core.rollout.engine import K3Engine
from k3core.rollout.memory import MemorySizes
from k3core.rollout.prefix_cache import audit
from k3core.rollout.protocol import GenerateRequest, Generation, UnknownAdapter, UpdateRule
from k3core.types import SamplingParams

RandomModel = Callable[[K3Config], K3Model]
MAX_LENGTH = 160
LORA = LoraConfig(4, 8.0, ("q_proj", "kv_b_proj", "o_proj", "w1", "w2", "lm_head"))


def make(cfg: K3Config, model: K3Model, **settings: Any) -> K3Engine:
    engine = K3Engine(cfg, -1, ROWS, MAX_LENGTH, **settings)
    engine.load(0, named_tensors(model), base_sha256="base")
    return engine


def some_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 60, count).tolist()


def asked(name: str, tokens: Sequence[int], seed: int = 0, max_tokens: int = 6, **more: Any) -> GenerateRequest:
    return GenerateRequest(name, tokens, SamplingParams(max_tokens=max_tokens), seed, **more)


def run(engine: K3Engine, *requests: GenerateRequest) -> list[Generation]:
    async def together() -> list[Generation]:
        return list(await asyncio.gather(*map(engine.generate, requests)))

    generations = asyncio.run(together())
    audit(engine.memory.cache)
    return generations


def assert_same(got: Generation, want: Generation) -> None:
    for name in ("tokens_T", "logprobs_T", "raw_logprobs_T", "routed_experts_TLk"):
        assert np.array_equal(getattr(got, name), getattr(want, name)), name


@contextmanager
def prefilled(engine: K3Engine) -> Iterator[list[int]]:
    """How many tokens each prefill had."""
    seen: list[int] = []
    handle = engine.model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    yield seen
    handle.remove()


@pytest.fixture
def model(k3: K3Config, random_model: RandomModel) -> K3Model:
    return random_model(k3)


def factors(k3: K3Config, random_model: RandomModel, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = random_model(k3)
    attach_lora(model, LORA, generator)
    tensors = {name: tensor for name, tensor in named_tensors(model).items() if is_adapter_tensor(name)}
    for name, tensor in tensors.items():
        if name.endswith("lora_B"):
            tensor.normal_(0.0, 0.2, generator=generator)
    return tensors


@pytest.mark.parametrize("length", [1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1])
def test_a_history_that_is_found_again_gives_the_bits_of_one_that_is_computed(
    k3: K3Config, model: K3Model, length: int
) -> None:
    """Length 1 to both sides of a page's end, which is the grid's and a chunk's too."""
    engine = make(k3, model)
    tokens = some_tokens(length, length)
    cold, *_ = run(engine, asked("a", tokens))
    warm, *_ = run(engine, asked("b", tokens))
    assert cold.num_cached == 0
    assert warm.num_cached == (length - 1) // PAGE * PAGE
    assert_same(warm, cold)
    longer = [*tokens, *cold.tokens_T.tolist(), 7, 8]
    on, *_ = run(engine, asked("a", longer, num_drawn=6))
    assert on.num_cached == (length + 5) // PAGE * PAGE
    assert_same(on, run(make(k3, model), asked("c", longer, num_drawn=6))[0])


def test_a_group_with_one_prompt_computes_it_once(k3: K3Config, model: K3Model) -> None:
    engine, prompt = make(k3, model), some_tokens(1, 3 * PAGE + 5)
    with prefilled(engine) as lengths:
        group = run(engine, *[asked(f"s{seed}", prompt, seed) for seed in range(8)])
    assert sum(lengths) == len(prompt) + 7 * 5
    for seed, generation in enumerate(group):
        assert_same(generation, run(make(k3, model), asked("alone", prompt, seed))[0])


def test_prompts_that_part_share_what_they_have_in_common(k3: K3Config, model: K3Model) -> None:
    """The first one is told to leave a checkpoint where the others part from it, in the middle of its prompt."""
    engine, common = make(k3, model), some_tokens(1, 2 * PAGE + 3)
    prompts = [[*common, *some_tokens(10 + n, 40)] for n in range(4)]
    with prefilled(engine) as lengths:
        together = run(engine, *[asked(f"s{n}", prompt) for n, prompt in enumerate(prompts)])
    assert sum(lengths) == len(prompts[0]) + 3 * (len(prompts[0]) - 2 * PAGE)
    for prompt, generation in zip(prompts, together, strict=True):
        assert_same(generation, run(make(k3, model), asked("alone", prompt))[0])


def test_tenants_and_adapters_find_nothing_of_each_other(
    k3: K3Config, model: K3Model, random_model: RandomModel
) -> None:
    engine, prompt = make(k3, model), some_tokens(1, 40)
    engine.load_adapter("one", factors(k3, random_model, 1), LORA)
    run(engine, asked("a", prompt))
    assert run(engine, asked("b", prompt, tenant="other"))[0].num_cached == 0
    assert run(engine, asked("c", prompt, adapter="one"))[0].num_cached == 0
    assert run(engine, asked("d", prompt, adapter="one"))[0].num_cached == 2 * PAGE


def test_a_batch_of_any_mix_of_adapters_gives_each_the_bits_that_it_gets_alone(
    random_model: RandomModel,
) -> None:
    """The preset: LoRA's narrow factors over widths that are no multiple of 4 floats round by a row's alignment."""
    k3 = PRESETS["tiny"]
    model = random_model(k3)
    adapters = {name: factors(k3, random_model, seed) for seed, name in enumerate(("one", "two"), 1)}

    def engine() -> K3Engine:
        made = make(k3, model)
        for name, tensors in adapters.items():
            made.load_adapter(name, tensors, LORA)
        return made

    prompts = [some_tokens(n % 3, 20 + n) for n in range(12)]
    requests = [asked(f"s{n}", p, n, adapter=(None, "one", "two")[n % 3]) for n, p in enumerate(prompts)]
    mixed = run(engine(), *requests)
    alone = [run(engine(), request)[0] for request in requests]
    for got, want in zip(mixed, alone, strict=True):
        assert_same(got, want)
    base = [run(engine(), replace(request, adapter=None))[0] for request in requests]
    assert [np.array_equal(a.logprobs_T, b.logprobs_T) for a, b in zip(alone, base, strict=True)] == [
        request.adapter is None for request in requests
    ]


def test_an_adapter_that_is_not_loaded_is_refused_by_name(
    k3: K3Config, model: K3Model, random_model: RandomModel
) -> None:
    engine = make(k3, model)
    engine.load_adapter("one", factors(k3, random_model, 1), LORA)
    with pytest.raises(UnknownAdapter, match="adapter 'two' is not loaded; loaded: one"):
        run(engine, asked("s", [1], adapter="two"))
    broken = {n: t for n, t in factors(k3, random_model, 1).items() if not n.endswith("q_proj.lora_A")}
    with pytest.raises(ValueError, match=r"q_proj\.lora_A"):
        engine.load_adapter("one", broken, LORA)
    assert len(run(engine, asked("s", [1], adapter="one"))[0].tokens_T) == 6


def test_new_weights_after_an_adapters_turn_are_the_policys_and_not_the_adapters(
    k3: K3Config, model: K3Model, random_model: RandomModel
) -> None:
    engine = make(k3, model)
    engine.load_adapter("one", factors(k3, random_model, 1), LORA)
    adapted = run(engine, asked("a", [1, 2], adapter="one"))[0]
    engine.load(1, named_tensors(model))
    assert_same(run(engine, asked("b", [1, 2]))[0], run(make(k3, model), asked("b", [1, 2]))[0])
    assert_same(run(engine, asked("c", [1, 2], adapter="one"))[0], adapted)


def test_an_adapter_unloaded_under_a_turn_ends_that_turn_and_no_other(
    k3: K3Config, model: K3Model, random_model: RandomModel
) -> None:
    engine = make(k3, model)
    engine.load_adapter("one", factors(k3, random_model, 1), LORA)

    async def both() -> list[Any]:
        turns = [engine.generate(asked("a", [1, 2], max_tokens=20, adapter="one")), engine.generate(asked("b", [1, 2]))]
        tasks = [asyncio.create_task(turn) for turn in turns]
        for _ in range(4):
            await asyncio.sleep(0)
        engine.unload_adapter("one")
        return await asyncio.gather(*tasks, return_exceptions=True)

    gone, kept = asyncio.run(both())
    assert isinstance(gone, UnknownAdapter)
    assert_same(kept, run(make(k3, model), asked("b", [1, 2]))[0])


@pytest.mark.parametrize("rule", ["drop", "keep", "continue"])
def test_an_update_in_the_middle_of_turns_follows_its_rule(k3: K3Config, model: K3Model, rule: UpdateRule) -> None:
    """Tokens name the step that drew them. drop and keep compute the history again, so what follows has the bits of a
    sequence that asks with this history; continue goes on from old states."""
    new = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    new["layers.0.self_attn.v_proj.weight"] *= -1
    engine, prompt = make(k3, model), some_tokens(1, 40)

    async def updated() -> Generation:
        task = asyncio.create_task(engine.generate(asked("s", prompt, max_tokens=20)))
        for _ in range(9):
            await asyncio.sleep(0)
        engine.load(1, new, rule, base_sha256="new")
        return await task

    generation = asyncio.run(updated())
    audit(engine.memory.cache)
    steps = generation.policy_step_T.tolist()
    num_old = steps.count(0)
    assert 0 < num_old < 20
    assert steps == [0] * num_old + [1] * (20 - num_old)
    history = [*prompt, *generation.tokens_T[:num_old].tolist()]
    fresh = make(k3, model)
    fresh.load(1, new)
    again, *_ = run(fresh, asked("s", history, max_tokens=20 - num_old, num_drawn=num_old))
    is_same = np.array_equal(generation.logprobs_T[num_old:], again.logprobs_T)
    assert is_same == (rule != "continue")
    later, *_ = run(engine, asked("t", history))
    assert (later.num_cached > 0, engine.stats.stale_hit_tokens > 0) == (True, rule == "continue")
    engine.load(0, named_tensors(model), base_sha256="base")
    back, *_ = run(engine, asked("u", prompt))
    assert (back.num_cached > 0) == (rule == "keep")


def test_an_update_that_cannot_continue_changes_nothing(k3: K3Config, model: K3Model) -> None:
    engine = make(k3, model)
    before = run(engine, asked("a", some_tokens(1, 40)))[0]
    with pytest.raises(ValueError, match="continue: step 0 must come after 0; use drop or keep"):
        engine.load(0, {n: t * 2 for n, t in named_tensors(model).items()}, "continue")
    assert_same(run(engine, asked("b", some_tokens(1, 40)))[0], before)
    engine.load(2, named_tensors(model), base_sha256="two")
    run(engine, asked("c", some_tokens(1, 40)))
    engine.load(1, named_tensors(model), "keep", base_sha256="one")
    before = run(engine, asked("d", some_tokens(1, 40)))[0]
    with pytest.raises(ValueError, match="continue: step 2 has histories of its own"):
        engine.load(2, {n: t * 2 for n, t in named_tensors(model).items()}, "continue", base_sha256="two")
    assert engine.policy_step == 1
    assert_same(run(engine, asked("e", some_tokens(1, 40)))[0], before)


@pytest.mark.parametrize(
    "sizes",
    [
        MemorySizes(num_pages=12, num_checkpoints=2),
        MemorySizes(num_pages=12, num_checkpoints=3, num_host_pages=8, num_host_checkpoints=2),
        MemorySizes(num_pages=14, num_checkpoints=40, num_host_pages=200, num_host_checkpoints=60),
        MemorySizes(page_size=PAGE, grid=2 * PAGE, num_pages=16, num_checkpoints=4),
        MemorySizes(page_size=2 * PAGE, grid=2 * PAGE, num_pages=8, num_checkpoints=4),
    ],
    ids=["no host", "full host tier", "large host tier", "wide grid", "large pages"],
)
def test_whatever_is_evicted_offloaded_restored_or_preempted_no_bit_changes(
    k3: K3Config, model: K3Model, sizes: MemorySizes
) -> None:
    """Multi-turn sequences with shared prompts in a memory that holds about two of them, against engines of their own."""
    engine, roomy = make(k3, model, sizes=sizes), make(k3, model)

    async def play(engine: K3Engine, n: int, hits: list[int]) -> list[Generation]:
        rng = np.random.default_rng(n)
        tokens = [*some_tokens(n % 3, 20 + 17 * (n % 3)), n]
        turns: list[Generation] = []
        for turn in range(4):
            await asyncio.sleep(0)
            request = asked(f"s{n}", tokens, n, int(rng.integers(1, 12)), num_drawn=sum(len(t.tokens_T) for t in turns))
            turns.append(await engine.generate(request))
            hits.append(turns[-1].num_cached)
            tokens = [*tokens, *turns[-1].tokens_T.tolist(), *rng.integers(0, 60, 9 + turn).tolist()]
        return turns

    async def everybody() -> list[list[Generation]]:
        return list(await asyncio.gather(*[play(engine, n, hits) for n in range(14)]))

    hits: list[int] = []
    together = asyncio.run(everybody())
    audit(engine.memory.cache)
    assert sum(hits) > 0
    assert engine.memory.free.pages == engine.limits.total_pages
    stats = engine.stats
    assert stats.dropped_pages.total() + stats.offloaded_pages > 0
    assert (stats.restored_pages > 0) == (sizes.num_host_pages > 0)
    for n, turns in enumerate(together):
        for got, want in zip(turns, asyncio.run(play(roomy, n, [])), strict=True):
            assert_same(got, want)
