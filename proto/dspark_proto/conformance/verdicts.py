"""Three verdicts per case: how the testee behaved, how the connection ended, and what was left behind.

Scripts raise `Unmet`, `TimedOut` or `Unsupported`; `runner` turns them into a `CaseResult`. Nothing here talks to a
testee.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .record import Case, Level


class Behaviour(StrEnum):
    """What the testee did.

    PASS_NONSTRICT: the requirement holds, a SHOULD beside it does not. INFO: the requirement holds, and the note says
    in which of the ways that the standard leaves open.
    """

    PASS = "PASS"
    PASS_NONSTRICT = "PASS_NONSTRICT"
    INFO = "INFO"
    UNSUPPORTED = "UNSUPPORTED"
    FAIL = "FAIL"
    ERROR = "ERROR"
    TIMEOUT = "TIMEOUT"


class Closure(StrEnum):
    """How the connection stood after the case.

    RIGHT_CODE: clean, and what had to be refused was refused with the code that the standard names. WRONG_CODE: it was
    refused with another code, which breaks the requirement.
    """

    CLEAN = "clean"
    RIGHT_CODE = "right code"
    WRONG_CODE = "wrong code"
    UNCLEAN = "unclean"
    HUNG = "hung"
    NOT_JUDGED = "not judged"


class Residue(StrEnum):
    """What the testee still held after every session had been closed."""

    NONE = "none"
    LEAKED = "leaked"
    NOT_JUDGED = "not judged"


class Unmet(Exception):
    """The testee broke the requirement. ``expected`` and ``actual`` are text; the frames go into the hex diff."""

    def __init__(self, expected: str, actual: str, expected_frame: bytes = b"", actual_frame: bytes = b"") -> None:
        super().__init__(f"expected {expected}; got {actual}")
        self.expected, self.actual = expected, actual
        self.expected_frame, self.actual_frame = expected_frame, actual_frame


class WrongCode(Unmet):
    """The testee refused, as it must, with another code than the standard's."""


class TimedOut(Exception):
    """The testee did not do the expected thing before the deadline."""


class Unsupported(Exception):
    """The testee does not offer what the case needs; no fault."""


class Unreachable(Exception):
    """No connection to the testee."""


class Remarks:
    """What a handle found beside pass and fail. ``refused``: something was refused with the right code."""

    behaviour = Behaviour.PASS
    note = ""
    refused = False

    def tolerate(self, note: str) -> None:
        """A SHOULD does not hold."""
        self.behaviour, self.note = Behaviour.PASS_NONSTRICT, note

    def inform(self, note: str) -> None:
        """The standard leaves this open."""
        if self.behaviour is Behaviour.PASS:
            self.behaviour, self.note = Behaviour.INFO, note


@dataclass(frozen=True)
class CaseResult:
    """What one case found on one transport. Frames are cut to the first kilobyte; ``testee`` is for runs of several."""

    case: Case
    transport: str
    behaviour: Behaviour
    closure: Closure
    residue: Residue
    note: str = ""
    expected: str = ""
    actual: str = ""
    expected_frame: bytes = b""
    actual_frame: bytes = b""
    testee: str = ""

    @property
    def good(self) -> bool:
        """Nothing to complain about on any of the three axes."""
        return not self.failed and self.residue is not Residue.LEAKED

    @property
    def failed(self) -> bool:
        """The behaviour or the closure broke the requirement."""
        bad_behaviour = self.behaviour in (Behaviour.FAIL, Behaviour.ERROR, Behaviour.TIMEOUT)
        return bad_behaviour or self.closure in (Closure.WRONG_CODE, Closure.UNCLEAN, Closure.HUNG)

    @property
    def must_failed(self) -> bool:
        """A MUST is broken."""
        return self.failed and self.case.level is Level.MUST
