"""What both connections share: counters, the outbox of automatic answers, and liveness.

Invariants: time only enters as ``now_ns`` (any monotonic clock); every drop is counted under its error code's
name; ``frames_to_send`` empties the outbox. Called by ``verifier`` and ``drafter`` as their base class.
"""

from __future__ import annotations

from .buffers import Buffer, byte_view
from .errors import LocalProtocolError, RemoteProtocolError
from .frame import decode_control, descriptors_of, encode_frame
from .messages import Message
from .negotiation import HelloParameters, Negotiated
from .prefix import NO_KEY, Key, Prefix, read_prefix
from .registry import ErrorCode, SupportPolicy
from .rows import ReplyLayout


class Peer:
    """Common part of :class:`VerifierConnection` and :class:`DrafterConnection`.

    ``counters`` maps the lower-case name of every error code to how often a frame, round or slot was dropped
    or refused for it. Not thread-safe: one thread owns a connection.
    """

    def __init__(self, parameters: HelloParameters) -> None:
        self.parameters = parameters
        self.negotiated: Negotiated | None = None
        self.counters: dict[str, int] = {code.counter: 0 for code in ErrorCode}
        self._outbox: list[memoryview] = []
        self._layouts: dict[tuple[int, int], ReplyLayout] = {}
        self._layouts_of: Negotiated | None = None
        self._heard_ns = 0

    def frames_to_send(self) -> list[memoryview]:
        """Frames that the connection wants sent by itself; call after ``receive`` and ``expire``."""
        frames, self._outbox = self._outbox, []
        return frames

    def _count(self, code: ErrorCode) -> None:
        self.counters[code.counter] += 1

    def _queue(self, message: Message, key: Key = NO_KEY) -> None:
        self._outbox.append(encode_frame(message, key))

    def _terms(self) -> Negotiated:
        if self.negotiated is None:
            raise LocalProtocolError(ErrorCode.HELLO_REQUIRED, "connection", "complete HELLO first")
        return self.negotiated

    def _layout(self, depth: int, support: SupportPolicy) -> ReplyLayout:
        """Layout of a reply under the terms, computed once: making one costs as much as decoding a frame."""
        terms = self._terms()
        if self._layouts_of is not terms:
            self._layouts, self._layouts_of = {}, terms
        found = self._layouts.get((depth, support))
        if found is None:
            found = self._layouts[depth, support] = terms.layout(depth, support)
        return found

    def _open_frame(self, buffer: Buffer, now_ns: int) -> tuple[Prefix, memoryview] | None:
        """The checked prefix of a received frame; None, counted, when it is unusable."""
        view = byte_view(buffer)
        try:
            prefix = read_prefix(view)
        except RemoteProtocolError as error:
            self._count(error.code)
            return None
        self._heard_ns = now_ns
        return prefix, view

    def _decode(self, prefix: Prefix, view: memoryview, absent_bytes: int = 0) -> Message:
        """The control message; body checksums must be the negotiated kind. ``view`` may lack its last bytes."""
        message = decode_control(prefix, view, absent_bytes)
        terms = self.negotiated
        for body in descriptors_of(message) if prefix.body_count else ():
            if terms is None or body.checksum_kind is not terms.checksum:
                raise RemoteProtocolError(ErrorCode.BAD_DESCRIPTOR, f"{message.NAME}.bodies.checksum_kind")
        return message
