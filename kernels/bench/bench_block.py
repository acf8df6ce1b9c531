"""A layer of Kimi K3 at full width, its experts in MXFP4, trained with LoRA of rank 64, and a whole model of 3 B parameters.

    PYTHONPATH=.:kernels python3 kernels/bench/bench_block.py --out kernels/bench/results/block_h200.json

"step": forward and backward of one decoder layer (a KDA or an MLA layer, each with its mixture of experts and its reads of
five rows by Attention Residuals) over packed sequences, into the gradients of its input and of all LoRA factors: of every
linear layer, and with "experts too" of the routed experts' matrices. Peers run in the same process: "reference" is the same
layer on the reference ops under torch.compile (loops over experts and chunks stay outside its graphs: they depend on the
data, or would be unrolled), "unpacked" is ours with the experts' matrices unpacked to bf16 and multiplied by torch's
grouped GEMM. Ours and each peer are compared with the layer in fp64 over 256 tokens under equal routes.

Two runs have equal bits but in the backward pass of an MLA layer: cuDNN's attention adds in no fixed order there.

"invariant": a layer's forward pass with products whose bits do not depend on the batch, beside the ordinary ones.

"profile": which kernels a step spends its time in, by operation: of the K3 layer, and of the 3 B model's training step
(LoRA, activation checkpointing, AdamW). `--only step,invariant,profile` chooses.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bench_engine import MODEL as MODEL_3B
from harness import Timing, describe_machine, peak_gib, relative_error, same_bits, time_on_device, write_result
from operations import operation_of
from torch import Tensor, nn

from k3core.model import kda as kda_module
from k3core.model import layers as layers_module
from k3core.model import moe as moe_module
from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig, attach_lora, detach_lora, lora_matrices
from k3core.model.model import DecoderLayer, build_model
from k3core.model.presets import PRESETS
from k3core.rl.optim import OptimConfig
from k3core.rl.trainer import Trainer
from k3kernels.dispatch import batch_invariant
from k3kernels.linear import linear
from k3kernels.moe import frozen, grouped
from k3kernels.moe.hopper import LowRank
from k3kernels.moe.matrices import Matrices, PackedMatrices
from k3kernels.packing import Packing

OUT = Path(__file__).parent / "results" / "block_h200.json"
DEVICE = torch.device("cuda")
RANK = 64
NUM_ROWS = 5  # of the residual's bank, the running sum included: K3's mean over its 93 layers
CHECKED = (100, 156)  # tokens of two sequences, compared with fp64
LIMIT = 4e-2  # a layer rounds to bf16 some twenty times on the way, and its gradients twice as often
K3 = replace(PRESETS["kimi-k3"], num_hidden_layers=2, full_attn_layers=(2,), first_k_dense_replace=0, vocab_size=256)
TINY = replace(
    K3, hidden_size=256, num_attention_heads=2, kda_num_heads=2, q_lora_rank=64, kv_lora_rank=64, num_experts=8,
    num_experts_per_token=2, moe_intermediate_size=256, routed_expert_hidden_size=256,
)  # fmt: skip
KINDS = ("KDA", "MLA")


class Layer:
    """One decoder layer with LoRA, alone; `run` is forward, `step` gives the output and every gradient by name."""

    def __init__(self, cfg: K3Config, kind: str, with_experts: bool, lengths: Sequence[int]) -> None:
        self.cfg, self.index = cfg, KINDS.index(kind)
        self.model = build_model(cfg, torch.bfloat16, DEVICE)
        self.model.init_weights(generator(0))
        self.model.layers[1 - self.index] = nn.Identity()
        paths = [path for path in lora_matrices(self.model) if "layers." in path]
        targets = [path for path in paths if with_experts or ".experts." not in path]
        with DEVICE:  # where the factors are drawn
            attach_lora(self.model, LoraConfig(RANK, float(RANK), tuple(targets)), generator(1))
        for name, p in self.layer.named_parameters():
            if name.endswith("lora_B"):  # zero at first, and then A would have no gradient
                p.data.normal_(0, 0.02 * RANK**-0.5, generator=generator(2))
            if name.endswith("res_proj.weight"):
                p.data.normal_(0, 0.02, generator=generator(3))
        self.of_tokens(lengths)

    @property
    def layer(self) -> DecoderLayer:
        layer = self.model.layers[self.index]
        assert isinstance(layer, DecoderLayer)
        return layer

    def of_tokens(self, lengths: Sequence[int]) -> None:
        self.packing = Packing(tuple(lengths), DEVICE)
        draw = {"generator": generator(4), "device": DEVICE, "dtype": torch.bfloat16}
        shape = (sum(lengths), self.cfg.hidden_size)
        self.rows = [torch.randn(shape, **draw) for _ in range(NUM_ROWS)]
        self.grad = torch.randn(shape, **draw)

    def run(self, prefix: Tensor, *bank: Tensor, replay: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        attend = partial(_attend, self.packing)
        return self.model._layer(self.layer, attend, False, prefix, replay, *bank)

    @property
    def factors(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.layer.named_parameters() if p.requires_grad}

    def step(self, run: Callable[..., tuple[Tensor, Tensor | None]], **options: Any) -> dict[str, Tensor]:
        *bank, prefix = (row.detach() for row in self.rows)
        prefix.requires_grad_()
        out, experts = run(prefix, *bank, **options)
        names = list(self.factors)
        grads = torch.autograd.grad(out, [prefix, *self.factors.values()], self.grad.to(out.dtype))
        assert experts is not None
        return {"out": out.detach(), "input": grads[0], "experts": experts} | dict(zip(names, grads[1:], strict=True))


def _attend(packing: Packing, attn: Any, x: Tensor) -> Tensor:
    return attn(x, packing, None, None, ())


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


@contextmanager
def in_mode(mode: str) -> Iterator[None]:
    """ours: kernels; unpacked: the same but for the experts' products; reference: no kernels at all."""
    if mode == "reference":
        yield
        return
    with batch_invariant(False):
        if mode == "ours":
            yield
            return
        with mock.patch.object(frozen, "moe_experts_frozen", partial(frozen.moe_experts_frozen, products_of=Unpacked)):
            yield


