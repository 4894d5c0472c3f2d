"""A TCP relay whose connections can be reset or half closed: the socket-level faults under a proxy.

Bytes pass both ways unchanged. `cut` ends every connection that is open, in one of two ways: ``reset`` sends RST to the
side that connected; ``half_close`` sends it FIN, while its own direction stays open until it closes by itself.
Invariants: loopback only; a connection that ends on one side is ended on the other; the address stays the same, only
the place that new connections go to may change.

Runs in an event loop of its own thread. Called by `proxy`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from dataclasses import dataclass

CHUNK_BYTES = 1 << 16
CUTS = ("reset", "half_close")
_LOCAL = "127.0.0.1"
_NO_LINGER = struct.pack("ii", 1, 0)
"""SO_LINGER on, zero seconds: closing sends RST."""


@dataclass(eq=False)
class _Pair:
    """The two sockets of one relayed connection: from the side that connected, and onwards."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter


class Relay:
    """Listens on a free loopback port and forwards to `target_port`, which may be set anew at any time."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.accepted = 0
        self.cut_connections = dict.fromkeys(CUTS, 0)
        self._pairs: set[_Pair] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._relay, _LOCAL, 0), self._loop
        ).result()
        self.port: int = self._server.sockets[0].getsockname()[1]

    def cut(self, how: str) -> int:
        """End every open connection; how many there were. Raises KeyError for another `how` than `CUTS`."""
        return asyncio.run_coroutine_threadsafe(self._cut(how), self._loop).result()

    def close(self) -> None:
        """Stop listening and end the thread; connections die with the process."""
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    async def _cut(self, how: str) -> int:
        pairs = list(self._pairs)
        for pair in pairs:
            if how == "reset":
                near: socket.socket = pair.near.get_extra_info("socket")
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                pair.near.transport.abort()
            else:
                pair.near.write_eof()
            self.cut_connections[how] += 1
        return len(pairs)

    async def _relay(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            onward, far = await asyncio.open_connection(_LOCAL, self.target_port)
        except OSError:
            near.close()
            return
        pair = _Pair(near, far)
        self._pairs.add(pair)
        ways = [asyncio.create_task(_pump(reader, far)), asyncio.create_task(_pump(onward, near))]
        try:
            # A half closed side ends one way only: the other end of the connection decides when all is over.
            await ways[0]
        finally:
            for way in ways:
                way.cancel()
            self._pairs.discard(pair)
            near.close()
            far.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Bytes from one side to the other until one of them ends."""
    with contextlib.suppress(OSError, RuntimeError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    if not writer.is_closing() and writer.can_write_eof():
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()
