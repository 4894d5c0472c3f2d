"""A client transport that can also ask the worker what it holds for the verifier behind it (STATS).

Passes every frame on, remembers the epoch of the HELLO that went up, and keeps the STATS report that comes down for
itself: the verifier has not asked and never sees it. Spec: SPEC.md, section "STATS". Called by `proxy`, one for each
verifier's connection; owned by the proxy's thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark_proto import Buffer, MessageType
from dspark_proto.capture.checks import examine
from dspark_proto.frame import encode_frame
from dspark_proto.hello import Hello
from dspark_proto.messages import Stats
from dspark_proto.placement import Place, PlacedFrame, Received
from dspark_proto.transports import ClientTransport

_TYPE_AT = 6
"""Where a frame's prefix has its message type."""


class StatsProbe:
    """Implements `ClientTransport` over another one."""

    place: Place | None = None

    def __init__(self, client: ClientTransport) -> None:
        self._client = client
        self._epoch: int | None = None
        self.report: Stats | None = None

    def ask(self) -> None:
        """Forget the last report and ask for a new one, once a HELLO has passed."""
        self.report = None
        if self._epoch is not None:
            self._client.send([encode_frame(Stats(self._epoch))])

    def send(self, frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        """See `ClientTransport`."""
        for frame in frames:
            if _is(frame, MessageType.HELLO) and isinstance(hello := examine(bytes(frame)).message, Hello):
                self._epoch = hello.epoch
        return self._client.send(frames, timeout_ms)

    def poll(self, timeout_ms: int) -> list[Received]:
        """See `ClientTransport`; reports are taken out."""
        frames = self._client.poll(timeout_ms)
        return [frame for frame in frames if not self._takes(frame)]

    def _takes(self, frame: Received) -> bool:
        if (
            isinstance(frame, PlacedFrame)
            or not _is(frame, MessageType.STATS)
            or not isinstance(report := examine(bytes(frame)).message, Stats)
        ):
            return False
        self.report = report
        return True

    def close(self) -> None:
        """See `ClientTransport`."""
        self._client.close()


def _is(frame: Buffer, kind: MessageType) -> bool:
    return len(frame) > _TYPE_AT and frame[_TYPE_AT] == kind