class Unpacked:
    """`hopper.Products` by torch's grouped GEMM, over matrices unpacked for every product."""

    def __init__(self, pairs: Any) -> None:
        self.pairs, self.offs = pairs, pairs.edges[1:]

    def gated(
        self, x: Tensor, w1: Matrices, w3: Matrices, betas: Any, _: bool, low_rank: LowRank | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        gate, up = (
            self.product(x, w, None if low_rank is None else LowRank(low_rank.z[m:], low_rank.factors[m:]))
            for m, w in enumerate((w1, w3))
        )
        return gate, up, grouped.activate(gate, up, self.pairs, betas)

    def product(self, x: Tensor, w: Matrices, low_rank: LowRank | None = None) -> Tensor:
        y: Tensor = torch._grouped_mm(x, _unpacked(w).mT, offs=self.offs)
        if low_rank is not None:
            y += torch._grouped_mm(low_rank.z[0], low_rank.factors[0].mT, offs=self.offs)
        return y

    def inputs_gradient(
        self, ys: Sequence[Tensor], matrices: Sequence[Matrices], low_rank: LowRank | None = None
    ) -> Tensor:
        x = sum(torch._grouped_mm(y, _unpacked(w), offs=self.offs) for y, w in zip(ys, matrices, strict=True))
        if low_rank is not None:
            for z, factor in zip(low_rank.z, low_rank.factors, strict=True):
                x += torch._grouped_mm(z, factor, offs=self.offs)
        assert isinstance(x, Tensor)
        return x


def _unpacked(w: Matrices) -> Tensor:
    assert isinstance(w, PackedMatrices)
    return dequantise(w.packed, w.scale)


@torch.compile(dynamic=False)
def dequantise(packed: Tensor, scale: Tensor) -> Tensor:
    """As `mxfp4.unpack`, for the compiler: one pass over the codes."""
    grid = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device=packed.device)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()
    values = grid[codes].unflatten(-1, (-1, 32)) * torch.exp2(scale.float() - 127).unsqueeze(-1)
    return values.flatten(-2).bfloat16()


