"""The codec pipe: a codec in any language is held to the golden vectors over stdin and stdout, without a network.

``python -m dspark_proto.codec_pipe.testee`` is the reference testee, ``run_vectors`` the runner. The contract is in
``messages``; it is the first thing to get green when a peer is written (docs/guides/implement-a-peer.md).
"""

from __future__ import annotations

from .answers import Answer, answer
from .messages import PipeError, read_message, write_message
from .process import PipeProcess, TesteeError
from .runner import Judgement, Verdict, run_vectors

__all__ = (
    "Answer",
    "Judgement",
    "PipeError",
    "PipeProcess",
    "TesteeError",
    "Verdict",
    "answer",
    "read_message",
    "run_vectors",
    "write_message",
)
