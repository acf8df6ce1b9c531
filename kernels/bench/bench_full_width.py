"""Kimi-Linear-48B-A3B whole and four layers of Kimi K3 at full width on one GPU: times, peak memory, and the plan's word.

    PYTHONPATH=.:kernels python3 kernels/bench/bench_full_width.py --out kernels/bench/results/full_width_h200.json

Random bf16 weights (K3's routed experts random MXFP4), made on the GPU. Everything runs on the reference and eager ops:
no fused kernel takes part, so the times say what those ops cost and no more. Before anything is timed the tiny models'
forward, decode and gradients on this device are compared with the CPU's; at full width decode is compared with prefill.
`--tiny` runs the same script over tiny models, on a CPU too.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig
from k3core.model.model import K3Model, build_model
from k3core.model.presets import PRESETS
from k3core.model.state import SlotState
from k3core.plan import MACHINES, Mesh, Training, plan, present_targets
from k3core.rl.advantages import Advantaged
from k3core.rl.gspo import GspoConfig
from k3core.rl.optim import OptimConfig
from k3core.rl.trainer import Trainer
from k3core.rl.update import UpdateConfig, update_policy
from k3core.types import SamplingParams, Trajectory
from k3kernels.linear_logprob import linear_logprob
from k3kernels.packing import Packing

GIB = 1 << 30
RANK = 64
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
GATES = ("g_proj", "g_a_proj", "g_b_proj")
MLPS = ("gate_proj", "up_proj", "down_proj", "routed_expert_down_proj", "routed_expert_up_proj")
TRAINED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Row:
    """One measured thing. plan_gib: what `k3core.plan` says of the peak; None where it has no word."""

    what: str
    tokens: int
    ms: float
    peak_gib: float
    plan_gib: float | None = None

    @property
    def cells(self) -> list[str]:
        off = "" if self.plan_gib is None else f"{self.plan_gib:.2f} ({self.plan_gib / self.peak_gib - 1:+.1%})"
        speed = f"{self.tokens / self.ms * 1e3:,.0f}"
        return [self.what, f"{self.tokens:,}", f"{self.ms:,.1f}", speed, f"{self.peak_gib:.2f}", off]


HEADER = ["", "tokens", "ms", "tokens/s", "peak, GiB", "plan, GiB"]


class Meter:
    """Wall time and the allocator's peak of a piece of work, device idle before and after."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @contextmanager
    def measure(self) -> Iterator[dict[str, float]]:
        found: dict[str, float] = {}
        self._settle()
        start = time.perf_counter()
        yield found
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            found["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        else:
            found["peak_gib"] = float("nan")
        found["ms"] = (time.perf_counter() - start) * 1e3

    def _settle(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def describe(device: torch.device) -> dict[str, object]:
    if device.type == "cuda":
        from harness import describe_machine  # needs triton and nvidia-smi

        return describe_machine()
    return {"device": platform.processor() or "CPU", "torch": torch.__version__, "python": platform.python_version()}


def random_model(cfg: K3Config, device: torch.device, seed: int = 0) -> K3Model:
    model = build_model(cfg, torch.bfloat16, device)
    model.init_weights(torch.Generator(device).manual_seed(seed))
    return model


def random_tokens(cfg: K3Config, num: int, device: torch.device, seed: int = 1) -> Tensor:
    return torch.randint(cfg.vocab_size, (num,), generator=torch.Generator().manual_seed(seed)).to(device)


def relative_error(a: Tensor, b: Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm())


def tiny_linear() -> K3Config:
    return dataclasses.replace(
        PRESETS["tiny"],
        q_lora_rank=None,
        mla_use_output_gate=False,
        use_full_rank_gate=False,
        gate_lower_bound=None,
        routed_expert_hidden_size=None,
        latent_moe_use_norm=False,
        hidden_act="silu",
        activation_situ_linear_beta=None,
        attn_res_block_size=None,
    )


def tiny_packed() -> K3Config:
    return dataclasses.replace(
        PRESETS["tiny"], routed_expert_hidden_size=64, moe_intermediate_size=64, expert_quantization="mxfp4"
    )


def check_against_cpu(device: torch.device) -> dict[str, float]:
    """Tiny models in fp32: logits of a packed forward, of decode, and all LoRA gradients, this device against the CPU."""
    errors: dict[str, float] = {}
    models = {"kimi_k3": PRESETS["tiny"], "kimi_linear": tiny_linear(), "kimi_k3 packed": tiny_packed()}
    for name, cfg in models.items():
        seen = {}
        for where in (torch.device("cpu"), device):
            model = build_model(cfg, torch.float32, "cpu")
            model.init_weights(torch.Generator().manual_seed(3))
            model.to(where)
            seen[where.type] = _tiny_results(model, cfg, where)
        for part, value in seen[device.type].items():
            errors[f"{name}: {part}"] = relative_error(value, seen["cpu"][part])
    worst = max(errors.values())
    assert worst < 1e-4, f"this device and the CPU differ: {errors}"
    return errors


def _tiny_results(model: K3Model, cfg: K3Config, device: torch.device) -> dict[str, Tensor]:
    lengths = (1, 37, 64)
    tokens_T = random_tokens(cfg, sum(lengths), device)
    lora = LoraConfig(4, 8.0, ("q_proj", "o_proj", "kv_b_proj", "w1", "w2", "w3"))
    trainer = Trainer(cfg, OptimConfig(), lora, seed=5, model=model)
    state = SlotState(cfg, 4, 80, torch.float32, device)
    packing = Packing(lengths, device)
    with torch.no_grad():
        hidden_TD = model(tokens_T, packing, None, state, torch.arange(3, device=device)).hidden_TD
        active_N = torch.tensor([True, True, True, False], device=device)
        decoded_ND = model.decode(tokens_T[:4], state, active_N).hidden_TD[:3]
    target_M = torch.arange(2, 38, device=device)
    trainer.forward_backward(tokens_T, packing, target_M, lambda logprobs_M: (logprobs_M.sum(), {}))
    grads = torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None])
    return {"forward": model.logits(hidden_TD), "decode": model.logits(decoded_ND), "gradients": grads}


