"""The kernels between a decode step's GEMMs, on one GPU: error against fp64, batch invariance, times against bytes.

    PYTHONPATH=.:kernels python kernels/bench/check_block.py [--out FILE]

Norms, Attention Residuals, gated activations, KDA's convolution and gates, and the router, at the widths of K3 and of a
3B model. "error" is the largest error against fp64 over the largest |value|, beside what it may be. "differing" counts
elements whose bits differ between tokens in a call of their own (at the start, in the middle and at the end) and the
same tokens among MAX_TOKENS, "differing in a graph" those between a replay with other inputs and a call outside: 0 is
the contract. Times are of a CUDA graph of GRAPH_CALLS calls, the median of 20; the floor is the fewest bytes at the
memory's nominal speed, below which a time can lie where the caches hold the inputs. A case that raises has its error's
text in the result. The exit status is 1 where any case failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from check_linear_moe import DEVICE, num_differing, randn, relative_error
from harness import time_on_device
from torch import Tensor

from k3kernels.attn_res import reference as attn_res_reference
from k3kernels.attn_res.triton import attn_res
from k3kernels.kda.reference import kda_gate, l2_norm
from k3kernels.kda.triton import KdaWork, decode_work, prefill_work
from k3kernels.moe.router import route
from k3kernels.rms_norm import reference as norm_reference
from k3kernels.rms_norm.triton import gated_rms_norm, rms_norm
from k3kernels.short_conv import reference as conv_reference
from k3kernels.short_conv.triton import kda_gates, short_conv_packed
from k3kernels.situ import reference as situ_reference
from k3kernels.situ.triton import gated_activation

OUT = Path(__file__).parent / "checks" / "block_h200.json"
NOMINAL_BYTES_PER_US = 4.8e6  # of an H200's memory
TOKENS = (1, 3, 8, 64, 256, 4096)
MAX_TOKENS = max(TOKENS)
EXACT_TOKENS = 64  # whose fp64 values are computed
GRAPH_CALLS = 10
TYPES = (torch.bfloat16, torch.float32)
MAX_ERROR = {torch.bfloat16: 2 * 2.0**-7, torch.float32: 1e-5}
HEAD, TAPS, EPS = 128, 4, 1e-5
WIDTHS = (2048, 7168)
HEADS = (16, 32, 96)
NUM_ROWS = {2048: 4, 7168: 9}  # of Attention Residuals at most
ROUTERS = ((64, 8), (896, 16))

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """MAX_TOKENS tokens of one op.

    inputs: token by token, what changes from call to call. run: outputs of such inputs (of any number of tokens), tokens
    first. exact: the same in fp64 by the definition. bytes_moved: per token; bytes_held: of weights, read once.
    max_error: None where `exact` checks for itself.
    """

    inputs: Outputs
    run: Callable[..., Outputs]
    exact: Callable[..., Outputs]
    max_error: float
    bytes_moved: int
    bytes_held: int = 0

    def cut(self, first: int, end: int) -> Outputs:
        return tuple(x[first:end] for x in self.inputs)


def size_bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def norm_trial(D: int, dtype: torch.dtype) -> Trial:
    x, weight = randn(MAX_TOKENS, D, dtype=dtype), randn(D, dtype=dtype)
    return Trial(
        (x,),
        lambda x: (rms_norm(x, weight, EPS),),
        lambda x: (norm_reference.rms_norm(x.double(), weight.double(), EPS),),
        MAX_ERROR[dtype],
        2 * size_bytes(x[0]),
        size_bytes(weight),
    )


def gated_norm_trial(H: int, dtype: torch.dtype) -> Trial:
    o, gate = (randn(MAX_TOKENS, H, HEAD, dtype=dtype) for _ in range(2))
    weight = randn(HEAD, dtype=torch.float32)
    return Trial(
        (o, gate),
        lambda o, gate: (gated_rms_norm(o, gate, weight, EPS),),
        lambda o, gate: (norm_reference.gated_rms_norm(o.double(), gate.double(), weight.double(), EPS),),
        MAX_ERROR[dtype],
        3 * size_bytes(o[0]),
        size_bytes(weight),
    )


def attn_res_trial(D: int, dtype: torch.dtype) -> Trial:
    """Scores of size 2, so that several rows count."""
    rows = tuple(randn(MAX_TOKENS, D, dtype=dtype, scale=1 + r) for r in range(NUM_ROWS[D]))
    norm, proj = randn(D, dtype=dtype), randn(D, dtype=dtype, scale=2 * D**-0.5)
    wide = norm.double(), proj.double()
    return Trial(
        rows,
        lambda *rows: (attn_res(rows, norm, proj, EPS),),
        lambda *rows: (attn_res_reference.attn_res_mix([x.double() for x in rows], *wide, EPS),),
        MAX_ERROR[dtype],
        size_bytes(*(x[0] for x in rows), rows[0][0]),
        size_bytes(norm, proj),
    )


def activation_trial(F: int, betas: tuple[float, float | None] | None, dtype: torch.dtype) -> Trial:
    """gate and up are the halves of one product."""
    both = randn(MAX_TOKENS, 2 * F, dtype=dtype, scale=5)

    def exact(both: Tensor) -> Outputs:
        gate, up = both.double().chunk(2, 1)
        return (torch.nn.functional.silu(gate) * up if betas is None else situ_reference.situ(gate, up, *betas),)

    return Trial(
        (both,),
        lambda both: (gated_activation(*both.chunk(2, 1), betas),),
        exact,
        MAX_ERROR[dtype],
        size_bytes(both[0]) * 3 // 2,
    )


def works_of(num_tokens: int) -> KdaWork:
    slots = torch.arange(num_tokens, dtype=torch.int32, device=DEVICE)
    return decode_work(slots, torch.full_like(slots, TAPS + 1))


def conv_trial(H: int, dtype: torch.dtype) -> Trial:
    """Decoding: each token in a slot of its own. The windows after it are an output too.

    They are written in place, and inputs must not change: the window that counts is a copy, made outside what is timed.
    """
    P = 3 * H * HEAD
    x, windows = randn(MAX_TOKENS, P, dtype=dtype), randn(MAX_TOKENS, TAPS - 1, P, dtype=dtype)
    taps = randn(TAPS, P, dtype=torch.float32, scale=0.5)
    works = {T: works_of(T) for T in TOKENS}

    def run(x: Tensor, windows: Tensor) -> Outputs:
        return *short_conv_packed(x, taps, windows, works[len(x)], H, 1), windows

    def exact(x: Tensor, windows: Tensor) -> Outputs:
        joined = torch.cat([windows, x[:, None]], 1).double()
        out = conv_reference.short_conv(joined, taps.double().T)[:, 0]
        q, k, v = out.unflatten(-1, (3, H, HEAD)).unbind(1)
        return l2_norm(q), l2_norm(k), v, joined[:, 1:]

    return Trial((x, windows), run, exact, MAX_ERROR[dtype], size_bytes(x[0]) * 2 * TAPS, size_bytes(taps))


def gates_trial(H: int, bound: float | None, dtype: torch.dtype) -> Trial:
    f, b = randn(MAX_TOKENS, H * HEAD, dtype=dtype, scale=3), randn(MAX_TOKENS, H, dtype=dtype)
    A_log, dt_bias = randn(H, dtype=torch.float32, scale=0.5), randn(H * HEAD, dtype=torch.float32)

    def exact(f: Tensor, b: Tensor) -> Outputs:
        f_THK, bias_HK = f.double().unflatten(1, (H, HEAD)), dt_bias.double().view(H, HEAD)
        return kda_gate(f_THK, A_log.double(), bias_HK, bound), torch.sigmoid(b.double())

    return Trial(
        (f, b),
        lambda f, b: kda_gates(f, b, A_log, dt_bias, bound),
        exact,
        MAX_ERROR[torch.float32],
        size_bytes(f[0], b[0]) + 4 * (f.shape[1] + H),
        size_bytes(A_log, dt_bias),
    )


def route_trial(E: int, k: int) -> Trial:
    """Logits are multiples of 1/64 and biases 0 or 1, so that scores are equal or far apart, in fp32 as in fp64."""
    logits = (randn(MAX_TOKENS, E, dtype=torch.float32) * 64).round() / 64
    bias = torch.zeros(E, device=DEVICE)
    bias[torch.randperm(E, device=DEVICE)[: k // 2]] = 1

    def run(logits: Tensor) -> Outputs:
        experts, weights = route(logits, bias, k, True, 1.0)
        return experts.int(), weights

    def exact(logits: Tensor) -> Outputs:
        p = torch.sigmoid(logits.double())
        experts = torch.sort(p + bias, dim=-1, descending=True, stable=True).indices[:, :k]
        weights = p.gather(1, experts)
        return experts, weights / weights.sum(-1, keepdim=True)

    return Trial((logits,), run, exact, MAX_ERROR[torch.float32], 4 * E + 12 * k, size_bytes(bias))


def trials() -> dict[str, Callable[[], Trial]]:
    found: dict[str, Callable[[], Trial]] = {}
    for dtype in TYPES:
        word = str(dtype).removeprefix("torch.")
        for D in WIDTHS:
            found[f"rms_norm {word} D={D}"] = lambda D=D, dtype=dtype: norm_trial(D, dtype)
            found[f"attn_res {word} D={D} R={NUM_ROWS[D]}"] = lambda D=D, dtype=dtype: attn_res_trial(D, dtype)
            for name, betas in (("silu", None), ("situ", (4.0, None)), ("situ_linear", (4.0, 25.0))):
                found[f"{name} {word} F={D}"] = lambda F=D, b=betas, dtype=dtype: activation_trial(F, b, dtype)
        for H in HEADS:
            found[f"gated_rms_norm {word} H={H}"] = lambda H=H, dtype=dtype: gated_norm_trial(H, dtype)
            found[f"short_conv {word} H={H}"] = lambda H=H, dtype=dtype: conv_trial(H, dtype)
            for bound in (-5.0, None):
                name = f"kda_gates {word} H={H} bound={bound}"
                found[name] = lambda H=H, b=bound, dtype=dtype: gates_trial(H, b, dtype)
    return found | {f"route E={E} k={k}": lambda E=E, k=k: route_trial(E, k) for E, k in ROUTERS}


def clones(tensors: Outputs) -> Outputs:
    return tuple(x.clone() for x in tensors)


def count_differing(a: Outputs, b: Outputs) -> int:
    return sum(num_differing(x, y) for x, y in zip(a, b, strict=True))


def captured(work: Callable[[], Outputs], calls: int) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """The graph of `calls` calls, and the outputs that its replay writes. One call is made outside, to compile it."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            out = work()
    return graph, out