def compiled_reference(layer: Layer) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """What depends on the data, or would unroll into thousands of steps, is called as it is."""
    moe_module.moe_experts = torch.compiler.disable(moe_module.moe_experts)  # type: ignore[attr-defined]
    kda_module.kda_chunked = torch.compiler.disable(kda_module.kda_chunked)  # type: ignore[attr-defined]
    return torch.compile(layer.run, dynamic=False)


def errors_of(layer: Layer, modes: Sequence[str]) -> dict[str, dict[str, float]]:
    """By mode, relative to fp64, the worst of each kind of tensor; on few tokens, all with ours' experts."""
    lengths = layer.packing.lengths
    layer.of_tokens(CHECKED)
    got = {}
    with in_mode("ours"):
        got["ours"] = layer.step(layer.run)
    experts = got["ours"]["experts"]
    for mode in modes:
        if mode != "ours":
            with in_mode(mode):
                got[mode] = layer.step(layer.run, replay=experts)
    exact = copy.copy(layer)
    exact.model = copy.deepcopy(layer.model).double()
    exact.rows = [row.double() for row in layer.rows]
    want = exact.step(exact.run, replay=experts)
    found = {}
    for mode, tensors in got.items():
        errors: dict[str, float] = {}
        for name, tensor in tensors.items():
            if name != "experts":
                kind = kind_of(name)
                errors[kind] = max(errors.get(kind, 0.0), relative_error(tensor, want[name]))
        found[mode] = {kind: float(f"{error:.3g}") for kind, error in errors.items()}
    layer.of_tokens(lengths)
    del exact, want
    free()
    return found


