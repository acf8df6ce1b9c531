"""The rollout engine on one GPU: bits against the trainer's, tokens/s over the bandwidth floor, the multi-turn workload.

PYTHONPATH=.:kernels python kernels/bench/bench_engine.py [--out FILE] [--only parity,decode,...]

A K3-architecture model of 3.0 B parameters, random weights, bf16. Each section writes what it found as it goes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from k3core.model.config import K3Config
from k3core.model.sizes import (
    conv_window_bytes,
    kda_state_bytes,
    mla_cache_bytes,
    num_active_parameters,
    num_parameters,
    stored_bytes,
)
from k3core.model.weights import named_tensors
from k3core.parity import Parity, awake_model
from k3core.rollout.engine import K3Engine
from k3core.rollout.gpu_runner import GpuRunner
from k3core.rollout.memory import EngineMemory, MemorySizes
from k3core.rollout.prefix_cache import Copy, hit_ceiling
from k3core.rollout.protocol import GenerateRequest
from k3core.rollout.runner import Pieces
from k3core.types import SamplingParams

OUT = Path(__file__).parent / "checks" / "engine_h200.json"
PAGE = 64
DEVICE = torch.device("cuda")
SIZES = MemorySizes(page_size=PAGE, grid=PAGE)
MAX_WORKLOAD_S = 300  # no further cache size is begun after this

MODEL = K3Config(
    vocab_size=163_840,
    hidden_size=2048,
    num_hidden_layers=28,
    num_attention_heads=16,
    full_attn_layers=tuple(range(4, 29, 4)),
    q_lora_rank=768,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    kda_num_heads=16,
    kda_head_dim=128,
    intermediate_size=6144,
    num_experts=36,
    num_experts_per_token=8,
    moe_intermediate_size=512,
    routed_expert_hidden_size=1024,
    attn_res_block_size=7,
)


def median_ms(work: Callable[[], object], repeats: int = 20) -> tuple[float, float]:
    """(median, interquartile range) of the device's time."""
    times = []
    for repeat in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end))
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, high - low


def copy_bytes_per_ms() -> float:
    source = torch.randn(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source))[0]


def parity() -> dict[str, Any]:
    """Products of the 3 B model's shapes, eight of its layers, a smaller vocabulary."""
    cfg = replace(MODEL, num_hidden_layers=8, full_attn_layers=(4, 8), vocab_size=32_768, attn_res_block_size=2)
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        ways = Parity(cfg, dtype, DEVICE, num_sequences=8, prompt_tokens=(1, 400), sizes=SIZES)
        found[name] = [asdict(case) for case in ways.cases(lambda case: print(case, flush=True))]
        if dtype == torch.float32:
            found["replay_gap, bf16 engine under an fp32 trainer"] = [
                asdict(c) for c in ways.replay_gap(torch.bfloat16)
            ]
        del ways
        torch.cuda.empty_cache()
    cases = [case for dtype in ("bfloat16", "float32") for case in found[dtype]]
    found["differing"] = sum(case["num_differing"] for case in cases)
    assert found["differing"] == 0, "logprobs differ"
    assert all(case["is_taken"] for case in cases), "a way was not taken"
    return found


def read_bytes(cfg: K3Config, B: int, context: int) -> float:
    """What one decoding step has to move at least: weights once, of the experts those that B tokens choose on average;
    each sequence's states (written once in 16), windows and latent rows."""
    experts = cfg.num_experts * (1 - (1 - cfg.num_experts_per_token / cfg.num_experts) ** B)
    per_expert = 3 * cfg.moe_intermediate_size * (cfg.routed_expert_hidden_size or cfg.hidden_size) * 2
    unused = len(cfg.moe_layers) * (cfg.num_experts - experts) * per_expert
    weights = sum(stored_bytes(cfg).values()) - 2 * cfg.vocab_size * cfg.hidden_size - unused
    state = kda_state_bytes(cfg) * (1 + 1 / 16) + 2 * conv_window_bytes(cfg)
    return weights + B * (state + context * mla_cache_bytes(cfg))


