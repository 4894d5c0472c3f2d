"""The random number ABI: Random123 known answers, injective fields, bounds, word order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark import philox
from dspark.philox import Domain, KeyRangeError, Keys, block

ONES = 0xFFFFFFFF

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_random123_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    assert block(*counter, *key) == words


def test_abi_is_frozen() -> None:
    """These values are part of the ABI: changing one changes every seeded answer ever given."""
    assert philox.RNG_ABI == "philox4x32-10/dspark1"
    assert {domain.name: domain.value for domain in Domain} == {
        "PROPOSAL": 1,
        "ACCEPTANCE": 2,
        "CORRECTION": 3,
        "BONUS": 4,
        "TARGET_ONLY": 5,
        "TEST": 6,
    }


def test_fields_land_in_their_words() -> None:
    keys = Keys(seed=-2, generation=0xABCDEF, round=0x01020304, choice=0x7F)
    expected = block(0x02000005, 0x11223344, 0x01020304, 0xABCDEF7F, 0xFFFFFFFE, 0xFFFFFFFF)
    assert keys.words(Domain.ACCEPTANCE, 0x11223344, draw=5) == expected
    assert keys.draw24(Domain.ACCEPTANCE, 0x11223344, draw=5) == expected[0] >> 8
    assert keys.draw64(Domain.ACCEPTANCE, 0x11223344, draw=5) == (expected[0] << 32) | expected[1]


FIELDS = st.tuples(
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.integers(0, (1 << 24) - 1),
    st.integers(0, ONES),
    st.integers(0, 255),
    st.sampled_from(list(Domain)),
    st.integers(0, ONES),
    st.integers(0, (1 << 24) - 1),
)


def _inputs(fields: tuple[int, int, int, int, Domain, int, int], monkeypatch: pytest.MonkeyPatch) -> object:
    """The Philox input of a key, read by putting the identity in place of the block function."""
    seed, generation, round_, choice, domain, position, draw = fields
    with monkeypatch.context() as patch:
        patch.setattr(philox, "block", lambda *words: words)
        return Keys(seed, generation, round_, choice).words(domain, position, draw)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(first=FIELDS, second=FIELDS, same=st.sets(st.integers(0, 6)))
def test_distinct_keys_have_distinct_inputs(
    first: tuple[int, int, int, int, Domain, int, int],
    second: tuple[int, int, int, int, Domain, int, int],
    same: set[int],
) -> None:
    """Any two keys, also such that agree in any subset of fields, collide only when they are equal."""
    mixed = tuple(first[i] if i in same else second[i] for i in range(7))
    with pytest.MonkeyPatch.context() as patch:
        assert (_inputs(first, patch) == _inputs(mixed, patch)) == (first == mixed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("seed", (1 << 63, 0, 0, 0)),
        ("seed", (-(1 << 63) - 1, 0, 0, 0)),
        ("generation", (0, 1 << 24, 0, 0)),
        ("generation", (0, -1, 0, 0)),
        ("round", (0, 0, 1 << 32, 0)),
        ("round", (0, 0, -1, 0)),
        ("choice", (0, 0, 0, 256)),
        ("choice", (0, 0, 0, -1)),
    ],
)
def test_fields_out_of_range_are_refused_by_name(name: str, fields: tuple[int, int, int, int]) -> None:
    with pytest.raises(KeyRangeError, match=name):
        Keys(*fields)


def test_numpy_integers_are_refused_because_they_would_wrap() -> None:
    with pytest.raises(KeyRangeError, match=r"pass int\(position\)"):
        Keys(0, 0, 0).draw64(Domain.BONUS, np.int64(7))  # type: ignore[arg-type]
    with pytest.raises(KeyRangeError, match=r"pass int\(seed\)"):
        Keys(np.int64(7), 0, 0)  # type: ignore[arg-type]


def test_uses_out_of_range_are_refused_by_name() -> None:
    keys = Keys(0, 0, 0)
    with pytest.raises(KeyRangeError, match="position"):
        keys.draw64(Domain.BONUS, -1)
    with pytest.raises(KeyRangeError, match="draw"):
        keys.draw64(Domain.BONUS, 0, draw=1 << 24)
    with pytest.raises(KeyRangeError, match="domain"):
        keys.draw64(0, 0)  # type: ignore[arg-type]
