"""Captures of v2 connections: record what passes, explain it, replay it, and stand in the middle to do harm.

``CaptureWriter`` and ``CaptureReader`` are the `.dspcap` file, ``RecordingClient`` and ``RecordingServer`` record any
transport, ``explain_frame`` and ``explain_capture`` say what is in it, ``replay`` compares a drafter's answers with
captured ones, ``Middle`` passes frames between real peers and injects faults by rule. The core knows nothing of this.
"""

from __future__ import annotations

from .answers import Answer, AnswerBuilder, Difference, compare
from .checks import Examination, examine
from .explain import explain_capture, explain_frame
from .faults import Rule, RuleError, parse_rule
from .middle import Fault, Middle
from .own_drafter import OwnDrafter
from .reader import CaptureReader, read_frames
from .recording import RecordingClient, RecordingServer
from .records import CaptureError, Description, Direction, Entry, EntryKind, TransportKind
from .replay import LiveDrafter, Report, connection_entries, replay
from .writer import CaptureWriter

__all__ = (
    "Answer",
    "AnswerBuilder",
    "CaptureError",
    "CaptureReader",
    "CaptureWriter",
    "Description",
    "Difference",
    "Direction",
    "Entry",
    "EntryKind",
    "Examination",
    "Fault",
    "LiveDrafter",
    "Middle",
    "OwnDrafter",
    "RecordingClient",
    "RecordingServer",
    "Report",
    "Rule",
    "RuleError",
    "TransportKind",
    "compare",
    "connection_entries",
    "examine",
    "explain_capture",
    "explain_frame",
    "parse_rule",
    "read_frames",
    "replay",
)
