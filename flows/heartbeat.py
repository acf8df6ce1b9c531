"""A sign of life from every flow run on a work pool, for the reaper; and an ear for what was decided about the run.

Prefect's own heartbeats come every 30 seconds at the least; these carry the same event name and come as often as asked.
"""

from __future__ import annotations

import contextvars
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events import emit_event
from prefect.runtime import deployment, flow_run

EVENT = "prefect.flow-run.heartbeat"
EVERY_S = "K3_HEARTBEAT_S"
DEFAULT_EVERY_S = 10.0
ENDED_BY_OTHERS = {StateType.CANCELLED, StateType.CRASHED}
PATIENCE_BEATS = 3  # a worker that lives ends a run that is being cancelled before this


def heartbeat_s() -> float:
    return float(os.environ.get(EVERY_S, DEFAULT_EVERY_S))


@contextmanager
def beating() -> Iterator[None]:
    """One event now and every `heartbeat_s()` seconds until the body ends. Nothing outside a deployment's run.

    A process whose run was declared dead, or cancelled while its worker was away, learns it here and ends itself.
    """
    run_id = flow_run.id
    if run_id is None or deployment.id is None:
        yield
        return
    over = threading.Event()
    # The thread needs the settings of this flow run, the server's address among them.
    beat = contextvars.copy_context().run
    thread = threading.Thread(target=beat, args=(_beat, run_id, over), daemon=True, name="heartbeat")
    thread.start()
    try:
        yield
    finally:
        over.set()


def _beat(run_id: str, over: threading.Event) -> None:
    cancelling = 0
    while True:
        emit_event(event=EVENT, resource={"prefect.resource.id": f"prefect.flow-run.{run_id}"})
        if over.wait(heartbeat_s()):
            return
        state = _state(run_id)
        cancelling = cancelling + 1 if state == StateType.CANCELLING else 0
        if state in ENDED_BY_OTHERS or cancelling > PATIENCE_BEATS:
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _state(run_id: str) -> StateType | None:
    """None while the server is away: then nothing was decided."""
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(run_id)).state
    except httpx.HTTPError:
        return None
    return None if state is None else state.type
