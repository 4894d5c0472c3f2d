"""The harness before a decoder: `CodecUnderTest` asks what it makes of one frame.

The testee decodes a whole frame without any connection: prefix, control and bodies in the order of SPEC.md 4. Called by
the codec families and by `runner`; the pipe to a decoder in another language is elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..buffers import Buffer
from ..errors import ProtocolError
from ..frame import decode_frame, encode_frame
from ..registry import ErrorCode
from .verdicts import Remarks, Unmet, WrongCode


@dataclass(frozen=True)
class CodecAnswer:
    """``code`` is None when the frame was accepted; then ``encoded`` is the frame that its contents give."""

    code: ErrorCode | None
    encoded: bytes = b""


class Codec(Protocol):
    """A decoder under test."""

    def decode(self, frame: bytes) -> CodecAnswer:
        """Decode one whole frame, and encode what was found."""


class ReferenceCodec:
    """This package's own codec."""

    def decode(self, frame: bytes) -> CodecAnswer:
        """See :class:`Codec`."""
        try:
            found = decode_frame(frame)
        except ProtocolError as error:
            return CodecAnswer(error.code)
        return CodecAnswer(None, bytes(encode_frame(found.message, found.prefix.key, found.bodies)))


class CodecUnderTest(Remarks):
    """See the module."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def refuses(self, frame: Buffer, *codes: ErrorCode) -> None:
        """The decoder must refuse ``frame`` with one of ``codes``."""
        answer = self._decode(bytes(frame))
        if answer.code not in codes:
            wanted = " or ".join(code.name for code in codes)
            if answer.code is None:
                raise Unmet(wanted, "an accepted frame", actual_frame=bytes(frame))
            raise WrongCode(wanted, answer.code.name, actual_frame=bytes(frame))
        self.refused = True

    def accepts(self, frame: Buffer, encoded: Buffer | None = None) -> None:
        """The decoder must accept ``frame`` and give the same bytes back (or ``encoded``)."""
        answer = self._decode(bytes(frame))
        if answer.code is not None:
            raise Unmet("an accepted frame", answer.code.name, actual_frame=bytes(frame))
        wanted = bytes(frame if encoded is None else encoded)
        if answer.encoded != wanted:
            raise Unmet("the same bytes from an encoder", "other bytes", wanted, answer.encoded)

    def _decode(self, frame: bytes) -> CodecAnswer:
        try:
            return self._codec.decode(frame)
        except Exception as error:  # an exception that gets out of a decoder is the fault that is hunted
            raise Unmet("an answer", f"{type(error).__name__}: {error}", actual_frame=frame) from None
