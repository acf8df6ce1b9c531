"""`k3 bench logprob`: what the logprobs of a batch take in memory and time, in blocks and over whole logits.

Each case runs in a process of its own, whose resident memory the kernel records; what was there before (weights, hidden
states) is subtracted.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from flows.bench_machine import describe_machine
from k3kernels.linear_logprob import linear_logprob
from k3kernels.linear_logprob.reference import linear_logprob as linear_logprob_whole

LIMIT_BYTES = 3 << 29  # 1.5 GiB: what a pass in blocks may take beyond its inputs
TOLERANCE = 1e-6  # nats, against whole logits
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of which a share is trained, under a head of V words at width D; dtype of hidden states and head."""

    tokens: int
    vocab: int
    width: int
    trained: float
    dtype: str

    @property
    def num_trained(self) -> int:
        return max(1, round(self.trained * self.tokens))


@dataclass(frozen=True, slots=True)
class Case:
    in_blocks: bool
    backward: bool
    trains_head: bool

    @property
    def name(self) -> str:
        way = "in blocks" if self.in_blocks else "whole logits"
        return f"{way}, forward" + (" and backward" if self.backward else "") + (", head too" * self.trains_head)


@dataclass(frozen=True, slots=True)
class Measured:
    """peak_extra_bytes: most resident memory beyond what was resident before. gradient of the trained rows, if any."""

    case: Case
    peak_extra_bytes: int
    seconds: float
    logprobs_M: np.ndarray = field(repr=False)
    gradient_MD: np.ndarray | None = field(repr=False)


CASES = (Case(True, False, False), Case(True, True, False), Case(True, True, True))
WHOLE_CASES = (Case(False, False, False), Case(False, True, False))


def measure_logprob(batch: Batch, with_whole: bool, out: Path) -> int:
    """Prints a table and writes logprob.json. 1 if a pass in blocks takes more than LIMIT_BYTES or its logprobs differ
    from those of whole logits by more than TOLERANCE."""
    if batch.dtype not in DTYPES:
        raise ValueError(f"--dtype: expected one of {', '.join(DTYPES)}, got {batch.dtype!r}")
    if not Path("/proc/self/clear_refs").exists():
        raise ValueError("k3 bench logprob reads the memory of processes from /proc, which only Linux has")
    machine = describe_machine(("numpy", "torch"))
    measured = [_in_a_process(batch, case) for case in CASES + (WHOLE_CASES if with_whole else ())]
    blocks, whole = ([m for m in measured if m.case.in_blocks is kind] for kind in (True, False))
    peak = max(m.peak_extra_bytes for m in blocks)
    difference = float(np.abs(blocks[0].logprobs_M - whole[0].logprobs_M).max()) if whole else None
    gradient_difference = _relative(blocks[1].gradient_MD, whole[1].gradient_MD) if whole else None
    repeats = all(np.array_equal(m.logprobs_M, blocks[0].logprobs_M) for m in blocks)

    print(
        f"{batch.tokens:,} tokens, {batch.num_trained:,} of them trained, {batch.vocab:,} words, width {batch.width:,}, "
        f"{batch.dtype}\none thread of {machine['cpu']}; logits of all tokens in fp32 would be "
        f"{4 * batch.tokens * batch.vocab / 2**30:.1f} GiB, of the trained ones "
        f"{4 * batch.num_trained * batch.vocab / 2**30:.2f} GiB"
    )
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("")
    for heading in ("peak extra memory", "seconds"):
        table.add_column(heading, justify="right")
    for m in measured:
        table.add_row(m.case.name, f"{m.peak_extra_bytes / 2**20:,.0f} MiB", f"{m.seconds:.1f}")
    Console().print(table)
    if difference is not None:
        print(f"largest difference from whole logits: {difference:.2g} nat, of the gradient {gradient_difference:.2g}")
    out.mkdir(parents=True, exist_ok=True)
    document = {
        "batch": asdict(batch) | {"num_trained": batch.num_trained},
        "cases": [
            asdict(m.case) | {"name": m.case.name, "peak_extra_bytes": m.peak_extra_bytes, "seconds": m.seconds}
            for m in measured
        ],
        "limit_bytes": LIMIT_BYTES,
        "largest_difference_nat": difference,
        "largest_relative_difference_of_gradient": gradient_difference,
        "machine": machine,
    }
    (out / "logprob.json").write_text(json.dumps(document, indent=1) + "\n")
    print(out / "logprob.json")
    problems = [] if repeats else ["forward alone and with backward gave other bits"]
    if peak > LIMIT_BYTES:
        problems.append(f"a pass in blocks took {peak / 2**30:.2f} GiB, more than {LIMIT_BYTES / 2**30:.1f}")
    if difference is not None and not difference <= TOLERANCE:
        problems.append(f"logprobs differ by {difference:.2g} nat from whole logits, more than {TOLERANCE:g}")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def _in_a_process(batch: Batch, case: Case) -> Measured:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run_case, batch, case).result()


def run_case(batch: Batch, case: Case) -> Measured:
    """In a fresh process: one pass over the trained rows of a batch."""
    torch.set_num_threads(1)
    dtype, generator = DTYPES[batch.dtype], torch.Generator().manual_seed(0)
    hidden_TD = torch.empty(batch.tokens, batch.width, dtype=dtype).normal_(generator=generator)
    weight_VD = torch.empty(batch.vocab, batch.width, dtype=dtype)
    weight_VD.normal_(0, batch.width**-0.5, generator=generator)
    tokens_T = torch.randint(batch.vocab, (batch.tokens,), generator=generator)
    target_M = torch.randperm(batch.tokens - 1, generator=generator)[: batch.num_trained].sort().values + 1
    hidden_TD.requires_grad_(case.backward)
    weight_VD.requires_grad_(case.trains_head)
    logprob = linear_logprob if case.in_blocks else linear_logprob_whole

    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew at what is resident now
    before, begin = _status_bytes("VmRSS"), time.perf_counter()
    with torch.set_grad_enabled(case.backward):
        logprobs_M = logprob(hidden_TD.index_select(0, target_M - 1), weight_VD, tokens_T[target_M])
    if case.backward:
        logprobs_M.sum().backward()
    seconds, peak = time.perf_counter() - begin, _status_bytes("VmHWM")
    gradient = None if hidden_TD.grad is None else hidden_TD.grad[target_M - 1].float().numpy()
    return Measured(case, peak - before, seconds, logprobs_M.detach().numpy(), gradient)


def _status_bytes(key: str) -> int:
    """Of this process: VmRSS is what is resident, VmHWM the most that was."""
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _relative(a: np.ndarray | None, b: np.ndarray | None) -> float:
    assert a is not None
    assert b is not None
    return float(np.abs(a - b).max() / np.abs(b).max())
