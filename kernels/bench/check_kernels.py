"""The training kernels and KDA's step on one GPU at odd shapes: against fp64, and their promises about bits.

    PYTHONPATH=kernels python3 kernels/bench/check_kernels.py [--out FILE]

What the interpreter shows on a CPU in fp32, shown for what a GPU runs in bf16: packed sequences, both forms of the gate,
states in and out, states kept on the way, drafts of a step, every gradient. A line a check; exit status 1 where an error is
above its limit or a promise is broken. Lengths, heads and slots are small: errors at K3's sizes stand in the benches.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from harness import describe_machine, relative_error, same_bits, write_result
from torch import Tensor

from k3kernels.attn_res import reference as attn_res_reference
from k3kernels.attn_res import triton as attn_res_kernels
from k3kernels.kda import kda_gate, kda_recurrent, l2_norm
from k3kernels.kda.chunk import backward as kda_backward
from k3kernels.kda.chunk import forward as kda_forward
from k3kernels.kda.chunk import op as kda_op
from k3kernels.kda.chunk.op import kda_chunk
from k3kernels.kda.chunk.segments import SEGMENT_TOKENS
from k3kernels.kda.chunk.table import chunk_table
from k3kernels.kda.step import TAPS, StepPool, StepWeights, kda_steps
from k3kernels.packing import Packing
from k3kernels.rms_norm import reference as norm_reference
from k3kernels.rms_norm import triton as norm_kernels
from k3kernels.short_conv import reference as conv_reference
from k3kernels.short_conv.train import short_conv_train

OUT = Path(__file__).parent / "checks" / "kernels_h200.json"
DEVICE = torch.device("cuda")
H, K, BOUND, SCALE, EPS = 3, 128, -5.0, 128**-0.5, 1e-5
LENGTHS = (130, 1, 64, 33, 257)
# bf16's one rounding is 1.7e-3 of a tensor's norm; chunks round the operands of half a dozen products on the way
ONCE, CHUNKED, SUMMED = 2.5e-3, 7e-3, 1.5e-2

Found = tuple[dict[str, float], float, dict[str, bool]]  # errors, their limit, promises


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE, dtype=dtype)


def with_gradients(
    form: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> list[Tensor]:
    """What form gives, and the gradients of its inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = form(*leaves)
    return [
        *(x.detach() for x in outputs),
        *torch.autograd.grad(outputs, leaves, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)]),
    ]


