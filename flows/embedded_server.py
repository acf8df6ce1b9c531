"""The Prefect server that `infra.embedded` keeps: Prefect's own application, on a socket that the keeper holds open."""

from __future__ import annotations

import os
import socket
import sys
import threading

import uvicorn
from prefect.server.api.server import create_app

END_REQUESTS_S = 5


def main() -> None:
    """argv: the socket's descriptor, and the home, which is there for who reads the list of processes.

    Ends at once when its stdin closes, which is when the keeper is gone: a new one needs the port.
    """
    listener = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_the_keeper, daemon=True).start()
    config = uvicorn.Config(
        create_app(final=True), lifespan="on", log_level="warning", timeout_graceful_shutdown=END_REQUESTS_S
    )
    uvicorn.Server(config).run(sockets=[listener])


def _end_with_the_keeper() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
