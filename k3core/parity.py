"""Numerical parity: what the engine said of its tokens against what a trainer's pass over them gives, bit by bit.

The engine computes each token in every way that it has: cold, found again in the cache, in pieces, among others in any
place of the batch, under any mix of adapters, preempted. The trainer's pass over the whole history is one and the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig, attach_lora, branches_of, detach_lora, set_branches
from k3core.model.model import K3Model, build_model
from k3core.model.weights import is_adapter_tensor, named_tensors
from k3core.rl.trainer import target_logprobs
from k3core.rollout.engine import K3Engine
from k3core.rollout.memory import MemorySizes
from k3core.rollout.protocol import GenerateRequest, Generation
from k3core.types import SamplingParams
from k3kernels.dispatch import batch_invariant
from k3kernels.packing import Packing

MAX_NEW = 24
ADAPTER = LoraConfig(8, 16.0, ("q_proj", "kv_b_proj", "o_proj", "down_proj", "lm_head"))


@dataclass(frozen=True, slots=True)
class ParityCase:
    """One way to compute, over num_tokens sampled tokens: how many logprobs differ in any bit, and by how much at most;
    how many routed experts differ, of num_routes; num_cached and num_preempted say that the way was taken."""

    name: str
    num_tokens: int
    num_differing: int
    max_abs: float
    num_routes: int
    num_routes_differing: int
    num_cached: int
    num_preempted: int


@dataclass(frozen=True, slots=True)
class Played:
    """A turn that was sampled: its request and what came of it."""

    request: GenerateRequest
    generation: Generation

    @property
    def tokens(self) -> list[int]:
        return [*self.request.tokens, *self.generation.tokens_T.tolist()]


def awake_model(cfg: K3Config, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> K3Model:
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
    """fp32 logprobs of all drawn tokens, end to end, and each history's routed experts, by one pass over all of them."""
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
    with torch.no_grad(), batch_invariant():
        logprobs_M = target_logprobs(model, tokens_T, packing, target_M, replay_TLk)
        routes_TLk = model(tokens_T, packing, replay_TLk).routed_experts_TLk
    return logprobs_M.cpu().numpy(), [r.cpu().numpy() for r in routes_TLk.split(packing.lengths)]


def compare(
    name: str, played: Sequence[Played], model: K3Model, replay: bool = False, preempted: int = 0
) -> ParityCase:
    want_M, routes = trainer_logprobs(model, played, replay)
    got_M = np.concatenate([each.generation.raw_logprobs_T for each in played])
    pairs = [(each.generation.routed_experts_TLk, r[:-1]) for each, r in zip(played, routes, strict=True)]
    return ParityCase(
        name,
        len(got_M),
        int((got_M.view(np.int32) != want_M.view(np.int32)).sum()),
        float(np.abs(got_M.astype(np.float64) - want_M).max()),
        sum(a.size for a, _ in pairs),
        sum(int((a != b).sum()) for a, b in pairs),
        sum(each.generation.num_cached for each in played),
        preempted,
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
    ) -> None:
        self.cfg, self.dtype, self.device, self.sizes = cfg, dtype, device, sizes
        self.model = awake_model(cfg, dtype, device, seed)
        rng = np.random.default_rng(seed)
        low, high = prompt_tokens
        self.prompts = [
            rng.integers(0, cfg.vocab_size, n).tolist() for n in np.linspace(low, high, num_sequences, dtype=int)
        ]
        self.max_length = 2 * (high + 2 * MAX_NEW)

    def engine(self, **settings: object) -> K3Engine:
        made = K3Engine(
            *(self.cfg, -1, len(self.prompts), self.max_length),
            **{"sizes": self.sizes, "dtype": self.dtype, "device": self.device, **settings},  # type: ignore[arg-type]
        )
        made.load(0, named_tensors(self.model))
        return made

    def requests(self, prompts: Sequence[Sequence[int]] | None = None) -> list[GenerateRequest]:
        sampling = SamplingParams(max_tokens=MAX_NEW)
        return [GenerateRequest(f"s{n}", list(p), sampling, n) for n, p in enumerate(prompts or self.prompts)]

    def cases(self, on_case: Callable[[ParityCase], None] = lambda _: None) -> list[ParityCase]:
        found: list[ParityCase] = []

        def add(case: ParityCase) -> None:
            found.append(case)
            on_case(case)

        engine = self.engine()
        cold = [play(engine, [request])[0] for request in self.requests()]
        add(compare("cold, one at a time", cold, self.model))
        add(compare("warm: the same prompts again", [play(engine, [r])[0] for r in self.requests()], self.model))
        second = [[*each.tokens, 5, 6, 7] for each in cold]
        add(compare("warm: a second turn", [play(engine, [r])[0] for r in self.requests(second)], self.model))
        add(compare("batched, all at once", play(self.engine(), self.requests()), self.model))
        pieces = self.engine(max_batch_tokens=1)  # the engine's least
        add(compare("in pieces beside decodes", play(pieces, self.requests(second)), self.model))
        add(self._preempted(second))
        add(self._mixed())
        return found

    def _preempted(self, prompts: Sequence[Sequence[int]]) -> ParityCase:
        """A memory that holds the longest sequence and little more."""
        sizes = self.sizes or MemorySizes()
        longest = max(map(len, prompts)) + MAX_NEW
        num_pages = -(-longest // sizes.page_size) + 2
        tight = replace(sizes, num_pages=num_pages, num_checkpoints=8, num_host_pages=num_pages, num_host_checkpoints=8)
        engine = self.engine(sizes=tight)
        return compare(
            "preempted and resumed", play(engine, self.requests(prompts)), self.model, preempted=engine.num_preempted
        )

    def _mixed(self) -> ParityCase:
        engine = self.engine()
        adapters = {name: random_adapter(self.model, ADAPTER, seed) for seed, name in enumerate(("a", "b"), 1)}
        for loaded, factors in adapters.items():
            engine.load_adapter(loaded, factors, ADAPTER)
        names: list[str | None] = [None, *adapters]
        requests = [replace(r, adapter=names[n % len(names)]) for n, r in enumerate(self.requests())]
        played = play(engine, requests)
        parts: list[ParityCase] = []
        for name in names:
            mine = [each for each in played if each.request.adapter == name]
            parts.append(compare("", mine, adapted(self.model, adapters.get(name or ""))))
            detach_lora(self.model)
        return ParityCase(
            "mixed adapters in one batch",
            *(sum(part.num_tokens for part in parts), sum(part.num_differing for part in parts)),
            max(part.max_abs for part in parts),
            *(sum(part.num_routes for part in parts), sum(part.num_routes_differing for part in parts)),
            *(sum(part.num_cached for part in parts), 0),
        )

    def replay_gap(self, engine_dtype: torch.dtype) -> tuple[ParityCase, ParityCase]:
        """An engine of another dtype: the trainer with its own routes, and with the engine's (arXiv 2510.11370)."""
        engine = (
            self.engine(dtype=engine_dtype, sizes=self.sizes)
            if engine_dtype == self.dtype
            else self._other(engine_dtype)
        )
        played = play(engine, self.requests())
        return (
            compare("the trainer chooses", played, self.model),
            compare("the engine's routes are replayed", played, self.model, replay=True),
        )

    def _other(self, dtype: torch.dtype) -> K3Engine:
        other = K3Engine(
            *(self.cfg, -1, len(self.prompts), self.max_length), sizes=self.sizes, dtype=dtype, device=self.device
        )
        own = other.served_tensors()
        other.load(0, {name: t.to(own[name].dtype) for name, t in named_tensors(self.model).items()})
        return other


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
