"""A TCP relay that holds every byte up for a while: a long link on one machine, for measurements.

It runs as a process of its own and passes bytes as they are, so it serves any transport over TCP, encrypted or not.
Both directions are delayed by half of what is added to a round trip. Nothing is dropped, changed or reordered; bytes
that arrive later leave later, also when the delay is made shorter in between.

One thread waits for the next arrival or the next departure, whichever is first, so that at zero delay a hop costs two
system calls and a wake-up (`dspark bench overlap` measures what it adds). It reads a new delay, in milliseconds of a
round trip, from each line of its standard input, and ends when that closes: with whoever started it.

Started by `DelayedLink`; called by `dspark bench overlap` and tests. A man in the middle that knows frames, and harms
them, is `dspark_proto.capture`.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field

CHUNK_BYTES = 1 << 18
LANE_CHUNKS_MAX = 4096
"""A direction with more chunks under way is not read from until some have left."""
READY_PREFIX = "delay ready "
START_TIMEOUT_S = 30.0


@dataclass(slots=True, eq=False)
class _Lane:
    """One direction of one connection: bytes from `source`, with the time at which they are due at `sink`."""

    source: socket.socket
    sink: socket.socket
    chunks: deque[tuple[float, bytes]] = field(default_factory=deque)
    open: bool = True


class Relay:
    """Listens on a free loopback port and opens a connection to `target` for every one that it accepts."""

    def __init__(self, target: tuple[str, int], delay_ms: float = 0.0) -> None:
        """`delay_ms` is added to a round trip: half of it in each direction."""
        self._target = target
        self.delay_ms = delay_ms
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lanes: list[_Lane] = []

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def turn(self, *others: int) -> list[int]:
        """Wait for bytes or for a departure; returns those descriptors of `others` that are ready."""
        reading = {lane.source: lane for lane in self._lanes if lane.open and len(lane.chunks) < LANE_CHUNKS_MAX}
        due = min((lane.chunks[0][0] for lane in self._lanes if lane.chunks), default=None)
        wait_s = None if due is None else max(0.0, due - time.perf_counter())
        watched: list[socket.socket | int] = [self._listener, *reading, *others]
        ready, _, _ = select.select(watched, [], [], wait_s)
        for one in ready:
            if one is self._listener:
                self._accept()
            elif one in reading:
                self._read(reading[one])
        for lane in self._lanes:
            self._deliver(lane)
        self._sweep()
        return [one for one in ready if one in others]

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._target)
        except OSError:
            near.close()  # as if the far end had refused
            return
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lanes += [_Lane(near, far), _Lane(far, near)]

    def _read(self, lane: _Lane) -> None:
        try:
            data = lane.source.recv(CHUNK_BYTES)
        except OSError:
            data = b""
        lane.open = bool(data)
        after = lane.chunks[-1][0] if lane.chunks else 0.0
        lane.chunks.append((max(after, time.perf_counter() + self.delay_ms / 2000), data))

    def _deliver(self, lane: _Lane) -> None:
        """Send what is due; an empty chunk is the end of the stream."""
        try:
            while lane.chunks and lane.chunks[0][0] <= time.perf_counter():
                _, data = lane.chunks.popleft()
                if data:
                    lane.sink.sendall(data)
                else:
                    lane.sink.shutdown(socket.SHUT_WR)
        except OSError:
            lane.open = False
            lane.chunks.clear()

    def _sweep(self) -> None:
        """Close connections both of whose directions have ended."""
        live = {end for lane in self._lanes if lane.open or lane.chunks for end in (lane.source, lane.sink)}
        for lane in self._lanes:
            if lane.source not in live:
                lane.source.close()
        self._lanes = [lane for lane in self._lanes if lane.source in live]

    def close(self) -> None:
        """Close everything; bytes under way are lost."""
        self._listener.close()
        for lane in self._lanes:
            lane.source.close()


class DelayedLink:
    """A relay in a process of its own. `endpoint` is where to connect to; use it as a context manager."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: tcp://host:port of the far end."""
        scheme, _, address = endpoint.rpartition("://")
        command = [sys.executable, "-m", "dspark.link_delay", address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line.startswith(READY_PREFIX):
            self.close()
            raise RuntimeError(f"the delaying relay did not start: {line!r}")
        self.endpoint = f"{scheme}://{line.removeprefix(READY_PREFIX)}"

    def delay(self, round_trip_ms: float) -> None:
        """Add this much to a round trip from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{round_trip_ms}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the relay by closing its standard input."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(START_TIMEOUT_S)

    def __enter__(self) -> DelayedLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main(address: str) -> None:
    """Relay to `host:port` until standard input closes."""
    host, _, port = address.rpartition(":")
    relay = Relay((host, int(port)))
    print(f"{READY_PREFIX}127.0.0.1:{relay.port}", flush=True)
    commands = sys.stdin.fileno()
    pending = b""
    while True:
        if not relay.turn(commands):
            continue
        data = os.read(commands, CHUNK_BYTES)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        if lines:
            relay.delay_ms = float(lines[-1])
    relay.close()


if __name__ == "__main__":
    main(sys.argv[1])
