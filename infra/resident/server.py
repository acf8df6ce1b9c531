"""The resident process of a GPU node: one trainer or one engine, warm between flow runs.

`python -m infra.resident.server --role engine --port P`. A call takes a stage's arguments as JSON and answers with
lines of JSON: progress, a sign of life every second, and the result or the error. Calls are carried out one after the
other. A caller that goes away cancels its call: the fence keeps whatever the stage still does out of the store.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Annotated, Any, cast, get_args, get_type_hints

import torch
import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from infra.canary import play_canary, to_text
from infra.fence import Cancelled, fenced, pass_fence
from infra.host import keep_freed_memory
from infra.resident.client import TOKEN
from infra.resident.stages import STAGES, Progress, Role, Stage, run_here
from infra.stages.context import Context, Inputs
from k3core.errors import IntegrityError, RunError
from k3core.types import PolicyVersion

ALIVE_S = 1.0

Work = Callable[[Progress], Any]


class OneAtATime:
    """Runs calls in one thread: the weights are one, and torch's threads belong to who uses them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage")
        self.running: str | None = None
        self.finished = 0
        self.cancelled = 0

    async def lines(self, name: str, work: Work) -> AsyncIterator[str]:
        """Takes one call; gives its lines. When nobody reads them any more the fence goes up."""
        cancel = threading.Event()
        messages: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(message: Mapping[str, Any]) -> None:
            loop.call_soon_threadsafe(messages.put_nowait, message)

        def carry_out() -> None:
            with fenced(cancel):
                tell(self._outcome(name, work, tell))

        future = loop.run_in_executor(self._thread, copy_context().run, carry_out)
        try:
            while True:
                try:
                    message = await asyncio.wait_for(messages.get(), ALIVE_S)
                except TimeoutError:
                    message = {"alive": self.running}
                yield json.dumps(message) + "\n"
                if "result" in message or "error" in message:
                    return
        finally:
            cancel.set()
            future.cancel()  # if it has not begun

    def _outcome(self, name: str, work: Work, tell: Callable[[Mapping[str, Any]], None]) -> Mapping[str, Any]:
        def progress(done: int, of: int) -> None:
            pass_fence()
            tell({"progress": [done, of]})

        self.running = name
        try:
            pass_fence()
            result = to_jsonable_python(work(progress))
            self.finished += 1
        except Cancelled:
            self.cancelled += 1
            return {"error": "Cancelled", "text": f"{name} was cancelled"}
        except Exception as error:
            return {"error": _kind(error), "text": str(error)}
        finally:
            self.running = None
        return {"result": result}


def app(role: Role, stages: Mapping[str, Stage] = STAGES) -> FastAPI:
    calls = OneAtATime()
    api = FastAPI(title=f"K3RL {role}", openapi_url=None)

    def authorized(authorization: Annotated[str, Header()] = "") -> None:
        """Whoever may call may overwrite a run's weights: the token is the node's, from its environment."""
        if not hmac.compare_digest(authorization.encode(), f"Bearer {os.environ[TOKEN]}".encode()):
            raise HTTPException(401, f"wrong token: caller and resident need the same {TOKEN}")

    @api.get("/health")
    async def health() -> dict[str, Any]:
        counts = {"finished": calls.finished, "cancelled": calls.cancelled}
        return {"role": role, "pid": os.getpid(), "running": calls.running, **counts}

    @api.post("/stages/{name}", dependencies=[Depends(authorized)])
    async def run_stage(name: str, arguments: dict[str, Any]) -> StreamingResponse:
        stage = stages.get(name)
        if stage is None or stage.role != role:
            raise HTTPException(404, f"this is the {role}; it does not run {name!r}")

        def work(progress: Progress) -> Any:
            return run_here(stage, progress, _typed(stage.load(), arguments))

        return StreamingResponse(calls.lines(name, work), media_type="application/x-ndjson")

    @api.post("/{name}", dependencies=[Depends(authorized)])
    async def ask_engine(name: str, arguments: dict[str, Any]) -> StreamingResponse:
        function = ENGINE_CALLS.get(name)
        if function is None or role != "engine":
            raise HTTPException(404, f"this is the {role}; it does not answer {name!r}")

        def work(progress: Progress) -> str:
            del progress
            return function(**_typed(function, arguments))

        return StreamingResponse(calls.lines(name, work), media_type="application/x-ndjson")

    return api


def sample_canary(inputs: Inputs, root: str, policy: PolicyVersion) -> str:
    """`infra.canary.to_text` of what the engine samples at `policy`."""
    return to_text(play_canary(Context.open(inputs, root), policy))


def load_version(inputs: Inputs, root: str, policy: PolicyVersion) -> str:
    """The digest of the tensors that the engine holds once it is at `policy`."""
    context = Context.open(inputs, root)
    return context.pool.own_engine(context.tokenizer()).load(policy)


ENGINE_CALLS: Mapping[str, Callable[..., str]] = {"load": load_version, "canary": sample_canary}


def _typed(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """JSON back into what the function's signature names."""
    hints = get_type_hints(function)
    return {name: TypeAdapter(hints[name]).validate_python(value) for name, value in arguments.items()}


def _kind(error: Exception) -> str:
    for known in (IntegrityError, RunError, ValueError):
        if isinstance(error, known):
            return known.__name__
    return type(error).__name__


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m infra.resident.server")
    parser.add_argument("--role", choices=get_args(Role), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    args = parser.parse_args()
    if not os.environ.get(TOKEN):
        parser.error(f"{TOKEN} is not set: caller and resident need the same secret")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    keep_freed_memory()
    uvicorn.run(app(cast(Role, args.role)), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