def compare(
    names: Sequence[str],
    ours: Callable[..., Sequence[Tensor]],
    exact: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> tuple[dict[str, float], bool]:
    """Errors by name, and whether two runs have the same bits."""
    got, again = with_gradients(ours, inputs, grads), with_gradients(ours, inputs, grads)
    want = with_gradients(exact, [x.double() for x in inputs], grads)
    errors = {
        name: relative_error(x, y) if y.any() else float(x.double().norm())  # one row's weight has no gradient
        for name, x, y in zip(names, got, want, strict=True)
    }
    return errors, all(same_bits(x, y) for x, y in zip(got, again, strict=True))


KDA_NAMES = ("q", "k", "v", "f", "b", "A_log", "dt_bias", "initial")


def kda_inputs() -> list[Tensor]:
    T = sum(LENGTHS)
    rows = [randn(T, H, K, seed=seed) for seed in range(4)]
    A_log = torch.rand(H, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(5))
    parameters = [A_log, randn(H, K, seed=6, dtype=torch.float32) - 1.0]
    return [*rows, randn(T, H, seed=4), *parameters, randn(len(LENGTHS), H, K, K, seed=7, dtype=torch.float32)]


def kda_exact(bound: float | None) -> Callable[..., Sequence[Tensor]]:
    def run(
        q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, S: Tensor
    ) -> Sequence[Tensor]:
        rows = (l2_norm(q), l2_norm(k), v, kda_gate(f, A_log, dt_bias, bound), b.sigmoid())
        parts = [x.split(LENGTHS) for x in rows]
        found = [kda_recurrent(*(x[n][None] for x in parts), S[n : n + 1], SCALE) for n in range(len(LENGTHS))]
        return torch.cat([o[0] for o, _ in found]), torch.cat([state for _, state in found])

    return run


@contextmanager
def in_triton() -> Iterator[None]:
    """From chunk to chunk, whatever the GPU."""
    cuda_form = kda_forward.has_inter_cuda_form
    for module in (kda_forward, kda_backward):
        module.has_inter_cuda_form = lambda *_: False
    try:
        yield
    finally:
        for module in (kda_forward, kda_backward):
            module.has_inter_cuda_form = cuda_form


def check_kda(bound: float | None) -> Found:
    inputs, table = kda_inputs(), chunk_table(LENGTHS, DEVICE)
    grads = [randn(sum(LENGTHS), H, K, seed=8), randn(len(LENGTHS), H, K, K, seed=9, dtype=torch.float32)]

    def ours(*leaves: Tensor) -> Sequence[Tensor]:
        return kda_chunk(*leaves[:7], table, bound, SCALE, leaves[7])

    errors, is_repeatable = compare(
        ("o", "final", *(f"d {name}" for name in KDA_NAMES)), ours, kda_exact(bound), inputs, grads
    )
    whole = with_gradients(ours, inputs, grads)
    kda_op.SEGMENT_TOKENS = 128
    cut = with_gradients(ours, inputs, grads)
    kda_op.SEGMENT_TOKENS = SEGMENT_TOKENS
    with in_triton():
        walked_in_triton = with_gradients(ours, inputs, grads)
    with torch.no_grad():
        o, final = ours(*inputs)
        firsts = torch.tensor((0, *LENGTHS)).cumsum(0).tolist()
        is_alone = True
        for n, (first, end) in enumerate(itertools.pairwise(firsts)):
            rows, one = [x[first:end] for x in inputs[:5]], chunk_table((end - first,), DEVICE)
            o_n, final_n = kda_chunk(*rows, *inputs[5:7], one, bound, SCALE, inputs[7][n : n + 1])
            is_alone &= same_bits(o_n, o[first:end]) and same_bits(final_n[0], final[n])
        kept = torch.full((3, H, K, K), torch.nan, device=DEVICE)
        kda_chunk(*inputs[:7], chunk_table(LENGTHS, DEVICE, ((4, 128, 2), (0, 64, 0))), bound, SCALE, inputs[7], kept)
        rest = [x[firsts[4] + 128 :] for x in inputs[:5]]
        o_rest, _ = kda_chunk(*rest, *inputs[5:7], chunk_table((LENGTHS[4] - 128,), DEVICE), bound, SCALE, kept[2:])
    promises = {
        "two runs equal": is_repeatable,
        "in segments as whole": all(same_bits(x, y) for x, y in zip(cut, whole, strict=True)),
        "from chunk to chunk as in Triton": all(same_bits(x, y) for x, y in zip(walked_in_triton, whole, strict=True)),
        "alone as in a batch": is_alone,
        "continued from a kept state": same_bits(o_rest, o[firsts[4] + 128 :]),
        "no other state written": bool(kept[1].isnan().all()),
    }
    return errors, CHUNKED, promises


def check_steps(bound: float | None) -> Found:
    N, W, num_slots, slot_ids = 3, 4, 6, (4, 0, 2)
    qkv, f, b, gate = (
        randn(*shape, seed=seed)
        for seed, shape in enumerate(((N, W, 3, H, K), (N, W, H, K), (N, W, H), (N, W, H, K)), 20)
    )
    parameters = ((TAPS, 3, H, K), (H,), (H, K), (K,))
    taps, A_log, dt_bias, norm = (randn(*s, seed=i, dtype=torch.float32) for i, s in enumerate(parameters, 30))
    states, windows = (
        randn(num_slots, H, K, K, seed=40, dtype=torch.float32),
        randn(num_slots, TAPS - 1, 3, H, K, seed=41),
    )
    weights = StepWeights(0.5 * taps, A_log, dt_bias, norm)

    def run(
        pool: StepPool, tokens: slice, lengths: Sequence[int], writes: bool = True, has_outputs: bool = True
    ) -> Tensor | None:
        rows = (x[:, tokens].contiguous() for x in (f, b, gate))
        where = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (slot_ids, lengths))
        return kda_steps(qkv[:, tokens].contiguous(), *rows, weights, pool, *where, bound, SCALE, writes, has_outputs)

    def new_pool() -> StepPool:
        return StepPool(states.clone(), windows.clone())

    def equal(a: StepPool, b: StepPool) -> bool:
        assert a.windows is not None
        assert b.windows is not None
        return same_bits(a.states, b.states) and same_bits(a.windows, b.windows)

    together, stepped, drafted = new_pool(), new_pool(), new_pool()
    y = run(together, slice(0, W), [W] * N)
    singles = [run(stepped, slice(t, t + 1), [1] * N) for t in range(W)]
    verified = run(drafted, slice(0, W), [W] * N, writes=False)
    is_untouched = equal(drafted, new_pool())
    run(drafted, slice(0, W), [2] * N, has_outputs=False)
    half = new_pool()
    run(half, slice(0, 2), [2] * N)
    assert y is not None
    assert verified is not None
    promises = {
        "one call as single steps": equal(together, stepped)
        and same_bits(y, torch.cat([x for x in singles if x is not None], 1)),
        "verified without a write": is_untouched and same_bits(verified, y),
        "committed in part": equal(drafted, half),
    }
    errors = {"y": 0.0, "state": 0.0}
    for n, slot in enumerate(slot_ids):
        rows = torch.cat([windows[slot], qkv[n]]).double().flatten(1)[None]
        q, k, v = (
            conv_reference.short_conv(rows, (0.5 * taps).double().reshape(TAPS, -1).T).view(1, W, 3, H, K).unbind(2)
        )
        g = kda_gate(f[n : n + 1].double(), A_log.double(), dt_bias.double(), bound)
        o, state = kda_recurrent(
            l2_norm(q), l2_norm(k), v, g, b[n : n + 1].double().sigmoid(), states[slot : slot + 1].double(), SCALE
        )
        wanted = norm_reference.gated_rms_norm(o[0], gate[n].double(), norm.double(), weights.norm_eps)
        errors["y"] = max(errors["y"], relative_error(y[n], wanted))
        errors["state"] = max(errors["state"], relative_error(together.states[slot], state[0]))
    return errors, 2 * ONCE, promises  # the convolution rounds to bf16 too


