"""The compliance matrix of SPEC.md: which conformance cases hold an implementation to which requirement.

Cases come from `conformance/cases.txt`, requirements from the standard itself. A requirement without a case has its
reason here, and the reason is shown only as long as there is no case. Called by `document`; runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Final

from .tables import table

CASES: Final = Path(__file__).parents[1] / "conformance" / "cases.txt"

_LINK: Final = "of the transport, not of frames; tests/proto/test_wire_transports.py and those of each transport"
_SECURITY: Final = "of the process, not of frames; tests/proto/test_wire_security.py"
_INSIDE: Final = "cannot be seen from outside"

REASONS: Final[dict[str, str]] = {
    "REQ-LIF-5": "about pauses between connections, of which a case sees one",
    "REQ-PFX-10": "tests/proto/test_wire_coverage_drafter.py for the drafter, the cases of REQ-LIF-1 for the verifier",
    "REQ-FRM-2": "a format: the cases of REQ-FRM-1, REQ-FRM-3, REQ-FRM-4 and REQ-CRC-3 fail a body in another place",
    "REQ-FRM-5": "each check has cases of its own; their order is that of the vectors in proto/vectors/refusals.json",
    "REQ-CTX-7": "the cases of REQ-CTX-4 and REQ-PNG-1 hold both sides to it from outside",
    "REQ-HEL-13": "needs a peer that offers a capability; tests/proto/test_wire_dense.py",
    "REQ-HEL-14": "what a side offers is its configuration; tests/proto/test_wire_dense.py",
    "REQ-HEL-15": "needs a peer of two versions; tests/proto/test_wire_v1.py",
    "REQ-HEL-16": "needs a verifier that was told to; tests/proto/test_wire_v1.py",
    "REQ-AUT-4": "needs a verifier with a secret; tests/proto/test_wire_auth.py",
    "REQ-AUT-5": "needs a verifier with a secret; tests/proto/test_wire_auth.py",
    "REQ-AUT-6": f"{_INSIDE}: a time that depends on nothing has no case",
    "REQ-AUT-7": "the vectors of proto/vectors/auth.json",
    "REQ-CTX-6": "the credit of refused rows is not shown by any message",
    "REQ-OPN-5": "a drafter drains when its operator says so; tests/proto/test_wire_slots.py",
    "REQ-STP-6": f"{_INSIDE}: when a depth was chosen",
    "REQ-STP-11": "tests/proto/test_wire_rounds.py and the vectors",
    "REQ-ROW-8": f"{_INSIDE}: when a confidence was fixed",
    "REQ-ROW-9": f"{_INSIDE}: why rows were left unverified",
    "REQ-ROW-11": "the cases of REQ-ROW-2 and REQ-BOD-1 change depth, support and representation",
    "REQ-ROW-10": "the rows of the cases are small; tests/proto/test_wire_dense.py",
    "REQ-RST-1": "the cases of REQ-GEN-2, REQ-GEN-5 and REQ-GEN-6 send them in every state",
    "REQ-ONE-1": "needs a peer of version 1; tests/proto/test_wire_v1.py",
    "REQ-ONE-2": "needs a peer of version 1; tests/proto/test_wire_v1.py",
    "REQ-ONE-3": "needs a peer of version 1; tests/proto/test_wire_v1.py",
    "REQ-ONE-4": "needs a peer of version 1; tests/proto/test_wire_v1.py",
    "REQ-LAN-1": "audited from the counts and the seed, over many rounds",
    "REQ-RNG-2": "the verifier's draws are not on the wire",
    "REQ-RNG-4": "judged by the RNG cases of a deterministic drafter, with the seed's own draws",
    "REQ-GEN-7": "the cases of REQ-GEN-4 and REQ-ERR-4 end with the new generation",
    "REQ-STG-3": "needs a transport that writes into staging; tests/proto/test_wire_placement.py",
    "REQ-ERR-6": "the cases of REQ-CMP-1, REQ-ROW-3, REQ-CRC-3 and others, each with the round after it",
    "REQ-ERR-7": "the cases of REQ-ERR-4 use several codes",
    "REQ-TRN-2": _LINK,
    "REQ-TRN-3": _LINK,
    "REQ-TRN-4": _LINK,
    "REQ-ZMQ-1": _LINK,
    "REQ-ZMQ-3": _SECURITY,
    "REQ-TCP-1": _LINK,
    "REQ-TCP-2": _LINK,
    "REQ-TCP-3": _LINK,
    "REQ-TCP-4": _LINK,
    "REQ-TCP-5": _LINK,
    "REQ-TLS-1": _SECURITY,
    "REQ-UCX-1": _LINK,
    "REQ-UCX-2": _LINK,
    "REQ-UCX-3": _LINK,
    "REQ-UCX-4": _LINK,
    "REQ-UCX-5": _LINK,
    "REQ-SEC-1": "a property of the source; tests/test_tidy.py",
    "REQ-SEC-2": _SECURITY,
    "REQ-SEC-6": _SECURITY,
    "REQ-SEC-7": "advice about the choice of a link, not about frames",
    "REQ-VER-2": "needs a peer of two versions; tests/proto/test_wire_v1.py",
}


def cases_by_requirement(text: str) -> dict[str, list[str]]:
    """Requirement -> ids of its cases, from lines "id role level requirement title"."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        case, _role, _level, requirement = line.split()[:4]
        found.setdefault(requirement, []).append(case)
    return found


def shortened(cases: Iterable[str]) -> str:
    """`DSP2-ROW-101 .. 105, 107`: runs of numbers, the family once."""
    parts = []
    for family, members in groupby(sorted(cases), key=lambda case: case.rpartition("-")[0]):
        numbers = [int(case.rpartition("-")[2]) for case in members]
        runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
        spans = [[number for _, number in run] for _, run in runs]
        shown = [f"{one[0]:03d}" if len(one) == 1 else f"{one[0]:03d} .. {one[-1]:03d}" for one in spans]
        parts.append(f"{family}-{', '.join(shown)}")
    return "; ".join(parts)


def matrix(named: Mapping[str, str], text: str) -> str:
    """``named``: requirement -> section number. One row for each, with its cases or the reason why there is none."""
    cases = cases_by_requirement(text)
    rows = []
    for requirement, section in named.items():
        judged = shortened(cases[requirement]) if requirement in cases else f"none: {REASONS[requirement]}"
        rows.append([requirement, section, judged])
    counted = sum(requirement in cases for requirement in named)
    total = sum(map(len, cases.values()))
    head = f"{len(named)} requirements; {counted} of them have cases, {total} in all.\n\n"
    return head + table(["requirement", "section", "cases"], rows)
