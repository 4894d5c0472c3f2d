"""The parts of SPEC.md that are made from the code: `python -m dspark_proto.standard [--write]`.

State tables and diagrams come from `states`, registries and limits from `registry.toml`, the compliance matrix from
the standard's own requirements and the conformance cases, the round in bytes from both connections. Invariant: prose is
never touched, only what stands between two markers. A tool of the source tree, not of an installed package: the
files that it reads are beside the package. Called by hand and by tests.
"""

from __future__ import annotations

from .document import SPECIFICATION, Requirement, generated, requirements, written

__all__ = ("SPECIFICATION", "Requirement", "generated", "requirements", "written")