def check_convolution() -> Found:
    P, T = 3 * H * K, sum(LENGTHS)
    inputs = [randn(T, P, seed=50), 0.5 * randn(P, TAPS, seed=51, dtype=torch.float32)]
    grad = randn(T, P, seed=52)

    def ours(x: Tensor, taps: Tensor) -> Sequence[Tensor]:
        return [torch.cat(short_conv_train(x, taps, Packing(LENGTHS, DEVICE), 3), 1)]

    def exact(x: Tensor, taps: Tensor) -> Sequence[Tensor]:
        rows = [torch.cat([part.new_zeros(TAPS - 1, P), part])[None] for part in x.split(LENGTHS)]
        return [torch.cat([conv_reference.short_conv(row, taps)[0] for row in rows])]

    errors, is_repeatable = compare(("y", "d x", "d taps"), ours, exact, inputs, [grad])
    together = with_gradients(ours, inputs, [grad])
    first, end = sum(LENGTHS[:4]), T
    one = [inputs[0][first:end], inputs[1]]
    alone = with_gradients(
        lambda x, taps: [torch.cat(short_conv_train(x, taps, Packing((end - first,), DEVICE), 3), 1)],
        one,
        [grad[first:end]],
    )
    is_alone = all(same_bits(x, y[first:end]) for x, y in zip(alone[:2], together[:2], strict=True))
    return errors, ONCE, {"two runs equal": is_repeatable, "alone as in a batch": is_alone}


