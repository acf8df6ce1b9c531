"""Numerical parity: what the engine said of its tokens against what a trainer's pass over them gives, bit by bit.

The engine computes each token in every way that it has: cold, found again in the cache, in pieces, among others in any
place of the batch, under any mix of adapters, preempted. The trainer's pass over the whole history is one and the same.
A way that was not taken proves nothing, so each case also says what shows that it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig, attach_lora, branches_of, detach_lora, set_branches
from k3core.model.model import Forward, K3Model, build_model
from k3core.model.numerics import Numerics
from k3core.model.weights import is_adapter_tensor, named_tensors
from k3core.rl.trainer import target_logprobs
from k3core.rollout.engine import K3Engine
from k3core.rollout.memory import MemorySizes
from k3core.rollout.protocol import GenerateRequest, Generation
from k3core.rollout.runner import Pieces, Runner
from k3core.types import SamplingParams
from k3kernels.packing import Packing

MAX_NEW = 20  # decodes that cross a chunk's end wherever they begin
ADAPTER = LoraConfig(8, 16.0, ("q_proj", "kv_b_proj", "o_proj", "down_proj", "lm_head"))


WAYS = (
    "cold, one at a time",
    "warm: same prompts",
    "warm: a second turn",
    "batched",
    "in pieces",
    "preempted, resumed",
    "mixed adapters",
)


@dataclass(frozen=True, slots=True)
class ParityCase:
    """One way to compute, over num_tokens sampled tokens: how many fp32 logprobs differ in any bit, and by how many nats
    at most and in the mean; how many routed experts differ, of num_routes. evidence: what shows that the way was taken;
    is_taken: whether it does."""

    name: str
    num_tokens: int
    num_differing: int
    max_abs: float
    mean_abs: float
    num_routes: int
    num_routes_differing: int
    evidence: str = ""
    is_taken: bool = True

    @property
    def holds(self) -> bool:
        return self.is_taken and not self.num_differing and not self.num_routes_differing


@dataclass(frozen=True, slots=True)
class Played:
    """A turn that was sampled: its request and what came of it."""

    request: GenerateRequest
    generation: Generation

    @property
    def tokens(self) -> list[int]:
        return [*self.request.tokens, *self.generation.tokens_T.tolist()]


class WatchedRunner:
    """An engine's runner that counts: pieces of prompts, the most rows of one decode, and who was decoded."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.num_pieces = self.most_rows = 0
        self.adapters: set[object] = set()

    def prefill(self, pieces: Pieces) -> Forward:
        self.num_pieces += len(pieces.lengths)
        return self.runner.prefill(pieces)

    def decode(
        self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int], adapter: object = None
    ) -> tuple[Tensor, Tensor]:
        self.most_rows = max(self.most_rows, len(tokens))
        self.adapters.add(adapter)
        return self.runner.decode(tokens, slots, positions, adapter)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self.runner.logits(hidden_ND)

    def forget(self, adapter: object) -> None:
        self.runner.forget(adapter)


