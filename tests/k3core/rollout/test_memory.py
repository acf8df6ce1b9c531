"""The engine's memory under random traffic: what a sequence reads, in every tensor, is what it would compute anew."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from k3core.model.config import K3Config
from k3core.model.state import PAGE
from k3core.rollout.memory import EngineMemory, Lease, MemorySizes, stepped
from k3core.rollout.prefix_cache import Namespace, audit

NUM_SLOTS, MAX_LENGTH = 6, 10 * PAGE
SIZES = {
    "device only": MemorySizes(num_pages=40, num_checkpoints=9),
    "host tier": MemorySizes(num_pages=40, num_checkpoints=9, num_host_pages=30, num_host_checkpoints=10),
    "wide grid": MemorySizes(grid=2 * PAGE, num_pages=40, num_checkpoints=5, num_host_pages=60, num_host_checkpoints=6),
    "no spare state": MemorySizes(num_pages=64, num_checkpoints=1, num_host_pages=8, num_host_checkpoints=1),
}


def value(weights: str, prefix: tuple[int, ...]) -> float:
    """Stands for what a model with these weights computes from these tokens; exact in fp32."""
    return float(zlib.crc32(repr((weights, prefix)).encode()) & 0xFFFFFF)


@dataclass
class Running:
    """A sequence at work: the first num_fed of its tokens were inputs."""

    lease: Lease
    tokens: list[int]
    num_fed: int


class Traffic:
    """Plays the engine: writes into slots and pages what the model would, and checks what it finds there."""

    def __init__(self, cfg: K3Config, sizes: MemorySizes, seed: int) -> None:
        self.rng = random.Random(seed)
        self.memory = EngineMemory(cfg, NUM_SLOTS, MAX_LENGTH, sizes)
        self.running: list[Running] = []
        self.step = 0
        self.namespaces = [Namespace("base", adapter, 0, "", tenant) for adapter in (None, "a") for tenant in ("", "t")]
        self.weights = 0  # that `continue` goes on under: it may mix old and new, so here they are the same
        self.done = dict.fromkeys(("take", "feed", "share", "end", "abort", "update", "hit", "continued"), 0)

    def value(self, run: Running, num_tokens: int) -> float:
        namespace = run.lease.namespace
        source = f"{self.weights} {namespace.adapter_sha256} {namespace.tenant}"
        return value(source, tuple(run.tokens[:num_tokens]))

    def take(self) -> None:
        """Histories branch from a few stems."""
        namespace = self.rng.choice(self.namespaces)
        stem = [self.rng.randrange(2)] * self.rng.randrange(1, 4 * PAGE)
        tokens = [*stem, *[self.rng.randrange(2) for _ in range(self.rng.randrange(1, 3 * PAGE))]]
        num_pages = -(-len(tokens) // PAGE) + 1
        free = self.memory.free
        if num_pages > free.pages or not free.slots:
            return
        lease, _ = self.memory.take(namespace, tokens, num_pages)
        self.done["take"] += 1
        self.done["hit"] += lease.num_cached > 0
        run = Running(lease, tokens, lease.num_cached)
        self.running.append(run)
        self.check(run)

    def feed(self, run: Running) -> None:
        end = min(len(run.tokens), run.num_fed + self.rng.randrange(1, 3 * PAGE))
        if run.num_fed == len(run.tokens):  # decoding
            if len(run.tokens) + 1 >= MAX_LENGTH or (
                len(run.tokens) + 1 > len(run.lease.pages) * PAGE and not self.memory.free.pages
            ):
                return
            run.tokens.append(self.rng.randrange(2))
            if len(run.tokens) > len(run.lease.pages) * PAGE:
                self.memory.grow(run.lease)
            end = len(run.tokens)
        self.done["feed"] += 1
        self.compute(run, end)
        self.check(run)

    def compute(self, run: Running, end: int) -> None:
        memory, lease, start = self.memory, run.lease, run.num_fed
        values = [self.value(run, t + 1) for t in range(start, end)]
        slots_T = torch.full((end - start,), lease.slot)
        rows = torch.tensor(values).unsqueeze(-1)
        for layer, pages_PSC in memory.state.pages_PSC.items():
            memory.state.write_latent(layer, slots_T, torch.arange(start, end), rows.expand(-1, pages_PSC.shape[-1]))
        memory.write_routes(lease, start, np.array(values).astype(np.int64).astype(np.uint8)[:, None, None])
        grid = memory.grid
        passed = [at for at in range(start + 1, end + 1) if at % grid == 0]
        for position in passed[-2:]:
            self.set_state(run, position)
            if end - start > 1 and (checkpoint := memory.lend_checkpoint(lease, position)) is not None:
                memory.state.save(lease.slot, checkpoint)
            elif end - start == 1:
                memory.roll_checkpoint(lease, position)
        self.set_state(run, end)
        run.num_fed = end

    def set_state(self, run: Running, position: int) -> None:
        state = self.memory.state
        number = self.value(run, position)
        state.slots.states_NLHKV[run.lease.slot] = number
        state.slots.windows_NLJP[run.lease.slot] = number + 1
        state.length_N[run.lease.slot] = position

    def check(self, run: Running) -> None:
        """Everything that the sequence can read, against computing it from its tokens."""
        memory, lease, n = self.memory, run.lease, run.num_fed
        assert int(memory.state.length_N[lease.slot]) == n
        if n == 0:
            assert not memory.state.slots.states_NLHKV[lease.slot].any()
            return
        want = torch.tensor([self.value(run, t + 1) for t in range(n)])
        for layer in memory.state.pages_PSC:
            rows = memory.state.latent_rows(layer, lease.slot, n)[:n]
            assert torch.equal(rows, want.unsqueeze(-1).expand_as(rows))
        assert torch.equal(memory.state.slots.states_NLHKV[lease.slot].unique(), want[-1:].double())
        assert torch.equal(memory.state.slots.windows_NLJP[lease.slot].unique(), want[-1:] + 1)
        routes = memory.read_routes(lease, n)
        assert (routes == want.numpy().astype(np.int64).astype(np.uint8)[:, None, None]).all()

    def end(self, run: Running, keep: bool) -> None:
        self.memory.give_back(run.lease, run.tokens[: run.num_fed] if keep else ())
        self.running.remove(run)
        self.done["end" if keep else "abort"] += 1

    def update(self) -> None:
        rule = self.rng.choice(("drop", "keep", "continue"))
        if rule != "continue":
            for run in list(self.running):
                self.end(run, keep=False)
        self.step += 1
        kept = [*self.memory.cache.namespaces(), *(run.lease.namespace for run in self.running)]
        new = stepped(kept, self.step - 1, f"base {self.step}", self.step)
        self.memory.update(rule, new)
        if rule == "continue":
            self.done["continued"] += len(self.running)
        else:
            self.weights += 1
        self.namespaces = [replace(n, base_sha256=f"base {self.step}", policy_step=self.step) for n in self.namespaces]
        self.done["update"] += 1

    def operation(self) -> None:
        draw = self.rng.random()
        if draw < 0.003:
            self.update()
        elif draw < 0.2 or not self.running:
            self.take()
        else:
            run = self.rng.choice(self.running)
            if draw < 0.75:
                self.feed(run)
            elif draw < 0.85:
                self.memory.share(run.lease, run.tokens[: run.num_fed])
                self.done["share"] += 1
                self.check(run)
            else:
                self.end(run, keep=draw < 0.97)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_what_is_read_after_any_traffic_is_what_would_be_computed_anew(k3: K3Config, sizes: MemorySizes) -> None:
    """Takes, branches, growth, sharing, eviction, offload, restore, abort and updates, every tensor looked at after each."""
    cfg = replace(
        k3, kda_num_heads=1, kda_head_dim=2, num_hidden_layers=3, full_attn_layers=(2,), num_experts_per_token=1
    )
    done: dict[str, int] = {}
    for seed in range(3):
        traffic = Traffic(cfg, sizes, seed)
        for number in range(2500):
            traffic.operation()
            if number % 50 == 0:
                audit(traffic.memory.cache)
        for run in list(traffic.running):
            traffic.end(run, keep=True)
        audit(traffic.memory.cache)
        assert traffic.memory.free.pages == sizes.num_pages
        done = {name: done.get(name, 0) + count for name, count in traffic.done.items()}
        done["restored"] = done.get("restored", 0) + traffic.memory.cache.stats.restored_pages
    assert min(done[name] for name in ("take", "feed", "share", "end", "abort", "update", "hit", "continued")) > 0, done
    assert (done["restored"] > 0) == (sizes.num_host_pages >= 30), done
