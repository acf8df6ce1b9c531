"""The two switches: what each promises, and what the CPU's rounding of rows is there for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import k3core.model.model
from k3core.model.model import ROWS, K3Model
from k3core.model.numerics import WORKSPACE, Numerics
from k3core.model.presets import PRESETS
from k3core.parity import Parity, awake_model, play
from k3kernels.dispatch import is_batch_invariant
from k3kernels.packing import Packing

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
FEW, MANY = 3, 40


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_two_runs_of_one_engine_give_equal_bits_whatever_the_other_switch(batch_invariant: bool, device: str) -> None:
    numerics = Numerics(deterministic=True, batch_invariant=batch_invariant)
    parity = Parity(
        PRESETS["tiny"], torch.bfloat16, device, num_sequences=3, prompt_tokens=(5, 14), numerics=numerics
    )  # prompts of less than a page: the second run finds nothing in the cache
    with numerics.scope(device):
        engine = parity.engine()
        first, second = (play(engine, parity.requests()) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert b.generation.num_cached == 0
        assert a.tokens == b.tokens
        assert a.generation.raw_logprobs_T.tobytes() == b.generation.raw_logprobs_T.tobytes()


def sequences() -> list[torch.Tensor]:
    rng = np.random.default_rng(0)
    return [torch.from_numpy(rng.integers(0, 512, 1 + n % 5)) for n in range(MANY)]


def hidden_of_the_first(model: K3Model, count: int) -> torch.Tensor:
    """What the first FEW sequences get in a batch of `count`."""
    batch = sequences()[:count]
    packing = Packing(tuple(map(len, batch)))
    with torch.no_grad():
        hidden_TD = model(torch.cat(batch), packing).hidden_TD
    return hidden_TD[: sum(map(len, batch[:FEW]))]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_neighbours_and_would_if_rows_were_not_rounded_up(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = awake_model(PRESETS["tiny"], dtype)
    assert torch.equal(hidden_of_the_first(model, FEW), hidden_of_the_first(model, MANY))
    monkeypatch.setattr(k3core.model.model, "ROWS", 1)
    if torch.equal(hidden_of_the_first(model, FEW), hidden_of_the_first(model, MANY)):
        pytest.skip(
            f"on this CPU {FEW} rows and {MANY} round alike in {dtype} even where they are not rounded up to {ROWS}"
        )


def test_a_scope_sets_what_a_gpu_needs_and_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    products = torch.backends.cuda.matmul
    monkeypatch.delenv(WORKSPACE, raising=False)

    def state() -> tuple[object, ...]:
        flags = products.allow_tf32, products.allow_bf16_reduced_precision_reduction
        return (*flags, torch.are_deterministic_algorithms_enabled(), os.environ.get(WORKSPACE), is_batch_invariant())

    before = state()
    assert before[1], "torch's own setting"
    with Numerics().scope("cuda"):
        assert state() == (False, False, True, ":4096:8", True)
        with Numerics(deterministic=False, batch_invariant=False).scope("cuda"):
            assert not is_batch_invariant()
        assert is_batch_invariant()
    assert state() == before
    with Numerics(deterministic=False).scope("cuda"):
        assert state() == (False, False, False, None, True)
    with pytest.raises(KeyError), Numerics().scope("cuda"):
        raise KeyError
    assert state() == before
