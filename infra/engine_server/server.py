"""The process: listens, loads, serves, and on SIGTERM drains and exits 0."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from infra.engine_server.app import make_app
from infra.engine_server.service import Service
from infra.engine_server.settings import Made, ServerSettings

OnReady = Callable[[str], None]


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours drain first; uvicorn's own would stop listening at once and end by the signal."""
        yield


def serve(settings: ServerSettings, on_ready: OnReady = lambda _: None) -> None:
    """Until SIGTERM or SIGINT, and the drain after it. on_ready gets the server's URL once it answers turns.

    Raises ValueError for an address that cannot be listened on, and what `make_engine` raises.
    """
    with _listen(settings.host, settings.port) as listener:
        asyncio.run(_serve(settings, listener, on_ready))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        raise ValueError(f"{host}:{port}: cannot be listened on: {error}") from error
    return listener


async def _serve(settings: ServerSettings, listener: socket.socket, on_ready: OnReady) -> None:
    service = Service(settings)
    config = uvicorn.Config(make_app(service), log_level="warning", lifespan="off")
    server = _Server(config)
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    listening = asyncio.create_task(server.serve([listener]))
    waiting = asyncio.create_task(told.wait())
    try:
        making = _make_in_a_thread(settings.make_engine)
        await asyncio.wait((making, waiting, listening), return_when=asyncio.FIRST_COMPLETED)
        if making.done():
            service.engine, service.base_sha256 = making.result().engine, making.result().base_sha256
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            on_ready(f"http://{host}:{listener.getsockname()[1]}")
            await asyncio.wait((waiting, listening), return_when=asyncio.FIRST_COMPLETED)
        await service.drain()
    finally:
        waiting.cancel()
        server.should_exit = True
        await listening
        service.recorder.close()


def _make_in_a_thread(make_engine: Callable[[], Made]) -> asyncio.Future[Made]:
    """A daemon: weights take minutes, and a server that is told to end does not wait for them."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[Made] = loop.create_future()

    def settle(result: Made | None, error: BaseException | None) -> None:
        if error is not None:
            made.set_exception(error)
        elif result is not None:
            made.set_result(result)

    def make() -> None:
        result, error = None, None
        try:
            result = make_engine()
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=make, name="make-engine", daemon=True).start()
    return made