def decode() -> dict[str, Any]:
    bytes_per_ms, context, steps = copy_bytes_per_ms(), 1024, 8
    model = awake_model(MODEL, torch.bfloat16, DEVICE)
    found: dict[str, Any] = {
        "parameters": num_parameters(MODEL),
        "active_parameters": num_active_parameters(MODEL),
        "context": context,
        "copy_tb_per_s": bytes_per_ms / 1e9,
        "rows": [],
    }
    sizes = replace(SIZES, num_pages=256 * (context // PAGE + 1), num_checkpoints=1)
    memory = EngineMemory(MODEL, 256, context + PAGE, sizes, torch.bfloat16, DEVICE)
    pages = torch.arange(sizes.num_pages or 0, device=DEVICE).view(256, -1)
    memory.state.table_NM[:, : pages.shape[1]] = pages
    memory.state.slots.states_NLHKV.normal_(0, 0.01)
    for is_invariant in (True, False):
        runner = GpuRunner(model, memory.state, is_invariant)
        for B in (1, 8, 64, 256):
            arguments = (list(range(B)), list(range(B)), [context] * B)
            runner.decode(*arguments)
            graph = runner.decode_graph(B)

            def replay(graph: torch.cuda.CUDAGraph = graph.graph) -> None:
                for _ in range(steps):
                    graph.replay()

            total, spread = median_ms(replay)
            floor = read_bytes(MODEL, B, context) / bytes_per_ms
            ms = total / steps
            row = {
                "batch": B,
                "batch_invariant": is_invariant,
                "step_ms": ms,
                "spread_ms": spread / steps,
                "floor_ms": floor,
                "over_floor": ms / floor,
                "tokens_per_s": B / ms * 1e3,
            }
            found["rows"].append(row)
            print(row, flush=True)
        del runner
    by = {(row["batch"], row["batch_invariant"]): row["step_ms"] for row in found["rows"]}
    found["cost_of_batch_invariance_percent"] = {B: 100 * (by[B, True] / by[B, False] - 1) for B in (1, 8, 64, 256)}
    return found


def profile() -> dict[str, Any]:
    """Where a step of 64 rows goes, by kernel."""
    model = awake_model(MODEL, torch.bfloat16, DEVICE)
    sizes = replace(SIZES, num_pages=64 * 17, num_checkpoints=1)
    memory = EngineMemory(MODEL, 64, 1024 + PAGE, sizes, torch.bfloat16, DEVICE)
    memory.state.table_NM[:, :17] = torch.arange(64 * 17, device=DEVICE).view(64, 17)
    runner = GpuRunner(model, memory.state)
    found: dict[str, Any] = {}
    for B in (1, 64):
        arguments = (list(range(B)), list(range(B)), [1024] * B)
        runner.decode(*arguments)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            runner.decode(*arguments)
            torch.cuda.synchronize()
        kernels = sorted(seen.key_averages(), key=lambda e: -e.device_time_total)
        found[f"batch {B}"] = {e.key[:70]: [e.count, round(e.device_time_total / 1e3, 4)] for e in kernels[:28]}
    return found


def make_engine(model: torch.nn.Module, num_slots: int, max_length: int, sizes: MemorySizes) -> K3Engine:
    engine = K3Engine(
        *(MODEL, -1, num_slots, max_length),
        max_batch_tokens=8192,
        sizes=sizes,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    engine.load(0, named_tensors(model))  # type: ignore[arg-type]
    return engine


def end_to_end() -> dict[str, Any]:
    """Through the engine's loop: prompts of 512 tokens, 256 drawn."""
    model = awake_model(MODEL, torch.bfloat16, DEVICE)
    engine = make_engine(model, 256, 1024, replace(SIZES, num_pages=256 * 14, num_checkpoints=512))
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}

    async def run(prompts: list[list[int]]) -> None:
        params = SamplingParams(max_tokens=256)
        await asyncio.gather(*[engine.generate(GenerateRequest(f"s{n}", p, params, n)) for n, p in enumerate(prompts)])

    for B in (1, 8, 64, 256):
        asyncio.run(run([rng.integers(0, 1000, 512).tolist() for _ in range(B)]))  # captures
        prompts = [rng.integers(0, 1000, 512).tolist() for _ in range(B)]
        started = time.perf_counter()
        asyncio.run(run(prompts))
        seconds = time.perf_counter() - started
        found[f"batch {B}"] = {"seconds": seconds, "output_tokens_per_s": B * 256 / seconds}
        print(B, found[f"batch {B}"], flush=True)
    return found


async def play_all(engine: K3Engine, num_trajectories: int, num_turns: int, asked: list[tuple[str, list[int]]]) -> None:
    """128 agents: 24 tokens drawn a turn, 40 come back, after a time with a heavy tail. What they ask goes to `asked`."""

    async def trajectory(n: int) -> None:
        shared, group, own = (np.random.default_rng(seed) for seed in (0, 1000 + n // 8, 5000 + n))
        tokens = [*shared.integers(0, 1000, 512).tolist(), *group.integers(0, 1000, 256).tolist()]
        for turn in range(num_turns):
            asked.append(("", list(tokens)))
            request = GenerateRequest(f"s{n}", tokens, SamplingParams(max_tokens=24), n, num_drawn=24 * turn)
            generation = await engine.generate(request)
            tokens = [*tokens, *generation.tokens_T.tolist(), *own.integers(0, 1000, 40).tolist()]
            await asyncio.sleep(float(min(2.0, 0.02 * own.pareto(1.5))))

    await asyncio.gather(*[trajectory(n) for n in range(num_trajectories)])


def workload(num_turns: int = 50, num_trajectories: int = 128) -> dict[str, Any]:
    """Shared prompts in groups of 8, tool times with a heavy tail; hit rate over its ceiling at several cache sizes."""
    model = awake_model(MODEL, torch.bfloat16, DEVICE)
    found: dict[str, Any] = {}
    longest = 768 + num_turns * 64 + 64
    need = num_trajectories * -(-longest // PAGE)
    host = (need, 8 * num_trajectories)
    cases = {  # flows/bench_cache.py rehearses them
        "130 % of the pages, 12 states a trajectory": MemorySizes(PAGE, PAGE, int(need * 1.3), 12 * num_trajectories),
        "60 %, 2.5 states, host tier": MemorySizes(PAGE, PAGE, int(need * 0.6), 5 * num_trajectories // 2, *host),
        "35 %, 1.25 states, host tier": MemorySizes(PAGE, PAGE, int(need * 0.35), 5 * num_trajectories // 4, *host),
        "60 %, 2.5 states": MemorySizes(PAGE, PAGE, int(need * 0.6), 5 * num_trajectories // 2),
    }
    begun = time.perf_counter()
    for name, sizes in cases.items():
        if time.perf_counter() - begun > MAX_WORKLOAD_S:
            found[name] = "not run: out of time"
            continue
        engine = make_engine(model, num_trajectories, longest, sizes)
        asked: list[tuple[str, list[int]]] = []
        started = time.perf_counter()
        asyncio.run(play_all(engine, num_trajectories, num_turns, asked))
        seconds = time.perf_counter() - started
        ceiling, stats = hit_ceiling(asked, PAGE), engine.stats
        found[name] = {
            "pages": sizes.num_pages,
            "states": sizes.num_checkpoints,
            "host_pages": sizes.num_host_pages,
            "host_states": sizes.num_host_checkpoints,
            "seconds": seconds,
            "output_tokens_per_s": num_trajectories * num_turns * 24 / seconds,
            "hit_rate": stats.hit_rate,
            "ceiling": ceiling.rate,
            "over_ceiling": stats.hit_tokens / ceiling.hit_tokens,
            "preempted": engine.num_preempted,
            "restored_pages": stats.restored_pages,
            "restored_states": stats.restored_checkpoints,
        }
        print(name, found[name], flush=True)
        del engine
        torch.cuda.empty_cache()
    return found


def restore() -> dict[str, Any]:
    """One history back from the host, or computed again."""
    model = awake_model(MODEL, torch.bfloat16, DEVICE)
    longest = 32_768
    num_pages = longest // PAGE + 1
    sizes = MemorySizes(PAGE, PAGE, num_pages, 1, num_pages, 1)
    memory = EngineMemory(MODEL, 1, longest, sizes, torch.bfloat16, DEVICE)
    memory.state.set_pages(0, range(longest // PAGE))
    runner = GpuRunner(model, memory.state)
    found: dict[str, Any] = {
        "state_bytes": memory.cache_config.checkpoint_bytes,
        "page_bytes": memory.cache_config.page_bytes,
    }
    for length in (64, 128, 256, 512, 1024, 4096, 16_384, 32_768):
        copies = [Copy("page", "to_device", n, n) for n in range(length // PAGE)]
        copies.append(Copy("checkpoint", "to_device", 0, 0))

        def bring(copies: list[Copy] = copies, length: int = length) -> None:
            memory._perform(copies)
            memory.state.restore(0, 0, length)

        def compute(length: int = length) -> None:
            for start in range(0, length, 8192):
                piece = min(8192, length - start)
                runner.prefill(Pieces([7] * piece, [piece], [0], [start]))

        restored, recomputed = median_ms(bring, 5)[0], median_ms(compute, 5)[0]
        found[f"{length} tokens"] = {"restore_ms": restored, "recompute_ms": recomputed}
        print(length, restored, recomputed, flush=True)
    return found


SECTIONS = {
    "parity": parity,
    "decode": decode,
    "profile": profile,
    "end_to_end": end_to_end,
    "workload": workload,
    "restore": restore,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", default=",".join(SECTIONS))
    arguments = parser.parse_args()
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    result: dict[str, Any] = json.loads(json.dumps(machine | {"model": asdict(MODEL), "sections": {}, "failed": []}))
    if arguments.out.exists():  # other sections stay, if they are of the same machine and model
        earlier = json.loads(arguments.out.read_text())
        if all(earlier[key] == result[key] for key in (*machine, "model")):
            result["sections"] = earlier["sections"]
    for name in arguments.only.split(","):
        started = time.perf_counter()
        try:
            found = SECTIONS[name]()
        except Exception:
            found = {"error": traceback.format_exc()}
            result["failed"].append(name)
            print(found["error"], flush=True)
        result["sections"][name] = found | {"section_seconds": time.perf_counter() - started}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        torch.cuda.empty_cache()
    print("failed:", result["failed"])
    return int(bool(result["failed"]))


if __name__ == "__main__":
    sys.exit(main())
