"""The registries and limits of SPEC.md, from `registry.toml`.

Called by `document`; reads the file once for each document. The values of the code are compared with the same file by a
test, so that the three agree.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

from .tables import table

REGISTRY: Final = Path(__file__).parents[2] / "registry.toml"

_SMALL: Final = (
    ("version", "WireVersion: versions of HELLO and ACCEPT"),
    ("lane", "Lane: lanes; in a mask bit id - 1"),
    ("support", "SupportPolicy: support policies"),
    ("representation", "Representation: row representations"),
    ("body", "BodyKind: body kinds"),
    ("dtype", "Dtype: element types, little-endian"),
    ("checksum", "Checksum: checksums; in a mask bit id - 1"),
    ("capability", "Capability: capabilities; in a mask bit id - 1"),
    ("cause", "Cause: causes of RESET, CANCEL and CLOSE"),
    ("semantic", "SemanticId: q semantic ids"),
    ("verifier", "VerifierId: verifier ids (acceptance rules)"),
    ("rng", "RngAbi: RNG ABIs"),
    ("precision", "Precision: precisions"),
    ("draft_layout", "DraftLayout: draft layouts"),
)


def _registry() -> dict[str, Any]:
    return tomllib.loads(REGISTRY.read_text("utf-8"))


def messages() -> str:
    """Message types, directions and keys."""
    rows = [[row["id"], row["name"], row["direction"], row["key"]] for row in _registry()["message"]]
    return table(["id", "message", "direction", "key in the prefix"], rows)


def scopes() -> str:
    """What an error ends."""
    return table(["id", "scope", "ends"], [[row["id"], row["name"], row["ends"]] for row in _registry()["scope"]])


def errors() -> str:
    """Error codes: meaning, scope, how the other side learns of it, reaction."""
    rows = [
        [row["code"], row["name"], row["scope"], row["via"], row["meaning"], row["then"]]
        for row in _registry()["error"]
    ]
    return table(["code", "name", "scope", "told by", "meaning", "reaction"], rows)


def limits() -> str:
    """Hard limits."""
    rows = [[f"`{row['name']}`", f"{row['value']:,}", row["unit"], row["meaning"]] for row in _registry()["limit"]]
    return table(["limit", "value", "unit", "of"], rows)


def ids() -> str:
    """Every other registry, and the reserved ids."""
    registry = _registry()
    parts = [
        f"**{title}**\n\n"
        + table(["id", "name", "meaning"], [[row["id"], row["name"], row["meaning"]] for row in registry[name]])
        for name, title in _SMALL
    ]
    reserved = [[row["registry"], row["id"], row["name"], row["meaning"]] for row in registry["reserved"]]
    parts.append("**Reserved**\n\n" + table(["registry", "id", "name", "meaning"], reserved))
    return "\n\n".join(parts)
