"""What the engine promises about each drawn token: its distribution, its support, and that no other row matters."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import zstandard

from infra import records
from k3core.rollout.sampling import sample, sampling_logprobs, sequence_generator
from k3core.rollout.sampling_rules import problems, reproducible
from k3core.types import SamplingParams

V = 257
MIXED = (
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(top_k=5),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=0),
)


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


def test_temperature_alone_keeps_the_bits_of_log_softmax() -> None:
    logits_NV = logits(32)
    temperatures = [0.3 + 0.05 * n for n in range(32)]
    got_NV = sampling_logprobs(logits_NV, [SamplingParams(temperature=t) for t in temperatures])
    assert torch.equal(got_NV, torch.log_softmax(logits_NV / torch.tensor(temperatures).unsqueeze(-1), -1))


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    logits_NV, params = logits(64), [MIXED[n % len(MIXED)] for n in range(64)]
    u_N = [sequence_generator(3, n).random() for n in range(64)]
    together = sample(logits_NV, params, u_N)
    for n in range(64):
        others_NV = logits(32, seed=n + 1)
        others_NV[n % 32] = logits_NV[n]
        mixed = [params[n] if m == n % 32 else MIXED[(m + n) % len(MIXED)] for m in range(32)]
        alone = sample(others_NV, mixed, [u_N[n]] * 32)
        assert alone.tokens_N[n % 32] == together.tokens_N[n]
        assert alone.logprobs_N[n % 32] == together.logprobs_N[n]
        assert alone.raw_logprobs_N[n % 32] == together.raw_logprobs_N[n]
        assert np.array_equal(alone.supports[n % 32], together.supports[n])  # type: ignore[arg-type]


@pytest.mark.parametrize("params", MIXED)
def test_the_support_is_where_the_distribution_is_not_zero(params: SamplingParams) -> None:
    logits_NV = logits(32)
    draws = sample(logits_NV, [params] * 32, [sequence_generator(1, n).random() for n in range(32)])
    logprobs_NV = sampling_logprobs(logits_NV, [params] * 32)
    for n, support in enumerate(draws.supports):
        ids = np.arange(V) if support is None else support
        assert np.array_equal(logprobs_NV[n].isfinite().nonzero().flatten().numpy(), ids)
        assert support is None or (support.dtype == np.int32 and int(draws.tokens_N[n]) in support)
        assert logprobs_NV[n].double().exp().sum() == pytest.approx(1, abs=1e-5)
        assert draws.logprobs_N[n] == logprobs_NV[n, draws.tokens_N[n]]


def test_the_raw_logprob_is_of_the_untouched_logits() -> None:
    logits_NV = logits(32)
    draws = sample(logits_NV, [SamplingParams(temperature=0.7, top_p=0.9)] * 32, [0.5] * 32)
    want_N = torch.log_softmax(logits_NV, -1).gather(1, draws.tokens_N.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(draws.raw_logprobs_N, want_N)
    assert torch.equal(logits_NV, logits(32))


def test_truncation_follows_the_documented_order() -> None:
    """A plain reading of the order, one row at a time in float64."""
    logits_NV = logits(32).double()
    for params in MIXED[:-1]:
        supports = sample(logits_NV, [params] * 32, [0.5] * 32).supports
        for logits_V, support in zip(logits_NV.numpy(), supports, strict=True):
            z_V = logits_V / params.temperature
            order = sorted(range(V), key=lambda i, z_V=z_V: (-z_V[i], i))  # type: ignore[misc]
            if params.top_k:
                order = order[: params.top_k]
            p = np.exp(z_V[order]) / np.exp(z_V[order]).sum()
            if params.top_p < 1:
                order = order[: 1 + int((p.cumsum()[:-1] < params.top_p).sum())]
            order = [i for i in order if np.exp(z_V[i] - z_V[order[0]]) >= params.min_p]
            assert sorted(order) == (list(range(V)) if support is None else support.tolist()), params


def test_a_top_k_that_cuts_nothing_has_no_support() -> None:
    assert sample(logits(32), [SamplingParams(top_k=V)] * 32, [0.5] * 32).supports == (None,) * 32


def test_temperature_zero_takes_the_first_likeliest_token_with_certainty() -> None:
    logits_NV = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    for u in (0.0, 0.5, 1 - 2**-53):
        draws = sample(logits_NV, [SamplingParams(temperature=0, top_k=3)], [u])
        assert draws.tokens_N.tolist() == [1]
        assert draws.logprobs_N.tolist() == [0.0]
        assert draws.raw_logprobs_N.item() == torch.log_softmax(logits_NV, -1)[0, 1]
        assert draws.supports[0] is not None
        assert draws.supports[0].tolist() == [1]


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3, 2**64 - 1])
def test_a_uniform_by_index_is_the_streams(seed: int) -> None:
    generator = sequence_generator(seed)
    assert [sequence_generator(seed, n).random() for n in range(1000)] == [generator.random() for _ in range(1000)]


def test_a_resumed_sequence_draws_what_it_would_have() -> None:
    logits_NV, params = logits(32), [MIXED[5]] * 32
    whole = sample(logits_NV, params, [sequence_generator(9, n).random() for n in range(32)]).tokens_N
    again = sample(logits_NV[20:], params[20:], [sequence_generator(9, n).random() for n in range(20, 32)]).tokens_N
    assert torch.equal(whole[20:], again)


@pytest.mark.parametrize(
    ("params", "key"),
    [
        (SamplingParams(temperature=-1), "temperature -1: "),
        (SamplingParams(temperature=math.nan), "temperature nan: "),
        (SamplingParams(temperature=math.inf), "temperature inf: "),
        (SamplingParams(top_p=0), "top_p 0: "),
        (SamplingParams(top_p=1.1), "top_p 1.1: "),
        (SamplingParams(top_k=-1), "top_k -1: "),
        (SamplingParams(min_p=1), "min_p 1: "),
        (SamplingParams(min_p=-0.1), "min_p -0.1: "),
        (SamplingParams(max_tokens=0), "max_tokens 0: "),
        (SamplingParams(stop=("x", "")), "stop '': "),
        (SamplingParams(stop="text"), "stop 'text': "),  # type: ignore[arg-type]
        (SamplingParams(stop=("\ud800",)), "stop '\\ud800': "),
        (SamplingParams(stop_token_ids=(3, -2)), "stop_token_ids -2: "),
    ],
)
def test_a_bad_value_is_named(params: SamplingParams, key: str) -> None:
    (problem,) = problems(params)
    assert problem.startswith(key)
    assert reproducible(params, supports_recorded=True) == problem


def test_every_bad_value_is_named_and_no_good_one() -> None:
    assert len(problems(SamplingParams(temperature=-1, top_p=2, top_k=-3))) == 3
    assert [problems(params) for params in MIXED] == [[]] * len(MIXED)


def test_a_truncated_distribution_is_reproducible_only_with_its_supports() -> None:
    for params, key in ((MIXED[2], "top_p 0.9"), (MIXED[3], "top_k 5"), (MIXED[4], "min_p 0.1")):
        assert (reproducible(params) or "").startswith(f"{key}: ")
        assert reproducible(params, supports_recorded=True) is None
    assert reproducible(SamplingParams(temperature=0.7, stop=("x",), stop_token_ids=(1,))) is None


def test_greedy_tokens_cannot_be_trained_on() -> None:
    assert (reproducible(SamplingParams(temperature=0), supports_recorded=True) or "").startswith("temperature 0: ")


def test_a_record_from_before_stops_and_min_p_is_still_read() -> None:
    value = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "max_tokens": 96}
    document = json.dumps({"schema": 1, "type": "SamplingParams", "value": value}).encode()
    data = zstandard.ZstdCompressor(write_checksum=True).compress(document)
    assert records.decode(data, SamplingParams) == SamplingParams(temperature=0.7)
    new = SamplingParams(min_p=0.1, stop=("a", "ä"), stop_token_ids=(1, 2))
    assert records.decode(records.encode(new), SamplingParams) == new
