"""The process: listens, loads, serves, and on SIGTERM drains and exits 0."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from infra.engine_server.app import make_app
from infra.engine_server.service import Service
from infra.engine_server.settings import ServerSettings


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours drain first; uvicorn's own would stop listening at once and end by the signal."""
        yield


def serve(settings: ServerSettings) -> None:
    """Until SIGTERM or SIGINT, and the drain after it. Raises what `make_engine` raises."""
    asyncio.run(_serve(settings))


async def _serve(settings: ServerSettings) -> None:
    service = Service(settings)
    config = uvicorn.Config(make_app(service), settings.host, settings.port, log_level="warning", lifespan="off")
    server = _Server(config)
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    listening = asyncio.create_task(server.serve())
    try:
        service.engine = settings.make_engine()
        waiting = asyncio.create_task(told.wait())
        await asyncio.wait((waiting, listening), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        await service.drain()
    finally:
        server.should_exit = True
        await listening
        service.recorder.close()
