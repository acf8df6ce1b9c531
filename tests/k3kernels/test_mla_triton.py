"""The paged MLA kernel against its definition, and one query's bits in any company."""

from __future__ import annotations

import pytest
import torch

from k3kernels.mla import reference
from k3kernels.mla import triton as fused

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton's interpreter
LENGTHS, PAGE, SCALE = [70, 33], 8, 0.3
H, R, P = 3, 20, 5


def problem(dtype: torch.dtype = torch.float32):
    """Queries of every position of two sequences, whose pages lie scattered among pages of NaN."""
    generator = torch.Generator().manual_seed(0)
    pages = -(-max(LENGTHS) // PAGE)
    pool = torch.full((2 * pages + 5, PAGE, R + P), torch.nan)
    table = torch.randperm(2 * pages + 5, generator=generator)[: 2 * pages].view(2, pages).int()
    for n, length in enumerate(LENGTHS):
        for s in range(length):
            pool[table[n, s // PAGE], s % PAGE] = torch.randn(R + P, generator=generator)
    q = torch.randn(sum(LENGTHS), H, R + P, generator=generator)
    sequence = torch.repeat_interleave(torch.arange(2), torch.tensor(LENGTHS)).int()
    position = torch.cat([torch.arange(length) for length in LENGTHS]).int()
    return tuple(x.to(DEVICE) for x in (q.to(dtype), pool.to(dtype), table, sequence, position))


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    monkeypatch.setattr(fused, "SPLIT", 64)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_the_kernel_equals_its_definition(dtype, tolerance):
    q, pool, table, sequence, position = problem(dtype)
    got = fused.mla_paged(q, pool, table, sequence, position, R, SCALE)
    want = reference.mla_paged(q.double(), pool.double(), table, sequence, position, R, SCALE)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def test_the_reference_equals_attention_over_the_rows():
    q, pool, table, sequence, position = (x[: LENGTHS[0]] if i in (0, 3, 4) else x for i, x in enumerate(problem()))
    rows = pool[table[0].long()].flatten(0, 1)[: LENGTHS[0]].double().expand(1, H, -1, -1)
    want = reference.mla_attention(q.double().transpose(0, 1)[None], rows, rows[..., :R], position[None], SCALE)[
        0
    ].transpose(0, 1)
    got = reference.mla_paged(q.double(), pool.double(), table, sequence, position, R, SCALE)
    torch.testing.assert_close(got, want)


def test_a_query_alone_gets_the_bits_that_it_gets_in_a_batch(monkeypatch):
    q, pool, table, sequence, position = problem()
    want = fused.mla_paged(q, pool, table, sequence, position, R, SCALE)
    for t in (0, 31, 63, 64, 69, 70, 102):
        one = slice(t, t + 1)
        n = int(sequence[t])
        alone = (q[one], pool, table[n : n + 1], torch.zeros_like(sequence[one]), position[one])
        assert torch.equal(fused.mla_paged(*alone, R, SCALE, int(position[t]) + 1), want[one])
    monkeypatch.setattr(fused, "SCRATCH_BYTES", 20_000)  # several turns
    assert torch.equal(fused.mla_paged(q, pool, table, sequence, position, R, SCALE), want)


def test_a_query_without_a_position_gets_zeros():
    q, pool, table, sequence, position = (x[:2] if i in (0, 3, 4) else x for i, x in enumerate(problem()))
    got = fused.mla_paged(q, pool, table, sequence, position - 1, R, SCALE)
    assert (got[0] == 0).all()
    assert got[1].isfinite().all()