@torch.no_grad()
def serve(
    cfg: K3Config, model: K3Model, device: torch.device, num_tokens: int, meter: Meter
) -> tuple[list[Row], float]:
    """Prefill, decode for one sequence and for eight, and the relative error of decoded against prefilled logits.

    Random routers are near ties everywhere, and a route that bf16 turns is another model: the error is taken with a
    selection bias that gives every token the same experts.
    """
    rows = []
    num_decoded = 16
    tokens_T = random_tokens(cfg, num_tokens, device)
    slots_N = torch.zeros(1, dtype=torch.long, device=device)

    def prefill(num: int) -> tuple[SlotState, Tensor]:
        state = SlotState(cfg, 1, num_tokens + 64, torch.bfloat16, device)
        hidden_TD = model(tokens_T[:num], Packing((num,), device), None, state, slots_N).hidden_TD
        return state, model.logits(hidden_TD[-1:])

    prefill(256)  # handles, libraries

    def decode(state: SlotState) -> Tensor:
        for token_N in tokens_T[-num_decoded:].split(1):
            hidden_ND = model.decode(token_N, state, active_N).hidden_TD
        return model.logits(hidden_ND)

    active_N = torch.ones(1, dtype=torch.bool, device=device)
    with meter.measure() as found:
        prefill(num_tokens)
    rows.append(
        Row(
            f"prefill, {num_tokens:,} tokens",
            num_tokens,
            **found,
            plan_gib=served_gib(cfg, num_tokens, 1, prefill=True),
        )
    )
    state, _ = prefill(num_tokens - num_decoded)
    with meter.measure() as found:
        decode(state)
    found["ms"] /= num_decoded
    rows.append(Row("decode, one sequence, a step", 1, **found, plan_gib=served_gib(cfg, num_tokens, 1)))
    with same_experts_for_all(model):
        state, _ = prefill(num_tokens - num_decoded)
        error = relative_error(decode(state), prefill(num_tokens)[1])

    batch = SlotState(cfg, 8, num_tokens + 64, torch.bfloat16, device)
    lengths = (num_tokens // 8,) * 8
    model(tokens_T[: sum(lengths)], Packing(lengths, device), None, batch, torch.arange(8, device=device))
    active_N = torch.ones(8, dtype=torch.bool, device=device)
    with meter.measure() as found:
        for _ in range(num_decoded):
            model.decode(tokens_T[:8], batch, active_N)
    found["ms"] /= num_decoded
    rows.append(Row("decode, eight sequences, a step", 8, **found, plan_gib=served_gib(cfg, num_tokens, 8)))
    return rows, error


def check_logprobs(device: torch.device, num_rows: int, width: int, vocabulary: int, meter: Meter) -> dict[str, float]:
    """The head in blocks, bf16, against whole logits in fp64: nats, the gradient's relative error, memory it takes."""
    generator = torch.Generator(device).manual_seed(11)
    draw = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    hidden_MD = torch.randn(num_rows, width, **draw).requires_grad_()
    weight_VD = torch.randn(vocabulary, width, **draw).mul_(width**-0.5)
    tokens_M = torch.randint(vocabulary, (num_rows,), generator=generator, device=device)
    before = torch.cuda.memory_allocated() / GIB if device.type == "cuda" else 0.0
    with meter.measure() as found:
        logprobs_M = linear_logprob(hidden_MD, weight_VD, tokens_M)
        (grad_MD,) = torch.autograd.grad(logprobs_M.sum(), hidden_MD)
    worst, errors, norms = 0.0, 0.0, 0.0
    for rows in torch.arange(num_rows, device=device).split(64):
        exact_rD = hidden_MD.detach()[rows].double().requires_grad_()
        logits_rV = exact_rD @ weight_VD.double().T
        want_r = logits_rV.log_softmax(-1).gather(1, tokens_M[rows, None]).squeeze(-1)
        (want_rD,) = torch.autograd.grad(want_r.sum(), exact_rD)
        worst = max(worst, float((logprobs_M[rows].detach() - want_r.detach()).abs().max()))
        errors += float((grad_MD[rows].double() - want_rD).square().sum())
        norms += float(want_rD.square().sum())
    assert worst < 1e-4, f"logprobs in blocks are off by {worst} nat"
    return {
        "rows": num_rows,
        "largest difference, nat": worst,
        "gradient, relative error": (errors / norms) ** 0.5,
        "ms": found["ms"],
        "extra memory, GiB": found["peak_gib"] - before,
    }


@contextmanager
def same_experts_for_all(model: K3Model) -> Iterator[None]:
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for bias_E in biases:
        bias_E.copy_(torch.linspace(0, 10 * len(bias_E), len(bias_E)))
    yield
    for bias_E in biases:
        bias_E.zero_()


def served_gib(cfg: K3Config, num_tokens: int, num_sequences: int, prefill: bool = False) -> float:
    """Weights, MLA cache (every slot as long as the longest history), KDA states, and with `prefill` a pass's tensors."""
    made = plan(
        cfg, MACHINES["h200"], Mesh(), Training((num_tokens,), targets=("o_proj",), rollout_sequences=num_sequences)
    )
    (rollout,) = (phase for phase in made.phases if phase.name == "rollout")
    rows = ["weights", "MLA cache", "KDA states and windows"]
    if prefill:
        rows.append("a prefill's own tensors")
    return sum(row.num_bytes for row in rollout.rows if row.name in rows) / GIB


def planned_gib(cfg: K3Config, lengths: tuple[int, ...], lora: LoraConfig) -> float:
    training = Training(lengths, "lora", lora.rank, lora.targets, TRAINED_SHARE)
    return plan(cfg, MACHINES["h200"], Mesh(), training).peak_bytes / GIB


def lora_for(cfg: K3Config) -> LoraConfig:
    return LoraConfig(RANK, float(RANK), present_targets(cfg, (*ATTENTION, *GATES, *MLPS)))


def trajectories(
    cfg: K3Config, model: K3Model, trainer: Trainer, device: torch.device, lengths: tuple[int, ...]
) -> list[Advantaged]:
    """Random episodes whose second half was sampled, with the routes and logprobs that this model gives them."""
    tokens_T = random_tokens(cfg, sum(lengths), device, seed=7)
    packing = Packing(lengths, device)
    is_target_T = packing.pos_T >= packing.lengths_N[packing.seq_T] // 2
    target_M = is_target_T.nonzero().squeeze(-1)
    with torch.no_grad():
        routes_TLk = model(tokens_T, packing).routed_experts_TLk
        logprobs_M = trainer.logprobs(tokens_T, packing, target_M, routes_TLk, 1.0)
    logprobs_T = torch.zeros(len(tokens_T)).masked_scatter(is_target_T.cpu(), logprobs_M.float().cpu())
    out, start = [], 0
    for n, length in enumerate(lengths):
        part = slice(start, start + length)
        start += length
        mask_T = is_target_T[part].cpu().numpy()
        routes = routes_TLk[part].cpu().numpy().astype(np.uint16)
        routes[-1] = np.iinfo(np.uint16).max  # the last token was never an input
        out.append(
            Trajectory(
                prompt_id="random",
                sample=n,
                seed=n,
                tokens_T=tokens_T[part].cpu().numpy().astype(np.int32),
                loss_mask_T=mask_T,
                rollout_logprobs_T=np.where(mask_T, logprobs_T[part].numpy(), 0).astype(np.float32),
                routed_experts_TLk=routes,
                policy_step_T=np.where(mask_T, 0, -1).astype(np.int32),
                sampling=SamplingParams(),
                stop_reason="finished",
                num_turns=1,
                num_tool_calls=0,
                routed_layers=cfg.routed_layers,
            )
        )
    return [Advantaged(trajectory, 1.0 if n % 2 else -1.0) for n, trajectory in enumerate(out)]


def gspo_step(
    cfg: K3Config, model: K3Model, device: torch.device, lengths: tuple[int, ...], lora: LoraConfig, meter: Meter
) -> tuple[list[Row], dict[str, float]]:
    """One LoRA update by the trainer's own path: old logprobs, forward, backward, AdamW; routes replayed."""
    trainer = Trainer(cfg, OptimConfig(learning_rate=1e-5), lora, seed=1, model=model, activation_checkpointing=True)
    kept = trajectories(cfg, model, trainer, device, lengths)
    update = UpdateConfig(minibatches=1, microbatch_rows=len(lengths), router_replay=True)
    predicted = planned_gib(cfg, lengths, lora)
    num_tokens, rows, drifts = sum(lengths), [], {}
    for name in ("first", "second"):  # AdamW's moments come with the first
        with meter.measure() as found:
            result = update_policy(trainer, kept, update, GspoConfig(), seed=0, policy_step=0)
        assert not result.vetoes, result.vetoes
        drifts[f"{name}: drift/abs_max"] = result.metrics["drift/numeric/abs_max"]
        rows.append(
            Row(
                f"LoRA GSPO step, rank {lora.rank}, {num_tokens:,} packed tokens ({name})",
                num_tokens,
                **found,
                plan_gib=predicted,
            )
        )
    return rows, {**drifts, "train/grad_norm": result.metrics["train/grad_norm"]}


def forward_backward(
    cfg: K3Config, model: K3Model, device: torch.device, num_tokens: int, lora: LoraConfig, meter: Meter
) -> list[Row]:
    """A packed forward without gradients, then forward and backward into the LoRA factors; each twice, second reported."""
    trainer = Trainer(cfg, OptimConfig(), lora, seed=1, model=model, activation_checkpointing=True)
    tokens_T = random_tokens(cfg, num_tokens, device)
    packing = Packing((num_tokens // 2, num_tokens - num_tokens // 2), device)
    target_M = (packing.pos_T >= num_tokens // 4).nonzero().squeeze(-1)
    predicted = planned_gib(cfg, packing.lengths, lora)

    def forward() -> None:
        with torch.no_grad():
            routes.append(model(tokens_T, packing).routed_experts_TLk)

    def train() -> None:
        trainer.optimizer.zero_grad()
        trainer.forward_backward(tokens_T, packing, target_M, lambda logprobs_M: (-logprobs_M.mean(), {}), routes[0])

    routes: list[Tensor] = []
    rows = []
    works: list[tuple[str, Callable[[], None], float | None]] = [
        (f"forward, {num_tokens:,} packed tokens", forward, None),
        (f"forward and LoRA backward, {num_tokens:,} packed tokens", train, predicted),
    ]
    for name, work, plan_gib in works:
        work()
        with meter.measure() as found:
            work()
        rows.append(Row(name, num_tokens, **found, plan_gib=plan_gib))
    without = [name for name, p in trainer.optimizer.parameters.items() if p.grad is None]
    assert not without, f"no gradient reached {without[:5]}"
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--tiny", action="store_true")
    arguments.add_argument("--models", nargs="*", default=["kimi-linear", "kimi-k3"])
    options = arguments.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # docs/numerics.md
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    meter = Meter(device)
    result: dict[str, object] = {"machine": describe(device), "config": {"rank": RANK, "dtype": "bfloat16"}}
    result["errors_against_cpu"] = check_against_cpu(device)
    head = (200, 96, 4096) if options.tiny else (1638, 7168, 163840)
    result["head in blocks against fp64"] = check_logprobs(device, *head, meter)
    print(json.dumps(result, indent=1), flush=True)
    table = [HEADER]
    sizes = {True: (256, (64, 96, 2, 94)), False: (8192, (4096, 4096, 4096, 4096))}
    num_tokens, lengths = sizes[options.tiny]

    if "kimi-linear" in options.models:
        cfg = tiny_linear() if options.tiny else PRESETS["kimi-linear-48b-a3b"]
        model = random_model(cfg, device)
        rows, error = serve(cfg, model, device, num_tokens, meter)
        show("Kimi-Linear-48B-A3B", rows, table)
        result["kimi-linear: decode against prefill, relative error of logits under equal routes"] = error
        rows, metrics = gspo_step(cfg, model, device, lengths, lora_for(cfg), meter)
        show("Kimi-Linear-48B-A3B", rows, table)
        result["kimi-linear: GSPO steps"] = metrics
        write(options.out, result, table)
        del model
    if "kimi-k3" in options.models:
        cfg = dataclasses.replace(PRESETS["kimi-k3"], num_hidden_layers=4, full_attn_layers=(4,))
        if options.tiny:
            cfg = tiny_packed()
        model = random_model(cfg, device)
        rows, error = serve(cfg, model, device, num_tokens, meter)
        show("four layers of K3", rows, table)
        result["kimi-k3: decode against prefill, relative error of logits under equal routes"] = error
        show("four layers of K3", forward_backward(cfg, model, device, num_tokens, lora_for(cfg), meter), table)
        write(options.out, result, table)


def show(model: str, rows: list[Row], table: list[list[str]]) -> None:
    for row in rows:
        cells = row.cells
        table.append([f"{model}: {cells[0]}", *cells[1:]])
        print(" | ".join(table[-1]), flush=True)


def write(out: Path | None, result: dict[str, object], table: list[list[str]]) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**result, "table": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