def check_norms() -> Found:
    T = sum(LENGTHS)
    wide = [randn(T, 7168, seed=60), 1 + 0.1 * randn(7168, seed=61)]
    rows = [randn(T, H, K, seed=62), randn(T, H, K, seed=63), 1 + 0.1 * randn(K, seed=64, dtype=torch.float32)]
    plain, is_repeatable = compare(
        ("norm", "d x", "d weight"),
        lambda x, w: [norm_kernels.rms_norm(x, w, EPS)],
        lambda x, w: [norm_reference.rms_norm(x, w, EPS)],
        *(wide, [randn(T, 7168, seed=65)]),
    )
    gated, is_gated_repeatable = compare(
        ("gated norm", "d o", "d gate", "d gated weight"),
        lambda o, g, w: [norm_kernels.gated_rms_norm(o, g, w, EPS)],
        lambda o, g, w: [norm_reference.gated_rms_norm(o, g, w, EPS)],
        *(rows, [randn(T, H, K, seed=66)]),
    )
    return plain | gated, 2 * ONCE, {"two runs equal": is_repeatable and is_gated_repeatable}


def check_residuals() -> Found:
    """One to nine rows, in a bank and as a list."""
    T, D, errors, is_repeatable = 61, 7168, {}, True
    for count in (1, 4, 9):
        rows = [randn(T, D, seed=70 + i) for i in range(count)]
        vectors = [1 + 0.1 * randn(D, seed=80), 0.05 * randn(D, seed=81), 1 + 0.1 * randn(D, seed=82)]
        names = ("y", *(f"d row {i}" for i in range(count)), "d norm", "d proj", "d next norm")

        def listed(*x: Tensor, count: int = count) -> Sequence[Tensor]:
            return [attn_res_kernels.attn_res(x[:count], x[count], x[count + 1], EPS, x[count + 2], EPS)]

        def banked(*x: Tensor, count: int = count) -> Sequence[Tensor]:
            bank = torch.stack([*x[: count - 1], *[x[0]] * (9 - count)], 1)
            current, norm, proj, next_norm = x[count - 1 :]
            return [attn_res_kernels.attn_res_bank(bank, count - 1, current, norm, proj, EPS, next_norm, EPS)]

        def exact(*x: Tensor, count: int = count) -> Sequence[Tensor]:
            mix = attn_res_reference.attn_res_mix(x[:count], x[count], x[count + 1], EPS)
            return [norm_reference.rms_norm(mix, x[count + 2], EPS)]

        for layout, form in (("list", listed), ("bank", banked)):
            if layout == "bank" and count == 1:
                continue
            found, same = compare(names, form, exact, [*rows, *vectors], [randn(T, D, seed=90)])
            errors[f"{layout} of {count}"] = max(found.values())
            is_repeatable &= same
    return errors, 2.5 * ONCE, {"two runs equal": is_repeatable}


def checks() -> Iterator[tuple[str, Callable[[], Found]]]:
    yield "KDA in chunks", lambda: check_kda(BOUND)
    yield "KDA in chunks, softplus", lambda: check_kda(None)
    yield "KDA steps", lambda: check_steps(BOUND)
    yield "KDA steps, softplus", lambda: check_steps(None)
    yield "short convolution", check_convolution
    yield "norms", check_norms
    yield "Attention Residuals", check_residuals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    out: Path = parser.parse_args().out
    rows: dict[str, dict[str, object]] = {}
    failed = []
    for name, check in checks():
        errors, limit, promises = check()
        limits = {key: SUMMED if key in ("d A_log", "d dt_bias") else limit for key in errors}
        broken = [key for key, error in errors.items() if not error <= limits[key]]  # NaN too
        broken += [promise for promise, is_kept in promises.items() if not is_kept]
        failed += [f"{name}: {key}" for key in broken]
        worst = max(errors, key=errors.__getitem__)
        print(
            f"{name}: worst error {errors[worst]:.2e} ({worst}); broken: {', '.join(broken) or 'nothing'}", flush=True
        )
        rows[name] = {"errors": errors, "limit": limit, "promises": promises}
    write_result(out, {"machine": describe_machine(), "checks": rows, "failed": failed})
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
