"""From tokens to text: the result may not depend on how tokens are grouped, and no stop is ever shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_spark.api import SamplingParams
from dspark_spark.text import IncrementalDetokenizer, Pushed, StopScanner, TextStream

EOS, OTHER_EOS = 300, 301
PIECES = {256: b"hello", 257: b" wor", 258: b"ld", 259: b"\xf0\x9f", 260: b"\xa6\x9cx", 261: b"STOPPER"}


class PieceTokenizer:
    """Ids below 256 are single bytes, a few others are longer pieces, ids from 300 on are special."""

    def decode_bytes(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(
            bytes([token_id]) if token_id < 256 else PIECES.get(token_id, b"") for token_id in token_ids
        )


def stream(max_tokens: int = 100, already: int = 0, **params: object) -> TextStream:
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return TextStream(PieceTokenizer(), sampling, (EOS, OTHER_EOS), already)


def play(text_stream: TextStream, rounds: Sequence[Sequence[int]]) -> tuple[str, list[int], Pushed | None]:
    """Text, kept ids and the last result of rounds that end with the text or with the script."""
    text, pushed = "", None
    kept: list[int] = []
    for tokens in rounds:
        pushed = text_stream.push(tokens)
        text += pushed.text
        kept += tokens[: pushed.kept_count]
        if pushed.finish_reason:
            break
    return text, kept, pushed


def test_plain_rounds() -> None:
    text_stream = stream()
    assert text_stream.push([256, 257]) == Pushed(2, "hello wor")
    assert text_stream.push([258]) == Pushed(1, "ld")
    assert text_stream.token_count == 3
    assert text_stream.remaining == 97


def test_character_split_over_rounds_waits_for_its_end() -> None:
    text_stream = stream()
    assert text_stream.push([256, 259]).text == "hello"
    assert text_stream.push([260]).text == "🦜x"


def test_stop_token_beats_the_budget_and_drops_what_follows() -> None:
    pushed = stream(max_tokens=5, stop_token_ids=(83,)).push([10, 11, 83, 20, 21, 22])
    assert pushed == Pushed(3, "\n\x0b", "stop", 83)


def test_stop_beyond_the_budget_is_length() -> None:
    assert stream(max_tokens=2, stop_token_ids=(83,)).push([65, 66, 83]) == Pushed(2, "AB", "length")


def test_stop_on_the_very_last_token_of_the_budget_is_stop() -> None:
    assert stream(max_tokens=3, stop_token_ids=(83,)).push([65, 66, 83]) == Pushed(3, "AB", "stop", 83)
    assert stream(max_tokens=2, stop=("B",)).push([65, 66]) == Pushed(2, "A", "stop", "B")
    assert stream(max_tokens=2).push([65, EOS]) == Pushed(2, "A", "stop")


def test_eos_counts_and_shows_nothing() -> None:
    assert stream().push([65, OTHER_EOS, 66]) == Pushed(2, "A", "stop")


def test_ignore_eos_goes_on_unless_the_id_is_a_stop_token() -> None:
    assert stream(ignore_eos=True).push([65, EOS, 66]) == Pushed(3, "AB")
    assert stream(ignore_eos=True, stop_token_ids=(EOS,)).push([65, EOS, 66]) == Pushed(2, "A", "stop", EOS)


def test_eos_is_named_before_a_stop_token_of_the_same_id() -> None:
    assert stream(stop_token_ids=(EOS,)).push([EOS]) == Pushed(1, "", "stop")


@pytest.mark.parametrize("width", [1, 2, 3, 7, 20])
def test_stop_string_over_rounds_of_any_width(width: int) -> None:
    tokens = list(b"one two## three")
    rounds = [tokens[start : start + width] for start in range(0, len(tokens), width)]
    text, kept, pushed = play(stream(stop=("## t", "zzz")), rounds)
    assert text == "one two"
    assert bytes(kept) == b"one two## t"
    assert pushed is not None
    assert (pushed.finish_reason, pushed.stop_reason) == ("stop", "## t")


def test_text_before_and_after_a_stop_inside_one_token() -> None:
    assert stream(stop=("OPP",)).push([256, 261, 257]) == Pushed(2, "helloST", "stop", "OPP")


def test_text_that_may_become_a_stop_is_held_back_and_released_when_it_does_not() -> None:
    text_stream = stream(stop=("abcd",))
    assert text_stream.push(list(b"xab")).text == "x"
    assert text_stream.push(list(b"ab")).text == "ab"
    assert text_stream.push(list(b"cx")).text == "abcx"


def test_held_text_is_released_at_eos_and_at_the_budget() -> None:
    assert stream(stop=("abcd",)).push([*b"xabc", EOS]).text == "xabc"
    assert stream(stop=("abcd",), max_tokens=4).push(list(b"xabcd")) == Pushed(4, "xabc", "length")


@pytest.mark.parametrize(("text", "stop"), [("aaab", "aab"), ("ababac", "abac"), ("##\n##\n#", "##\n#")])
def test_near_miss_that_overlaps_the_match_is_no_obstacle(text: str, stop: str) -> None:
    pushed = stream(stop=(stop,)).push(list(text.encode()))
    assert pushed.stop_reason == stop
    assert pushed.text == text[: text.find(stop)]


def test_stop_that_completes_first_wins_and_the_longest_of_those() -> None:
    assert stream(stop=("abcd", "bc")).push(list(b"xabcd")) == Pushed(4, "xa", "stop", "bc")
    assert stream(stop=("bc", "abc")).push(list(b"xabc")) == Pushed(4, "x", "stop", "abc")


def test_stop_string_comes_before_a_later_stop_token_and_eos() -> None:
    assert stream(stop=("b",), stop_token_ids=(99,)).push([*b"abc", EOS]) == Pushed(2, "a", "stop", "b")


def test_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    assert stream().push([65, 259, EOS]).text == "A\ufffd"
    assert stream(max_tokens=2).push([65, 259]) == Pushed(2, "A\ufffd", "length")
    assert stream(max_tokens=2, stop=("\ufffd",)).push([65, 259]) == Pushed(2, "A", "stop", "\ufffd")


def test_flush_is_for_ends_that_push_did_not_see() -> None:
    aborted = stream(stop=("abcd",))
    aborted.push([*b"xab", 259])
    assert aborted.flush() == "ab\ufffd"
    ended = stream(stop=("abcd",))
    ended.push([*b"xab", EOS])
    assert ended.flush() == ""
    held = stream(stop=("abcd",))
    held.push(list(b"xab"))
    assert held.flush() == "ab"


def test_push_after_the_end_is_refused() -> None:
    text_stream = stream()
    text_stream.push([EOS])
    with pytest.raises(RuntimeError, match="after the end"):
        text_stream.push([65])


def test_rebuilt_stream_goes_on_counting() -> None:
    text_stream = stream(max_tokens=5, already=3)
    assert text_stream.remaining == 2
    assert text_stream.push(list(b"abc")) == Pushed(2, "ab", "length")


def test_empty_round_changes_nothing() -> None:
    assert stream().push([]) == Pushed(0, "")


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopScanner(["a", ""])


@given(
    st.lists(st.sampled_from([*range(0x20, 0x7F), 0xC3, 0xA9, 0xF0, 0x9F, 0xA6, 0x9C, 0xFF, 256, 259, 260]))
)
def test_detokenizer_equals_decoding_the_whole(tokens: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(PieceTokenizer())
    pieces = [detokenizer.push(token) for token in tokens]
    whole = PieceTokenizer().decode_bytes(tokens).decode("utf-8", "replace")
    assert "".join(pieces) + detokenizer.flush() == whole


def cut_by_hand(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The rule, said as slowly as possible: the first end of any stop string, and the longest there."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4, unique=True)


@settings(max_examples=300)
@given(st.text("ab", max_size=30), STOPS, st.lists(st.integers(1, 5), min_size=1))
def test_scanner_equals_the_rule_however_the_text_is_cut(
    text: str, stops: list[str], widths: list[int]
) -> None:
    scanner, released, matched, start = StopScanner(stops), "", None, 0
    for index in range(len(text)):
        width = widths[index % len(widths)]
        piece, matched = scanner.push(text[start : start + width])
        released, start = released + piece, start + width
        if matched is not None or start >= len(text):
            break
    if matched is None:
        released += scanner.flush()
    assert (released, matched) == cut_by_hand(text, stops)


TOKENS = st.lists(st.sampled_from([*b"ab", 256, 259, 260, 261, EOS, 83]), min_size=1, max_size=20)


@settings(max_examples=300)
@given(TOKENS, st.integers(1, 25), STOPS, st.lists(st.integers(1, 8), min_size=1))
def test_grouping_of_tokens_changes_nothing(
    tokens: list[int], max_tokens: int, stops: list[str], widths: list[int]
) -> None:
    def outcome(rounds: Sequence[Sequence[int]]) -> object:
        text_stream = stream(max_tokens=max_tokens, stop=tuple(stops), stop_token_ids=(83,))
        text, kept, pushed = play(text_stream, rounds)
        assert pushed is not None
        return text + text_stream.flush(), kept, pushed.finish_reason, pushed.stop_reason

    grouped, start = [], 0
    for index in range(len(tokens)):
        width = widths[index % len(widths)]
        grouped.append(tokens[start : start + width])
        start += width
        if start >= len(tokens):
            break
    assert outcome(grouped) == outcome([[token] for token in tokens])


def test_long_stop_strings_cost_linear_time() -> None:
    """A text of near-misses: with a quadratic scanner this takes minutes."""
    scanner = StopScanner(["a" * 1000 + "b"] * 4)
    released = sum(len(scanner.push("a")[0]) for _ in range(20_000))
    assert released == 19_000
