"""Log-probabilities under Kimi K3's head beside PyTorch's and Liger's: rows of 7,168, 163,840 words, bf16.

    PYTHONPATH=kernels python3 kernels/bench/bench_logprob.py

* torch: chunks of rows, `log_softmax` of their logits in fp32, under torch.utils.checkpoint where there is a gradient.
* compiled: the same chunk under torch.compile.
* ahead: a compiled chunk that computes its gradients in the forward pass, as Liger does, from a gradient per row that is
  known before: ours is not told.
* liger: Liger's fused linear cross entropy, installed with `pip install --no-deps --target .peers liger-kernel`. It
  gives the sum of logprobs: they are not checked, and the gradient from above is one for all rows.

Sections: forward; forward and backward to hidden under a frozen head; forward and backward to both. `--rows 4096` and
`--sections forward,both` measure a part and leave the rest of the file; `--only torch,ours` chooses; `--profile 16384`
prints our kernels; `--dry` runs it all on a CPU at toy sizes (TRITON_INTERPRET=1), without figures worth reading. To tune
ours: `--tile 128,256,64,8,4 128,256,64,8,3` are tiles of block_m, block_n, block_k, warps, stages[, stages where the tile
is written[, group[, flatten]]], `--ahead 1024,1792` rows at a time of gradients ahead, `--block 40960,49152` words at a
time of both gradients, whose logits forward keeps, `--lent 8448,1000000` those at a time in the memory of the head's
gradient, none where they are more than its words.

Errors are relative to fp64: of all logprobs, of the gradients of CHECKED rows and of CHECKED words. The floor counts the
products that a pass cannot do without (1, 2, 3), at the speed of one large bf16 product on this device. Memory is the
allocator's peak: hidden, the head and gradients are in it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import describe_machine, device, peak_gib, print_profile, relative_error, same_bits, time_on_device
from side_by_side import OURS, Case, Results, Row, attempt, numbers, report
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from k3kernels.linear_logprob import triton as fused
from k3kernels.linear_logprob.triton import Tile

PEERS = ("torch", "compiled", "ahead", "liger")
FORWARD, HIDDEN, BOTH = "forward", "hidden's gradient", "both gradients"
PRODUCTS = {FORWARD: 1, HIDDEN: 2, BOTH: 3}
SECTIONS = {"forward": FORWARD, "hidden": HIDDEN, "both": BOTH}
CHECKED = 64
LIMITS = {"logprob": 1e-5, "hidden": 5e-3, "weight": 5e-3}
RESULTS = Path(__file__).parent / "results" / "logprob_h200.json"


@dataclass(frozen=True, slots=True)
class Sizes:
    width: int
    vocab: int
    rows: tuple[int, ...]
    chunks: tuple[int, ...]
    words_at_a_time: int  # of the check in fp64


K3 = Sizes(7168, 163840, (1024, 4096, 16384), (1024, 2048), 8192)
TOY = Sizes(16, 90, (70, 40), (16, 32), 32)


class Inputs(NamedTuple):
    """bf16; grad_M, of the logprobs, in fp32."""

    hidden_MD: Tensor
    weight_VD: Tensor
    tokens_M: Tensor
    grad_M: Tensor


class Exact(NamedTuple):
    """In fp64. Gradients of the CHECKED rows and words that are named beside them."""

    logprob_M: Tensor
    rows: Tensor
    hidden: Tensor
    words: Tensor
    weight: Tensor


# Logprobs, and gradients by name, of those that require one.
Run = Callable[[Inputs], dict[str, Tensor]]


def draw(M: int, sizes: Sizes) -> Inputs:
    """Logits of three nats around 0, but the token's, up to 20 above: from hardly possible to nearly certain."""
    gen = torch.Generator(device()).manual_seed(0)
    normal = partial(torch.randn, generator=gen, device=device())
    weight_VD = (normal(sizes.vocab, sizes.width) * 3 * sizes.width**-0.5).bfloat16()
    tokens_M = torch.randint(sizes.vocab, (M,), generator=gen, device=device())
    towards_M = torch.rand(M, generator=gen, device=device()) * 20 / 9
    hidden_MD = normal(M, sizes.width) + towards_M[:, None] * weight_VD[tokens_M].float()
    return Inputs(hidden_MD.bfloat16(), weight_VD, tokens_M, normal(M))


def exact_normalizer(inputs: Inputs, sizes: Sizes) -> Tensor:
    """log sum exp of each row's logits in fp64."""
    hidden_MD = inputs.hidden_MD.double()
    words = inputs.weight_VD.split(sizes.words_at_a_time)
    return torch.logsumexp(torch.stack([torch.logsumexp(hidden_MD @ w_ND.double().T, -1) for w_ND in words]), 0)


