"""A whole model's gradients on one GPU, in each form of its operations, beside those of fp32.

    PYTHONPATH=.:kernels python kernels/bench/check_gradients.py [--out FILE]

A K3-architecture model of 3 layers at width 1024 as training begins with it, 1,500 tokens of three packed sequences, in bf16: by
eager operations, by kernels, and by the batch-invariant kernels that an engine runs. Of each parameter the relative error
against the same bf16 weights computed in fp32 by eager operations. Kernels may err MARGIN times as far as eager operations
do, which round the same values at more places, and two runs must be equal to the last bit. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import triton
from torch import Tensor

from k3core.model.config import K3Config
from k3core.model.model import K3Model, build_model
from k3kernels.dispatch import batch_invariant
from k3kernels.packing import Packing

OUT = Path(__file__).parent / "checks" / "gradients_h200.json"
DEVICE = torch.device("cuda")
MARGIN = 1.3
LENGTHS = (700, 1, 799)
CONFIG = K3Config(
    vocab_size=4096,
    hidden_size=1024,
    num_hidden_layers=3,
    num_attention_heads=8,
    full_attn_layers=(3,),
    q_lora_rank=384,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    kda_num_heads=8,
    kda_head_dim=128,
    intermediate_size=2048,
    num_experts=8,
    num_experts_per_token=2,
    moe_intermediate_size=512,
    routed_expert_hidden_size=512,
    attn_res_block_size=2,
)


def forms() -> Iterator[tuple[str, AbstractContextManager[None]]]:
    yield "eager", nullcontext()
    yield "kernels", batch_invariant(False)
    yield "batch-invariant kernels", batch_invariant(True)


def gradients(model: K3Model, tokens_T: Tensor, routes_TLk: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
    """By name, of the mean logprob of each next token; and the experts that were chosen."""
    model.zero_grad(set_to_none=True)
    forward = model(tokens_T, Packing(LENGTHS, DEVICE), routes_TLk)
    model.logprobs(forward.hidden_TD[:-1], tokens_T[1:], 1.0).mean().backward()
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return found, forward.routed_experts_TLk


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    out: Path = parser.parse_args().out
    narrow = build_model(CONFIG, torch.bfloat16, DEVICE)
    narrow.init_weights(torch.Generator(DEVICE).manual_seed(0))
    exact = K3Model(CONFIG).to(DEVICE, torch.float32)
    exact.load_state_dict(narrow.state_dict())
    for model in (narrow, exact):
        model.requires_grad_(True)
    tokens_T = torch.randint(0, CONFIG.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0)).to(
        DEVICE
    )
    wanted, routes = gradients(exact, tokens_T, None)

    rows: dict[str, dict[str, object]] = {}
    errors: dict[str, dict[str, float]] = {}
    for name, form in forms():
        with form:
            begin = time.perf_counter()
            found, _ = gradients(narrow, tokens_T, routes)
            again, _ = gradients(narrow, tokens_T, routes)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
        errors[name] = {key: relative(x, wanted[key]) for key, x in found.items()}
        middle, worst = statistics.median(errors[name].values()), max(errors[name], key=errors[name].__getitem__)
        rows[name] = {
            "median_error": middle,
            "largest_error": errors[name][worst],
            "of": worst,
            "differing_between_runs": sum(not torch.equal(x, again[key]) for key, x in found.items()),
            "seconds_of_two": seconds,
        }
        print(name, json.dumps(rows[name]), flush=True)
    missing = [name for name in errors if errors[name].keys() != wanted.keys()]
    allowed = MARGIN * float(rows["eager"]["median_error"])  # type: ignore[arg-type]
    failed = [name for name, row in rows.items() if not float(row["median_error"]) <= allowed]  # type: ignore[arg-type]
    failed += [name for name, row in rows.items() if name != "eager" and row["differing_between_runs"]]
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    document = machine | {"lengths": LENGTHS, "forms": rows, "failed": failed, "missing": missing, "errors": errors}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n")
    print("failed:", failed, "missing:", missing)
    return int(bool(failed or missing))


if __name__ == "__main__":
    sys.exit(main())
