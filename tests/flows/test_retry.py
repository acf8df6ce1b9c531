"""A run that failed in the middle and is started again: what had succeeded is found, not repeated."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.exceptions import TerminationSignal

import infra.launch
from flows.rl import rl_training
from infra.config import load
from infra.resident.stages import STAGES
from infra.store import Store
from k3core.types import Ref
from tasks.stage import worth_retrying


def test_stages_that_had_succeeded_are_cached_and_their_effects_not_repeated(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del prefect_api
    monkeypatch.setenv("PREFECT_LOCAL_STORAGE_PATH", str(tmp_path / "results"))
    monkeypatch.setattr(infra.launch, "_is_stopping", threading.Event())  # of a process that ends with its run
    calls: Counter[str] = Counter()
    puts: Counter[str] = Counter()
    broken = True

    def counted(name: str, function: Callable[..., Ref]) -> Callable[..., Ref]:
        def stage(*args: Any, **arguments: Any) -> Ref:
            calls[name] += 1
            if name == "update" and broken:
                raise OSError("the node is gone")
            return function(*args, **arguments)

        stage.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return stage

    for name in ("warm_start", "rollout", "score", "update", "publish", "evaluate"):
        module = import_module(STAGES[name].module)
        monkeypatch.setattr(module, STAGES[name].function, counted(name, STAGES[name].load()))
    put = Store.put

    def counted_put(self: Store, key: str, data: bytes) -> Ref:
        puts[key] += 1
        return put(self, key, data)

    monkeypatch.setattr(Store, "put", counted_put)
    cfg = load(
        "smoke",
        [
            f"root={tmp_path}/runs",
            "run=retried",
            "steps=1",
            "control.enabled=false",
            "warm_start.steps=40",
            "tasks.retries=0",
        ],
    )
    with pytest.raises(OSError, match="the node is gone"):
        rl_training(cfg)
    before = Counter(calls)
    written = dict(puts)
    assert before["update"] == 1

    broken = False
    rl_training(cfg)
    for name in ("warm_start", "rollout", "score"):
        assert calls[name] == before[name], f"{name} ran again"
    assert calls["update"] == 2
    again = [key for key, count in puts.items() if key in written and count > written[key] and "report" not in key]
    assert again == []

    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=["retried"])))
        second = max(runs, key=lambda run: run.start_time or run.created)
        assert second.state_name == "Completed"


def worth_another_try(error: BaseException) -> bool:
    state: Any = SimpleNamespace(result=lambda **_: error)
    return worth_retrying(SimpleNamespace(name="rollout"), None, state)  # type: ignore[arg-type]


@pytest.mark.parametrize("signalled", [TerminationSignal(signal=15), KeyboardInterrupt()])
def test_what_fails_because_the_process_was_told_to_stop_is_not_tried_again(signalled: BaseException) -> None:
    """Raised in the middle of an operation, whose own cleaning up then failed: the run would outlive its SIGTERM."""

    def interrupted() -> None:
        try:
            raise signalled
        finally:
            raise OSError(9, "Bad file descriptor")

    with pytest.raises(OSError, match="Bad file") as caught:
        interrupted()
    assert not worth_another_try(caught.value)
    assert worth_another_try(OSError(9, "Bad file descriptor"))


def test_a_time_out_is_tried_again_though_it_comes_of_a_cancellation() -> None:
    late = TimeoutError("3600 s")
    late.__cause__ = asyncio.CancelledError()
    assert worth_another_try(late)