def awake_model(cfg: K3Config, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> K3Model:
    """Random weights in which no part is at rest: reads of the residual bank and the gates' slopes are drawn too."""
    generator = torch.Generator(device).manual_seed(seed)
    model = build_model(cfg, dtype, device)
    with torch.no_grad():
        model.init_weights(generator)
        for name, p in model.named_parameters():
            if name.endswith(("res_proj.weight", "A_log")):
                p.normal_(0.0, 0.3, generator=generator)
    return model.requires_grad_(False)


def random_adapter(model: K3Model, config: LoraConfig, seed: int) -> dict[str, Tensor]:
    """Factors by name, B as large as A; the model is as it was."""
    before = branches_of(model)
    detach_lora(model)
    generator = torch.Generator().manual_seed(seed)
    attach_lora(model, config, generator)
    factors = {name: t.detach().clone() for name, t in named_tensors(model).items() if is_adapter_tensor(name)}
    set_branches(model, before)
    for name, factor in factors.items():
        if name.endswith("lora_B"):
            factor.copy_(torch.empty(factor.shape).normal_(0.0, 0.05, generator=generator))
    return factors


def trainer_logprobs(model: K3Model, played: Sequence[Played], replay: bool) -> tuple[np.ndarray, list[np.ndarray]]:
    """fp32 logprobs of all drawn tokens, end to end, and each history's routed experts, by one pass over all of them.

    On a GPU inside a `Numerics.scope`.
    """
    device = model.embed_tokens.weight.device
    packing = Packing(tuple(len(each.tokens) for each in played), device)
    tokens_T = torch.tensor([token for each in played for token in each.tokens], device=device)
    starts = packing.starts_N.tolist()
    target_M = torch.tensor(
        [
            start + t
            for start, each in zip(starts, played, strict=True)
            for t in range(len(each.request.tokens), len(each.tokens))
        ],
        device=device,
    )
    replay_TLk = None
    if replay:
        rows = [each.generation.routed_experts_TLk.astype(np.int64) for each in played]
        rows = [np.concatenate([row, np.full((1, *row.shape[1:]), -1)]) for row in rows]
        replay_TLk = torch.from_numpy(np.concatenate(rows)).to(device)
    with torch.no_grad():
        logprobs_M = target_logprobs(model, tokens_T, packing, target_M, replay_TLk)
        routes_TLk = model(tokens_T, packing, replay_TLk).routed_experts_TLk
    return logprobs_M.cpu().numpy(), [r.cpu().numpy() for r in routes_TLk.split(packing.lengths)]


def compare(name: str, played: Sequence[Played], model: K3Model, replay: bool = False) -> ParityCase:
    """What an engine sampled against the trainer's pass of `model`, which chooses the experts itself or replays."""
    want_M, routes = trainer_logprobs(model, played, replay)
    got_M = np.concatenate([each.generation.raw_logprobs_T for each in played])
    abs_M = np.abs(got_M.astype(np.float64) - want_M)
    pairs = [(each.generation.routed_experts_TLk, r[:-1]) for each, r in zip(played, routes, strict=True)]
    return ParityCase(
        name,
        len(got_M),
        int((got_M.view(np.int32) != want_M.view(np.int32)).sum()),
        float(abs_M.max()),
        float(abs_M.mean()),
        sum(a.size for a, _ in pairs),
        sum(int((a != b).sum()) for a, b in pairs),
    )


class Parity:
    """The engine's ways to compute, each compared with the trainer's pass. One model is trainer and weights' source."""

    def __init__(
        self,
        cfg: K3Config,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_sequences: int = 8,
        prompt_tokens: tuple[int, int] = (1, 120),
        sizes: MemorySizes | None = None,
        seed: int = 0,
        numerics: Numerics = Numerics(),  # noqa: B008 frozen
    ) -> None:
        self.cfg, self.dtype, self.device, self.sizes, self.numerics = cfg, dtype, device, sizes, numerics
        self.model = awake_model(cfg, dtype, device, seed)
        rng = np.random.default_rng(seed)
        low, high = prompt_tokens
        self.prompts = [
            rng.integers(0, cfg.vocab_size, n).tolist() for n in np.linspace(low, high, num_sequences, dtype=int)
        ]
        self.max_length = 2 * (high + 2 * MAX_NEW)

    def engine(self, **settings: Any) -> K3Engine:
        """With the model's weights, in the engine's type. settings: those of K3Engine that are not this object's own."""
        own = {"sizes": self.sizes, "dtype": self.dtype, "device": self.device}
        invariance = {"is_invariant": self.numerics.batch_invariant}
        made = K3Engine(self.cfg, -1, len(self.prompts), self.max_length, **{**own, **invariance, **settings})
        held = made.served_tensors()
        made.load(0, {name: t.to(held[name].dtype) for name, t in named_tensors(self.model).items()})
        return made

    def requests(self, prompts: Sequence[Sequence[int]] | None = None, max_new: int = MAX_NEW) -> list[GenerateRequest]:
        sampling = SamplingParams(max_tokens=max_new)
        return [GenerateRequest(f"s{n}", list(p), sampling, n) for n, p in enumerate(prompts or self.prompts)]

    def cases(self, on_case: Callable[[ParityCase], None] = lambda _: None) -> list[ParityCase]:
        """Those of WAYS, in its order; on_case hears each when it is done."""
        found: list[ParityCase] = []
        with self.numerics.scope(self.device):
            for case in self._cases():
                found.append(case)
                on_case(case)
        return found

    def _cases(self) -> Iterator[ParityCase]:
        engine = self.engine()
        cold = one_by_one(engine, self.requests())
        yield self._case(0, cold, f"{_cached(cold)} cached", _cached(cold) == 0)
        for way, prompts in ((1, self.prompts), (2, second := [[*each.tokens, 5, 6, 7] for each in cold])):
            warm = one_by_one(engine, self.requests(prompts))
            yield self._case(way, warm, f"{_cached(warm)} cached", _cached(warm) > 0)
        engine, N = self.engine(), len(self.prompts)
        watch = watched(engine)
        batched = play(engine, self.requests())
        yield self._case(3, batched, f"{watch.most_rows} rows at once", watch.most_rows == N)
        engine = self.engine(max_batch_tokens=1)  # the engine takes its least
        watch = watched(engine)
        pieces = play(engine, self.requests(second))
        yield self._case(4, pieces, f"{watch.num_pieces} pieces of {N}", watch.num_pieces > N)
        yield self._preempted()
        yield self._mixed()

    def _case(self, way: int, played: Sequence[Played], evidence: str, is_taken: bool) -> ParityCase:
        return replace(compare(WAYS[way], played, self.model), evidence=evidence, is_taken=is_taken)

    def _preempted(self) -> ParityCase:
        """A memory that holds all of them when they begin, with the page that each is given ahead, and one page more; every
        one then grows over two ends of a page."""
        sizes, N = self.sizes or MemorySizes(), len(self.prompts)
        rng = np.random.default_rng(N)
        prompts = [rng.integers(0, self.cfg.vocab_size, 2 * sizes.page_size - 2 - n % 4).tolist() for n in range(N)]
        num_pages = 3 * N + 1
        tight = replace(sizes, num_pages=num_pages, num_checkpoints=8, num_host_pages=num_pages, num_host_checkpoints=8)
        engine = self.engine(sizes=tight)
        played = play(engine, self.requests(prompts, sizes.page_size + 8))
        return self._case(5, played, f"{engine.num_preempted} preempted", engine.num_preempted > 0)

    def _mixed(self) -> ParityCase:
        engine = self.engine()
        adapters = {name: random_adapter(self.model, ADAPTER, seed) for seed, name in enumerate(("a", "b"), 1)}
        for loaded, factors in adapters.items():
            engine.load_adapter(loaded, factors, ADAPTER)
        watch = watched(engine)
        names: list[str | None] = [None, *adapters]
        requests = [replace(r, adapter=names[n % len(names)]) for n, r in enumerate(self.requests())]
        played = play(engine, requests)
        parts: list[ParityCase] = []
        for name in names:
            mine = [each for each in played if each.request.adapter == name]
            parts.append(compare("", mine, adapted(self.model, adapters.get(name or ""))))
            detach_lora(self.model)
        num_tokens = sum(part.num_tokens for part in parts)
        return ParityCase(
            WAYS[6],
            num_tokens,
            sum(part.num_differing for part in parts),
            max(part.max_abs for part in parts),
            sum(part.mean_abs * part.num_tokens for part in parts) / num_tokens,
            sum(part.num_routes for part in parts),
            sum(part.num_routes_differing for part in parts),
            f"base + {len(watch.adapters) - 1}",
            watch.adapters == set(names),
        )

    def replay_gap(self, engine_dtype: torch.dtype) -> tuple[ParityCase, ParityCase]:
        """An engine of another type: the trainer with its own routes, and with the engine's (arXiv 2510.11370)."""
        with self.numerics.scope(self.device):
            played = play(self.engine(dtype=engine_dtype), self.requests())
            return (
                compare("the trainer chooses", played, self.model),
                compare("the engine's routes are replayed", played, self.model, replay=True),
            )


def watched(engine: K3Engine) -> WatchedRunner:
    watch = WatchedRunner(engine.runner)
    engine.runner = watch
    return watch


def _cached(played: Sequence[Played]) -> int:
    return sum(each.generation.num_cached for each in played)


def adapted(model: K3Model, factors: Mapping[str, Tensor] | None) -> K3Model:
    """The model with these factors attached; `detach_lora` takes them away."""
    if factors is not None:
        attach_lora(model, ADAPTER, torch.Generator())
        own = named_tensors(model)
        with torch.no_grad():
            for name, factor in factors.items():
                own[name].copy_(factor)
        model.requires_grad_(False)
    return model


def play(engine: K3Engine, requests: Sequence[GenerateRequest]) -> list[Played]:
    async def together() -> list[Generation]:
        return list(await asyncio.gather(*map(engine.generate, requests)))

    return [Played(r, g) for r, g in zip(requests, asyncio.run(together()), strict=True)]


def one_by_one(engine: K3Engine, requests: Sequence[GenerateRequest]) -> list[Played]:
    return [play(engine, [request])[0] for request in requests]