def differing_in_a_graph(trial: Trial, num_tokens: int = 8) -> int:
    held = clones(trial.cut(0, num_tokens))
    graph, out = captured(lambda: trial.run(*held), 1)
    for old, new in zip(held, trial.cut(num_tokens, 2 * num_tokens), strict=True):
        old.copy_(new)
    graph.replay()
    return count_differing(out, trial.run(*clones(trial.cut(num_tokens, 2 * num_tokens))))


def check(trial: Trial) -> dict[str, object]:
    together = trial.run(*clones(trial.inputs))
    differing = {}
    for T in TOKENS:
        spans = {(a, a + T) for a in (0, (MAX_TOKENS - T) // 2, MAX_TOKENS - T)}
        differing[T] = sum(
            count_differing(trial.run(*clones(trial.cut(a, b))), tuple(x[a:b] for x in together)) for a, b in spans
        )
    want = trial.exact(*trial.cut(0, EXACT_TOKENS))
    errors = [relative_error(got[:EXACT_TOKENS], exact.double()) for got, exact in zip(together, want, strict=True)]
    return {
        "error": max(errors),
        "may_be": trial.max_error,
        "differing": differing,
        "differing in a graph": differing_in_a_graph(trial),
    }


def time_trial(trial: Trial) -> dict[str, object]:
    found = {}
    for T in TOKENS:
        inputs = clones(trial.cut(0, T))
        graph, _ = captured(lambda inputs=inputs: trial.run(*inputs), GRAPH_CALLS)
        found[T] = time_graph(graph, T * trial.bytes_moved + trial.bytes_held)
    return found


def time_graph(graph: torch.cuda.CUDAGraph, bytes_moved: int) -> dict[str, float]:
    """Microseconds of one of its GRAPH_CALLS calls, which move that many bytes."""
    us = time_on_device("graph", graph.replay).median_ms * 1000 / GRAPH_CALLS
    return {"us": round(us, 2), "floor_us": round(bytes_moved / NOMINAL_BYTES_PER_US, 3)}


def check_pieces(H: int, dtype: torch.dtype) -> dict[str, object]:
    """The convolution of one sequence whole, in pieces, decoded, and beside others."""
    P, T, J = 3 * H * HEAD, 300, TAPS
    x, taps = randn(T, P, dtype=dtype), randn(J, P, dtype=torch.float32, scale=0.5)

    def prefill(rows: Tensor, windows: Tensor, position: int) -> Tensor:
        work = prefill_work([len(rows)], [position], [0], [], DEVICE)
        return torch.stack(short_conv_packed(rows, taps, windows, work, H, len(rows)), 1)

    windows, other = (torch.full((1, J - 1, P), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    whole = prefill(x, windows, 0)
    edges = [0, 1, 3, 16, 37, 100, 160, 200]
    pieces = [prefill(x[a:b], other, a) for a, b in itertools.pairwise(edges)]
    for p in range(edges[-1], T):
        where = torch.tensor([[0], [p]], dtype=torch.int32, device=DEVICE)
        work = decode_work(where[0], where[1])
        pieces.append(torch.stack(short_conv_packed(x[p : p + 1], taps, other, work, H, 1), 1))
    lengths = [T, 17, T]
    work = prefill_work(lengths, [0] * 3, [0, 1, 2], [], DEVICE)
    pool = torch.full((3, J - 1, P), torch.nan, dtype=dtype, device=DEVICE)
    batch = torch.stack(short_conv_packed(torch.cat([x, x[:17], x]), taps, pool, work, H, T), 1)
    differing = {
        "pieces": num_differing(torch.cat(pieces), whole),
        "windows": num_differing(other, windows),
        "batch": sum(num_differing(part, whole[: len(part)]) for part in batch.split(lengths)),
    }
    return {"error": 0.0, "may_be": 0.0, "differing": differing, "differing in a graph": 0}


def time_prefill(H: int, dtype: torch.dtype) -> dict[str, object]:
    P, T = 3 * H * HEAD, MAX_TOKENS
    x, taps = randn(T, P, dtype=dtype), randn(TAPS, P, dtype=torch.float32, scale=0.5)
    windows = torch.zeros(1, TAPS - 1, P, dtype=dtype, device=DEVICE)
    work = prefill_work([T], [0], [0], [], DEVICE)
    graph, _ = captured(lambda: short_conv_packed(x, taps, windows, work, H, T), GRAPH_CALLS)
    return {f"prefill {T}": time_graph(graph, 2 * size_bytes(x))}


def has_failed(section: dict[str, object]) -> bool:
    """A NaN error is a failure."""
    if "raised" in section:
        return True
    counts = section["differing"]
    assert isinstance(counts, dict)
    is_exact_enough = section["error"] <= section["may_be"]  # type: ignore[operator]
    return any(counts.values()) or section["differing in a graph"] != 0 or not is_exact_enough


def run_case(check_it: Callable[[], dict[str, object]]) -> dict[str, object]:
    try:
        with torch.inference_mode():
            found = check_it()
            torch.cuda.synchronize()
            return found
    except Exception:  # of whatever kind: the other cases still have something to say
        return {"raised": traceback.format_exc()[-3000:]}
    finally:
        torch.cuda.empty_cache()


def check_and_time(make: Callable[[], Trial]) -> dict[str, object]:
    trial = make()
    return check(trial) | {"times": time_trial(trial)}


def cases() -> dict[str, Callable[[], dict[str, object]]]:
    found: dict[str, Callable[[], dict[str, object]]] = {
        name: lambda make=make: check_and_time(make) for name, make in trials().items()
    }
    for dtype, H in itertools.product(TYPES, HEADS):
        name = f"short_conv in pieces {str(dtype).removeprefix('torch.')} H={H}"
        found[name] = lambda H=H, dtype=dtype: check_pieces(H, dtype) | {"times": time_prefill(H, dtype)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    out: Path = parser.parse_args().out
    torch.manual_seed(0)
    sections = {}
    for name, check_it in cases().items():
        sections[name] = run_case(check_it)
        print(name, "FAILED" if has_failed(sections[name]) else "ok", json.dumps(sections[name]), flush=True)
    failed = [name for name, section in sections.items() if has_failed(section)]
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    result = machine | {"nominal_tb_per_s": NOMINAL_BYTES_PER_US / 1e6, "failed": failed, "sections": sections}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(failed)} of {len(sections)} cases failed; {out}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
