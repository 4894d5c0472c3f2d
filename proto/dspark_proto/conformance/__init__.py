"""Wire conformance: cases that hold a drafter, a verifier or a codec of any make to SPEC.md.

``run`` drives one testee, ``run_self`` the reference peers on every transport, ``run_selftest`` the harness itself
against a gallery of faulty peers. docs/guides/conformance.md shows how to run it on your own implementation; the
command line is ``dspark conformance``. Nothing here needs torch.
"""

from __future__ import annotations

from .as_codec import Codec, CodecAnswer, ReferenceCodec
from .catalogue import all_cases, select
from .facts import Facts, facts_from_file, facts_to_json, reference_facts
from .matrix import as_html
from .mutants import Mutant, gallery
from .record import Case, Level, Role
from .report import ExitCode, KnownFailures, as_junit, as_object, exit_code, read_known_failures, summary
from .runner import Report, merged, reach, run, run_case, run_codec
from .self_run import Peer, reference_peers, run_self
from .selftest import SelfTest, finds, run_selftest
from .testees import InProcess, RemoteDrafter, RemoteVerifier, ServedDrafter, ServedVerifier, Testee
from .verdicts import Behaviour, CaseResult, Closure, Residue, Unreachable

__all__ = (
    "Behaviour",
    "Case",
    "CaseResult",
    "Closure",
    "Codec",
    "CodecAnswer",
    "ExitCode",
    "Facts",
    "InProcess",
    "KnownFailures",
    "Level",
    "Mutant",
    "Peer",
    "ReferenceCodec",
    "RemoteDrafter",
    "RemoteVerifier",
    "Report",
    "Residue",
    "Role",
    "SelfTest",
    "ServedDrafter",
    "ServedVerifier",
    "Testee",
    "Unreachable",
    "all_cases",
    "as_html",
    "as_junit",
    "as_object",
    "exit_code",
    "facts_from_file",
    "facts_to_json",
    "finds",
    "gallery",
    "merged",
    "reach",
    "read_known_failures",
    "reference_facts",
    "reference_peers",
    "run",
    "run_case",
    "run_codec",
    "run_self",
    "run_selftest",
    "select",
    "summary",
)
