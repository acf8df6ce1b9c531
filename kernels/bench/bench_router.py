"""Kimi K3's router beside its definition under torch.compile: 896 experts, 16 a token, a bias, weights renormalised.

    PYTHONPATH=kernels python3 kernels/bench/bench_router.py

* torch: the definition as it stands, sigmoid, topk, gather, division; compiled: under torch.compile.

Sections: forward; forward and backward to the logits; the same with the experts replayed. `--only torch,ours` chooses;
`--dry` runs it all on a CPU at toy sizes (TRITON_INTERPRET=1), without figures worth reading.

Errors are relative to the definition in fp64 with ours' experts; `experts` is the share of slots that differ from its own
choice in fp64, where two scores that are equal in fp32 may change places. The floor counts bytes alone: logits read once,
experts and weights written; for a gradient the experts, their logits and the weights' gradient read, and its row written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from harness import copy_bytes_per_ms, describe_machine, device, peak_gib, relative_error, same_bits, time_on_device
from side_by_side import OURS, Case, Results, Row, attempt, numbers, report
from torch import Tensor

from k3kernels.moe import reference, router

PEERS = ("torch", "compiled")
FORWARD, GRADIENT, REPLAY = "forward", "forward+backward", "replayed, forward+backward"
SECTIONS = (FORWARD, GRADIENT, REPLAY)
SCALE = 2.5
LIMITS = {"experts": 1e-4, "weights": 1e-5, "logits": 1e-5}
RESULTS = Path(__file__).parent / "results" / "router_h200.json"

Route = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Sizes:
    experts: int
    slots: int
    tokens: tuple[int, ...]


K3 = Sizes(896, 16, (1024, 4096, 16384, 65536))
TOY = Sizes(24, 3, (9, 20))


@dataclass(frozen=True, slots=True)
class Inputs:
    """All fp32, but replay_Tk, int64; grad_Tk is of the weights."""

    logits_TE: Tensor
    bias_E: Tensor
    grad_Tk: Tensor
    replay_Tk: Tensor


def draw(num_tokens: int, sizes: Sizes) -> Inputs:
    gen = torch.Generator(device()).manual_seed(0)
    normal = partial(torch.randn, generator=gen, device=device())
    logits_TE, bias_E = normal(num_tokens, sizes.experts), normal(sizes.experts) * 0.1
    others_TE = logits_TE + 0.1 * normal(num_tokens, sizes.experts)  # of an engine's pass
    replay_Tk, _ = reference.route(others_TE, bias_E, sizes.slots, True, SCALE)
    return Inputs(logits_TE, bias_E, normal(num_tokens, sizes.slots), replay_Tk)


def run(route: Route, inputs: Inputs, section: str) -> dict[str, Tensor]:
    """experts, weights, and where the section has one the logits' gradient."""
    replay_Tk = inputs.replay_Tk if section == REPLAY else None
    logits_TE = inputs.logits_TE.detach().requires_grad_(section != FORWARD)
    experts_Tk, weights_Tk = route(logits_TE, inputs.bias_E, inputs.grad_Tk.shape[1], True, SCALE, replay_Tk)
    found = {"experts": experts_Tk, "weights": weights_Tk.detach()}
    if section != FORWARD:
        found["logits"] = torch.autograd.grad(weights_Tk, logits_TE, inputs.grad_Tk)[0]
    return found


def errors_of(got: dict[str, Tensor], inputs: Inputs, section: str) -> dict[str, float]:
    wide = Inputs(inputs.logits_TE.double(), inputs.bias_E.double(), inputs.grad_Tk.double(), got["experts"])
    want = run(reference.route, wide, REPLAY)
    chosen = inputs.replay_Tk
    if section != REPLAY:
        chosen, _ = reference.route(wide.logits_TE, wide.bias_E, chosen.shape[1], True, SCALE)
    errors = {"experts": (got["experts"] != chosen).double().mean().item()}
    return errors | {name: relative_error(got[name], want[name]) for name in got if name != "experts"}


def floor_ms(num_tokens: int, sizes: Sizes, section: str, bytes_per_ms: float) -> float:
    row, slots = 4 * sizes.experts, sizes.slots
    forward = row + 12 * slots + (8 * slots if section == REPLAY else 0)
    backward = 0 if section == FORWARD else row + 16 * slots
    return num_tokens * (forward + backward) / bytes_per_ms


def implementations() -> dict[str, Route]:
    backend = "inductor" if torch.cuda.is_available() else "eager"
    compiled: Route = torch.compile(reference.route, dynamic=False, backend=backend)
    return {"torch": reference.route, "compiled": compiled, OURS: router.route}


def measure(route: Route, inputs: Inputs, repeats: int, blank: Row) -> Row:
    section = blank.case.section

    def work() -> dict[str, Tensor]:
        return run(route, inputs, section)

    first, again = work(), work()
    bits = all(same_bits(first[name], again[name]) for name in first) if blank.peer == OURS else None
    errors = errors_of(first, inputs, section)
    del first, again
    peak = peak_gib(work)
    timing = time_on_device(blank.name, work, repeats=repeats, is_queued=True)
    return replace(blank, timing=timing, peak_gib=peak, errors=errors, same_bits=bits)


def main() -> int:
    """The exit status: 1 where ours does not keep to LIMITS, fails, or differs from run to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=numbers, help=f"default {K3.tokens}")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[*PEERS, OURS], help="some of the peers")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help=f"JSON file to write, default {RESULTS.name} beside the other results")
    parser.add_argument("--dry", action="store_true", help="toy sizes, on a CPU")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.dry:
        raise ValueError("no GPU here: --dry runs the script without one")
    sizes = TOY if arguments.dry else K3
    default = Path(tempfile.mkdtemp()) / "router.json" if arguments.dry else RESULTS
    bytes_per_ms = copy_bytes_per_ms()
    config: dict[str, object] = {"experts": sizes.experts, "slots": sizes.slots, "repeats": arguments.repeats}
    config["copy_tb_per_s"] = round(bytes_per_ms / 1e9, 3)
    results = Results(arguments.out or default, describe_machine(), config, PEERS)
    torch._dynamo.config.recompile_limit = 64
    for num_tokens in arguments.tokens or sizes.tokens:
        inputs = draw(num_tokens, sizes)
        for section in SECTIONS:
            floor = floor_ms(num_tokens, sizes, section, bytes_per_ms)
            for peer, route in implementations().items():
                if peer in arguments.only:
                    blank = Row(Case(section, num_tokens), peer, floor_ms=floor, checked="all tokens")
                    results.add(attempt(blank, partial(measure, route, inputs, arguments.repeats)))
    return report(results, LIMITS)


if __name__ == "__main__":
    sys.exit(main())
