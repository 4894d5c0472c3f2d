"""The reference testee: `python -m dspark_proto.codec_pipe.testee` answers on stdout what stdin asks.

A testee in another language is this loop and the operations that it knows; it may answer ``{"unsupported": true}`` to
the rest, and it exits with 127 when it supports nothing that was asked for at the start. Stdout carries answers only.
Ends with 0 at the end of its input, with 2 after bytes that are no message.
"""

from __future__ import annotations

import sys

from .answers import answer
from .messages import PipeError, read_message, write_message


def main() -> int:
    """Serve until the input ends."""
    try:
        while (request := read_message(sys.stdin.buffer)) is not None:
            write_message(sys.stdout.buffer, answer(request))
    except PipeError as error:
        print(f"testee: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
