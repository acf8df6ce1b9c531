"""The maintenance flow, as a schedule runs it beside a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flows.maintain import maintain
from infra.policies import load, publish, verify
from infra.serving import acked_base, serve, served_sha256
from infra.store import Store
from k3core.checkpoint.tensors import from_torch
from k3core.types import PolicyVersion

RUN = "demo"


class Acknowledging:
    name = "e"

    def __init__(self, store: Store) -> None:
        self.store = store

    def load(self, version: PolicyVersion) -> str:
        return served_sha256(self.store, version)


def weights_at(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(4096.0) + torch.arange(4096).lt(step)}


def release(store: Store, step: int) -> PolicyVersion:
    base = acked_base(store, RUN, step)
    version, _ = publish(store, RUN, step, from_torch(weights_at(step)), base, full_every=100, level=3, tags={})
    serve(store, version, [Acknowledging(store)], 10)
    return version


def test_a_long_run_stays_small_and_its_versions_in_use_whole(
    tmp_path: Path, prefect_api: str, capsys: pytest.CaptureFixture[str]
) -> None:
    del prefect_api
    store = Store(str(tmp_path))
    freed = []
    for step in range(8):
        release(store, step)
        if step in (3, 7):
            freed.append(maintain(str(tmp_path), RUN, keep_last=1, full_anchor_every=4, mlflow="none"))
    # At step 3 a chain of four files became one copy; at step 7 the same again, which frees the first copy too.
    assert 16_384 < freed[0] < freed[1]
    assert f"{RUN}: step 7 has a whole copy; " in capsys.readouterr().out
    left = sorted(
        path.name.partition("-")[0] for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".delta")
    )
    assert left == ["anchor"]
    checks = verify(store, RUN, range(8))
    assert [check.error is None for check in checks] == 7 * [False] + [True]
    assert all(check.is_pruned for check in checks[:7])
    assert load(store, release(store, 8)) == from_torch(weights_at(8))
    assert maintain(str(tmp_path), RUN, keep_last=1, full_anchor_every=4, mlflow="none") == 0