def exact(inputs: Inputs, normalizer_M: Tensor, grad_M: Tensor, sizes: Sizes) -> Exact:
    hidden_MD, weight_VD, tokens_M = inputs.hidden_MD.double(), inputs.weight_VD, inputs.tokens_M
    M, V = len(hidden_MD), len(weight_VD)
    logprob_M = (hidden_MD * weight_VD[tokens_M].double()).sum(-1) - normalizer_M
    rows = torch.arange(0, M, max(M // CHECKED, 1), device=device())
    slope = weight_VD[tokens_M[rows]].double()
    for w_ND in weight_VD.split(sizes.words_at_a_time):
        wide_ND = w_ND.double()
        slope -= (hidden_MD[rows] @ wide_ND.T - normalizer_M[rows, None]).exp() @ wide_ND
    words = torch.cat(
        [tokens_M[: CHECKED // 2], torch.arange(0, V, max(2 * V // CHECKED, 1), device=device())]
    ).unique()
    d = (words == tokens_M[:, None]).double() - (hidden_MD @ weight_VD[words].double().T - normalizer_M[:, None]).exp()
    wide_grad = grad_M.double()[:, None]
    return Exact(logprob_M, rows, slope * wide_grad[rows], words, (d * wide_grad).T @ hidden_MD)


def errors_of(got: dict[str, Tensor], want: Exact) -> dict[str, float]:
    errors = {}
    if "logprob" in got:
        errors["logprob"] = relative_error(got["logprob"], want.logprob_M)
    if "hidden" in got:
        errors["hidden"] = relative_error(got["hidden"][want.rows], want.hidden)
    if "weight" in got:
        errors["weight"] = relative_error(got["weight"][want.words], want.weight)
    return errors


def chunk_logprob(hidden_CD: Tensor, weight_VD: Tensor, tokens_C: Tensor) -> Tensor:
    logits_CV = (hidden_CD @ weight_VD.T).float()
    return torch.log_softmax(logits_CV, -1).gather(1, tokens_C[:, None]).squeeze(1)


def chunk_ahead(hidden_CD: Tensor, weight_VD: Tensor, tokens_C: Tensor, grad_C: Tensor) -> tuple[Tensor, Tensor]:
    """(logprob, the logits' gradient in bf16)."""
    logits_CV = (hidden_CD @ weight_VD.T).float()
    logprob_CV = torch.log_softmax(logits_CV, -1)
    is_token = torch.arange(len(weight_VD), device=tokens_C.device) == tokens_C[:, None]
    d_CV = (is_token.float() - logprob_CV.exp()) * grad_C[:, None]
    return logprob_CV.gather(1, tokens_C[:, None]).squeeze(1), d_CV.to(hidden_CD.dtype)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, backend="inductor" if torch.cuda.is_available() else "eager")


def gradients(logprob_M: Tensor, inputs: Inputs) -> dict[str, Tensor]:
    leaves = {name: x for name, x in (("hidden", inputs.hidden_MD), ("weight", inputs.weight_VD)) if x.requires_grad}
    if not leaves:
        return {"logprob": logprob_M}
    grads = torch.autograd.grad(logprob_M, list(leaves.values()), inputs.grad_M)
    return {"logprob": logprob_M.detach()} | dict(zip(leaves, grads, strict=True))


def run_chunks(chunk: int, is_compiled: bool, inputs: Inputs) -> dict[str, Tensor]:
    function: Callable[..., Any] = compiled(chunk_logprob) if is_compiled else chunk_logprob
    pieces = zip(inputs.hidden_MD.split(chunk), inputs.tokens_M.split(chunk), strict=True)
    if inputs.hidden_MD.requires_grad:
        parts = [checkpoint(function, h, inputs.weight_VD, t, use_reentrant=False) for h, t in pieces]
    else:
        parts = [function(h, inputs.weight_VD, t) for h, t in pieces]
    return gradients(torch.cat(parts), inputs)


@torch.no_grad()
def run_ahead(chunk: int, inputs: Inputs) -> dict[str, Tensor]:
    """The head's gradient is summed over chunks in its own type, as Liger sums it."""
    logprob_M, hidden = torch.empty_like(inputs.grad_M), torch.empty_like(inputs.hidden_MD)
    weight = torch.zeros_like(inputs.weight_VD) if inputs.weight_VD.requires_grad else None
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        h = inputs.hidden_MD[rows].detach()
        head = inputs.weight_VD.detach()
        logprob_M[rows], d_CV = compiled(chunk_ahead)(h, head, inputs.tokens_M[rows], inputs.grad_M[rows])
        torch.mm(d_CV, inputs.weight_VD, out=hidden[rows])
        if weight is not None:
            weight.addmm_(d_CV.T, h)
    return {"logprob": logprob_M, "hidden": hidden} | ({} if weight is None else {"weight": weight})


def run_liger(inputs: Inputs) -> dict[str, Tensor]:
    from liger_kernel.ops.fused_linear_cross_entropy import (  # type: ignore[import-not-found]
        LigerFusedLinearCrossEntropyFunction,
    )

    of_loss = LigerFusedLinearCrossEntropyFunction.apply(
        *(inputs.hidden_MD, inputs.weight_VD, inputs.tokens_M, None, None, -100, 0.0, 0.0, "sum")
    )
    loss = of_loss[0] if isinstance(of_loss, tuple) else of_loss
    found = gradients(loss, inputs._replace(grad_M=torch.ones_like(loss)))
    del found["logprob"]
    return found


def run_ours(
    tile: Tile, ahead_rows: int, block_words: int | None, lent_words: int, inputs: Inputs
) -> dict[str, Tensor]:
    """As the model calls it, but for the tile and the rows and words at a time."""
    held = fused.AHEAD, fused.BLOCK, fused.LENT_WORDS
    fused.LENT_WORDS = lent_words
    fused.AHEAD = ahead_rows * len(inputs.weight_VD)
    fused.BLOCK = held[1] if block_words is None else block_words * len(inputs.hidden_MD)
    try:
        logprob_M, _ = fused.linear_logprob_and_entropy(*inputs[:3], tile=tile)
        return gradients(logprob_M, inputs)
    finally:
        fused.AHEAD, fused.BLOCK, fused.LENT_WORDS = held


def implementations(M: int, sizes: Sizes, arguments: argparse.Namespace, section: str) -> list[tuple[str, str, Run]]:
    """(peer, variant, how it is run), peers first."""
    found: list[tuple[str, str, Run]] = []
    chunks = [chunk for chunk in sizes.chunks if chunk <= max(M, sizes.chunks[0])]
    for is_compiled, name in ((False, "torch"), (True, "compiled")):
        found += [(name, f"{chunk} rows", partial(run_chunks, chunk, is_compiled)) for chunk in chunks]
    if section != FORWARD:
        found += [("ahead", f"{chunk} rows", partial(run_ahead, chunk)) for chunk in chunks]
        found.append(("liger", "sum", run_liger))
    ahead, *other_rows = arguments.ahead
    block, *other_words = arguments.block
    lent, *other_lent = arguments.lent
    for i, tile in enumerate(arguments.tile):
        found.append((OURS, name_of(tile) if i else "", partial(run_ours, tile, ahead, block, lent)))
        if section == HIDDEN and i == 0:
            found += [(OURS, f"{rows} rows", partial(run_ours, tile, rows, block, lent)) for rows in other_rows]
        if section == BOTH and i == 0:
            found += [(OURS, f"{words} words", partial(run_ours, tile, ahead, words, lent)) for words in other_words]
            found += [
                (OURS, f"{words} words lent", partial(run_ours, tile, ahead, block, words)) for words in other_lent
            ]
    return found


def name_of(tile: Tile) -> str:
    shape = (tile.block_m, tile.block_n, tile.block_k, tile.num_warps, tile.num_stages, tile.writing_stages)
    return f"tile {'x'.join(map(str, shape))}, group {tile.group}{', flat' * tile.flatten}"


def parse_tile(text: str) -> Tile:
    block_m, block_n, block_k, warps, stages, *others = numbers(text)
    writing, group, flatten = (*others, *(max(stages - 1, 1), 16, 1)[len(others) :])
    return Tile(block_m, block_n, block_k, warps, stages, writing, group, bool(flatten))


def products_per_ms(sizes: Sizes) -> float:
    """Multiply-adds of one large bf16 product."""
    M, N = (8192, 32768) if torch.cuda.is_available() else (32, 32)
    a = torch.randn(M, sizes.width, device=device(), dtype=torch.bfloat16)
    b = torch.randn(N, sizes.width, device=device(), dtype=torch.bfloat16)
    return M * N * sizes.width / time_on_device("product", lambda: a @ b.T, warmup=5, repeats=20).median_ms


class Bench:
    def __init__(self, sizes: Sizes, results: Results, arguments: argparse.Namespace) -> None:
        self.sizes, self.results, self.arguments = sizes, results, arguments
        self.products_per_ms = products_per_ms(sizes)
        results.config["product_tflop_per_s"] = round(2 * self.products_per_ms / 1e9, 1)

    def measure(self, M: int) -> None:
        inputs = draw(M, self.sizes)
        normalizer_M = exact_normalizer(inputs, self.sizes)
        want = exact(inputs, normalizer_M, inputs.grad_M, self.sizes)
        of_a_sum = exact(inputs, normalizer_M, -torch.ones_like(inputs.grad_M), self.sizes)  # Liger's: -logprob's
        for section in self.arguments.sections:
            products = PRODUCTS[section]
            floor_ms = products * M * self.sizes.vocab * self.sizes.width / self.products_per_ms
            checked = f"logprobs of all rows, gradients of {len(want.rows)} rows and {len(want.words)} words"
            for peer, variant, run in implementations(M, self.sizes, self.arguments, section):
                if peer in self.arguments.only:
                    blank = Row(Case(section, M), peer, variant, floor_ms=floor_ms, checked=checked)
                    exactly = of_a_sum if peer == "liger" else want
                    is_default = peer == OURS and not variant
                    self.results.add(attempt(blank, partial(self._measure, run, inputs, exactly, is_default)))

    def _measure(self, run: Run, inputs: Inputs, want: Exact, checks_bits: bool, blank: Row) -> Row:
        """Bits: those of two runs, and logprobs with a gradient beside logprobs without."""
        leaves = as_leaves(inputs, blank.case.section)

        def work() -> dict[str, Tensor]:
            return run(leaves)

        first = work()
        errors = errors_of(first, want)
        bits = None
        if checks_bits:
            again, plain = work(), run(as_leaves(inputs, FORWARD))
            bits = all(same_bits(first[name], x) for name, x in (*again.items(), *plain.items()))
            del again, plain
        del first
        peak = peak_gib(work)
        timing = time_on_device(blank.name, work, warmup=1, repeats=self.arguments.repeats, is_queued=True)
        return replace(blank, timing=timing, peak_gib=peak, errors=errors, same_bits=bits)

    def profile(self, M: int) -> None:
        for section in self.arguments.sections:
            print(section)
            leaves = as_leaves(draw(M, self.sizes), section)
            ours = self.arguments
            print_profile(partial(run_ours, ours.tile[0], ours.ahead[0], ours.block[0], ours.lent[0], leaves))


def as_leaves(inputs: Inputs, section: str) -> Inputs:
    return inputs._replace(
        hidden_MD=inputs.hidden_MD.detach().requires_grad_(section != FORWARD),
        weight_VD=inputs.weight_VD.detach().requires_grad_(section == BOTH),
    )


def main() -> int:
    """The exit status: 1 where ours does not keep to LIMITS, fails, or differs from run to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=numbers, help=f"default {K3.rows}")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[*PEERS, OURS], help="some of the peers")
    parser.add_argument(
        "--sections", type=lambda text: text.split(","), default=[*SECTIONS], help="some of the sections"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tile", type=parse_tile, nargs="+", help="ours; the first is held to the limits")
    parser.add_argument("--ahead", type=numbers, help="rows at a time of gradients ahead")
    parser.add_argument("--block", type=numbers, help="words at a time of both gradients")
    parser.add_argument(
        "--lent", type=numbers, default=(fused.LENT_WORDS,), help="words at a time in a gradient's memory"
    )
    parser.add_argument("--profile", type=int, metavar="M", help="print our kernels at M rows and stop")
    parser.add_argument("--out", type=Path, help=f"JSON file to write, default {RESULTS.name} beside the other results")
    parser.add_argument("--dry", action="store_true", help="toy sizes, on a CPU")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.dry:
        raise ValueError("no GPU here: --dry runs the script without one")
    if set(arguments.only) - {*PEERS, OURS}:
        raise ValueError(f"--only {','.join(arguments.only)} is not made of {', '.join((*PEERS, OURS))}")
    if set(arguments.sections) - set(SECTIONS):
        raise ValueError(f"--sections {','.join(arguments.sections)} is not made of {', '.join(SECTIONS)}")
    arguments.sections = [SECTIONS[name] for name in arguments.sections]
    sizes = TOY if arguments.dry else K3
    arguments.tile = arguments.tile or [Tile(16, 16, 16, 4, 1, 1, 2, False) if arguments.dry else fused.TILE]
    arguments.block = arguments.block or (32 if arguments.dry else None,)
    arguments.ahead = arguments.ahead or (32 if arguments.dry else fused.AHEAD // sizes.vocab,)
    default = Path(tempfile.mkdtemp()) / "logprob.json" if arguments.dry else RESULTS
    config: dict[str, object] = {"width": sizes.width, "vocab": sizes.vocab, "repeats": arguments.repeats}
    config |= {"tile": name_of(arguments.tile[0]), "ahead_rows": arguments.ahead[0]}
    results = Results(arguments.out or default, describe_machine(), config, PEERS)
    torch._dynamo.config.recompile_limit = 64  # chunks of two sizes, with and without either gradient
    bench = Bench(sizes, results, arguments)
    if arguments.profile:
        bench.profile(arguments.profile)
        return 0
    for M in arguments.rows or sizes.rows:
        bench.measure(M)
    return report(results, LIMITS)


if __name__ == "__main__":
    sys.exit(main())