def kind_of(name: str) -> str:
    if "lora" not in name:
        return name
    place = "experts" if ".experts." in name else "attention" if "self_attn" in name else "MLP"
    return f"LoRA of {place}, {name[-1]}"


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def measure_steps(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    cfg, lengths = (TINY, (96, 64)) if options.tiny else (K3, options.lengths)
    for kind in options.kinds:
        for with_experts in [choice == "experts" for choice in options.lora]:
            free()
            layer = Layer(cfg, kind, with_experts, lengths)
            name = f"{kind} layer, LoRA of {'experts too' if with_experts else 'linear layers'}"
            errors = errors_of(layer, options.modes)
            for mode in options.modes:
                with in_mode(mode):
                    run = compiled_reference(layer) if mode == "reference" else layer.run
                    repeats = options.repeats if mode != "reference" else 3
                    try:
                        rows.append(row := measure_step(name, mode, layer, run, repeats))
                    except Exception as error:  # a peer may fail in any way; the others are still measured
                        rows.append(
                            row := {"what": name, "by": mode, "failed": f"{type(error).__name__}: {error}"[:300]}
                        )
                row |= {"errors": errors[mode], "tokens": sum(lengths)}
                show(row)
                write(options, rows=rows)
            del layer, run
    return rows


def measure_step(
    name: str, mode: str, layer: Layer, run: Callable[..., tuple[Tensor, Tensor | None]], repeats: int
) -> dict[str, Any]:
    started = time.perf_counter()
    first = layer.step(run)
    torch.cuda.synchronize()
    first_s = time.perf_counter() - started
    again: dict[str, Tensor] = {}
    peak = peak_gib(lambda: again.update(layer.step(run)))
    bits = all(same_bits(first[key], again[key]) for key in first)
    del first
    again.clear()
    warmup = 0 if mode == "reference" else 3  # it ran twice, and takes long
    timing = time_on_device(mode, lambda: layer.step(run), warmup=warmup, repeats=repeats)
    return {
        "what": name, "by": mode, "timing": timing, "peak_gib": peak, "same_bits": bits, "first_s": round(first_s, 1)
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    if "failed" in row:
        print(f"{row['what']} | {row['by']} | failed: {row['failed']}", flush=True)
        return
    timing: Timing = row["timing"]
    print(
        f"{row['what']} | {row['tokens']:,} tokens | {row['by']} | {timing.median_ms:.2f} ms, spread "
        f"{timing.spread_ms:.2f} | peak {row['peak_gib']:.1f} GiB | same bits {row['same_bits']} | {row.get('errors', '')}",
        flush=True,
    )


def profiled(work: Callable[[], object], warmup: int = 2) -> dict[str, Any]:
    """ms and share by operation, and the kernels that take the most."""
    for _ in range(warmup):
        work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    kernels = [
        (e.key, e.count, e.self_device_time_total / 1e3) for e in seen.key_averages() if e.self_device_time_total
    ]
    total = sum(ms for _, _, ms in kernels)
    by: dict[str, float] = {}
    for key, _, ms in kernels:
        by[operation_of(key)] = by.get(operation_of(key), 0.0) + ms
    for name, ms in sorted(by.items(), key=lambda item: -item[1]):
        print(f"    {name}: {ms:.2f} ms, {ms / total:.1%}", flush=True)
    largest = sorted(kernels, key=lambda kernel: -kernel[2])[:25]
    for key, count, ms in largest:
        print(f"        {ms:8.3f} ms {count:5d} x {key[:110]}", flush=True)
    return {
        "device_ms": round(total, 3),
        "by_operation": {name: [round(ms, 3), round(ms / total, 4)] for name, ms in by.items()},
        "kernels": [[key[:120], count, round(ms, 4)] for key, count, ms in largest],
    }


def profile_layers(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    cfg, lengths = (TINY, (96, 64)) if options.tiny else (K3, options.lengths)
    for kind in options.kinds:
        free()
        layer = Layer(cfg, kind, True, lengths)
        print(f"step of a {kind} layer, LoRA of experts too", flush=True)
        with in_mode("ours"):
            found[f"step of a {kind} layer, LoRA of experts too, {sum(lengths)} tokens"] = profiled(
                lambda layer=layer: layer.step(layer.run)  # type: ignore[misc]
            )
        del layer
    return found


def profile_3b(options: argparse.Namespace) -> dict[str, Any]:
    """A training step: forward with recomputation, the head's logprobs of half of the tokens, backward, AdamW."""
    free()
    cfg, lengths = (replace(TINY, vocab_size=1024), (96, 64)) if options.tiny else (MODEL_3B, options.lengths)
    model = build_model(cfg, torch.bfloat16, DEVICE)
    model.init_weights(generator(0))
    targets = tuple(path for path in lora_matrices(model) if "layers." in path)
    lora = LoraConfig(RANK, float(RANK), targets)
    trainer = Trainer(cfg, OptimConfig(learning_rate=1e-5), lora, seed=1, model=model, activation_checkpointing=True)
    packing = Packing(tuple(lengths), DEVICE)
    tokens = torch.randint(cfg.vocab_size, (sum(lengths),), generator=generator(1), device=DEVICE)
    targets_M = (packing.pos_T >= packing.lengths_N[packing.seq_T] // 2).nonzero().squeeze(-1)

    def step() -> None:
        trainer.forward_backward(tokens, packing, targets_M, lambda logprobs: (-logprobs.mean(), {}))
        trainer.optim_step()

    with in_mode("ours"):
        print("training step of the 3 B model", flush=True)
        found = profiled(step)
        timing = time_on_device("step", step, warmup=1, repeats=3)
        peak = peak_gib(step)
    print(
        f"    {timing.median_ms:.1f} ms, {sum(lengths) / timing.median_ms * 1e3:,.0f} tokens/s, {peak:.1f} GiB",
        flush=True,
    )
    return {f"training step of the 3 B model, {sum(lengths)} tokens": found | {"timing": timing, "peak_gib": peak}}


def _invariant_product(x: Tensor, weight: Tensor) -> Tensor:
    return linear(x.flatten(0, -2), weight).view(*x.shape[:-1], -1)


def measure_invariance(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Linear layers of a layer's forward pass in the form that gives a token its bits in any batch; everything else is
    the same form in both. The first sequence alone has to have the bits that it has in the batch."""
    rows = []
    cfg, lengths = (TINY, (96, 64)) if options.tiny else (K3, options.lengths)
    for kind in options.kinds:
        free()
        layer = Layer(cfg, kind, False, lengths)
        detach_lora(layer.model)

        def forward(layer: Layer = layer) -> Tensor:
            *bank, prefix = layer.rows
            with torch.no_grad():
                return layer.run(prefix, *bank)[0]

        for by in ("ordinary", "invariant"):
            product = _invariant_product if by == "invariant" else layers_module.product
            router = partial(linear, out_dtype=torch.float32) if by == "invariant" else moe_module.wide_output
            with (
                in_mode("ours"),
                mock.patch.object(layers_module, "product", product),
                mock.patch.object(moe_module, "wide_output", router),
            ):
                layer.of_tokens(lengths)
                whole = forward()
                timing = time_on_device(by, forward, repeats=options.repeats, is_queued=True)
                layer.rows = [row[: lengths[0]] for row in layer.rows]
                layer.packing = Packing(lengths[:1], DEVICE)
                differing = int((forward() != whole[: lengths[0]]).sum())
            row = {"what": f"{kind} layer, forward", "by": by, "timing": timing, "tokens": sum(lengths)}
            rows.append(row | {"elements_that_differ_alone": differing})
            print(
                f"{kind} layer, forward, {by}: {timing.median_ms:.3f} ms, {differing} elements differ alone", flush=True
            )
        del layer
    return rows


def write(options: argparse.Namespace, **sections: Any) -> None:
    """Into what the file has; of rows, those that are measured again are replaced. Raises ValueError for a file from
    another machine or other versions."""
    options.found |= sections
    machine = describe_machine()
    earlier = json.loads(options.out.read_text()) if options.out.exists() else {"machine": machine}
    if earlier["machine"] != machine:
        raise ValueError(f"{options.out} was measured on another machine or other versions: give another --out")
    write_result(options.out, merged(earlier, {"machine": machine, "config": {"rank": RANK}} | options.found))


def merged(earlier: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    found = earlier | new
    for section in ("rows", "invariant"):
        here = {(row["what"], row["by"]) for row in new.get(section, ())}
        kept = [row for row in earlier.get(section, ()) if (row["what"], row["by"]) not in here]
        found[section] = kept + list(new.get(section, ()))
    found["profile"] = earlier.get("profile", {}) | new.get("profile", {})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", default="step,invariant,profile")
    parser.add_argument("--modes", default="ours,unpacked,reference", type=lambda text: text.split(","))
    parser.add_argument("--kinds", default=",".join(KINDS), type=lambda text: text.split(","))
    parser.add_argument("--lora", default="experts,linear", type=lambda text: text.split(","), help="which of the two")
    parser.add_argument("--lengths", default=(4096, 4096), type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="narrow layers, to see that it runs")
    options = parser.parse_args()
    options.found = {}
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # docs/numerics.md
    sections = options.only.split(",")
    if "step" in sections:
        write(options, rows=measure_steps(options))
    if "invariant" in sections:
        write(options, invariant=measure_invariance(options))
    if "profile" in sections:
        write(options, profile=profile_layers(options))
        write(options, profile=options.found["profile"] | profile_3b(options))
    rows = options.found.get("rows", [])
    broken = [row for row in rows if row["by"] == "ours" and ("failed" in row or max(row["errors"].values()) > LIMIT)]
    broken += [row for row in rows if row["by"] == "ours" and row["what"].startswith("KDA") and not row["same_bits"]]
    broken += [
        row
        for row in options.found.get("invariant", [])
        if row["by"] == "invariant" and row["elements_that_differ_alone"]
    ]
    for row in broken:
        print(f"not kept: {row}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
