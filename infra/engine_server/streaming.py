"""Turns that a client waits for, or hears token by token; either way it may leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from infra.engine_server.answers import Document
from infra.engine_server.errors import ApiError
from infra.engine_server.service import Answer, Service
from infra.engine_server.text import TurnText
from k3core.rollout.protocol import GenerateRequest, SampledToken


class Chunks(Protocol):
    """An API's events. Its text was fed with the token, and perhaps with later ones, when it is asked."""

    def opening(self) -> Iterable[Document]: ...

    def of_token(self, token: SampledToken) -> Iterable[Document]: ...

    def closing(self, answer: Answer) -> Iterable[Document]: ...


async def whole(service: Service, request: Request, turn: GenerateRequest, text: TurnText) -> Answer:
    """The answer; when the client goes away first, the turn is cancelled."""
    return await _until_left(request, service.start(turn, text, lambda _: None))


async def stream(service: Service, request: Request, turn: GenerateRequest, text: TurnText, chunks: Chunks) -> Response:
    """Server-sent events. What fails before the first token has a status of its own; later it is an event, the last."""
    heard: asyncio.Queue[SampledToken | None] = asyncio.Queue()
    task = service.start(turn, text, heard.put_nowait)
    task.add_done_callback(lambda _: heard.put_nowait(None))
    watch = asyncio.create_task(_left(request, task))
    try:
        first = await heard.get()
    finally:
        watch.cancel()
    if first is None:
        await _until_left(request, task)

    async def events() -> AsyncIterator[str]:
        watch = asyncio.create_task(_left(request, task))
        token = first
        try:
            for document in chunks.opening():
                yield _event(document)
            while token is not None:
                for document in chunks.of_token(token):
                    yield _event(document)
                token = await heard.get()
            try:
                answer = await task
            except (ApiError, asyncio.CancelledError) as error:
                fault = error if isinstance(error, ApiError) else ApiError(503, "the turn was aborted")
                yield _event(fault.body())
                return
            for document in chunks.closing(answer):
                yield _event(document)
            yield "data: [DONE]\n\n"
        finally:
            watch.cancel()
            task.cancel()
            with suppress(ApiError, asyncio.CancelledError):
                await task

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _until_left(request: Request, task: asyncio.Task[Answer]) -> Answer:
    watch = asyncio.create_task(_left(request, task))
    try:
        return await task
    except asyncio.CancelledError:
        raise ApiError(503, "the turn was aborted", "unavailable_error", 1) from None
    finally:
        task.cancel()
        watch.cancel()


async def _left(request: Request, task: asyncio.Task[Answer]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    task.cancel()


def _event(document: Document) -> str:
    return f"data: {json.dumps(document)}\n\n"
