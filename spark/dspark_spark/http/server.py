"""The HTTP server under the endpoint: uvicorn with httptools and uvloop.

Purpose: listen, tell when listening, and end as an operator expects.
Invariants: the first SIGTERM or SIGINT lets running requests finish for `drain_s` seconds at most, the
second ends at once; either way `serve` returns, and the process can exit with status 0.
Called by: the composition root (`dspark serve`), tests.
Never: knows a route.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

OnListening = Callable[[int], None]


class EndpointServer(uvicorn.Server):
    """uvicorn's server with our signal rule, and a call once the port is open."""

    def __init__(self, config: uvicorn.Config, on_listening: OnListening | None) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the port, then say which one (port 0 in the configuration means any free one)."""
        await super().startup(sockets)
        if self.started and self._on_listening is not None:
            self._on_listening(self.port)

    @property
    def port(self) -> int:
        """The port that is listened on. Only while the server runs."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn would raise the signal again after the drain and end the process with it; ours returns."""
        self.force_exit = self.should_exit
        self.should_exit = True


def make_server(
    app: ASGIApp, host: str, port: int, *, on_listening: OnListening | None = None, drain_s: float = 30.0
) -> EndpointServer:
    """A server for the caller's event loop: ``await server.serve()``; ``server.should_exit = True`` ends
    it."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http="httptools",
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        # Longer than the idle time of common client pools: a client must not write into a closing connection.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=math.ceil(drain_s),
    )
    return EndpointServer(config, on_listening)


def serve(
    app: ASGIApp, host: str, port: int, *, on_listening: OnListening | None = None, drain_s: float = 30.0
) -> None:
    """Serve until a signal ends it; `on_listening` gets the port. Raises SystemExit when the port cannot be
    opened."""
    make_server(app, host, port, on_listening=on_listening, drain_s=drain_s).run()
