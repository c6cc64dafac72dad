"""Stop strings: found at the very token that completes them, whatever pieces the tokenizer cuts a text into."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.stops import StopStrings

SPECIAL = 0
BYTES = [b"<end>", b"a", b"b", b"ab", b"ba", b" ", b" a", "ä".encode(), *(bytes([b]) for b in "ä€".encode())]
WORDS = ["<end>", "▁", "▁a", "a", "b", "▁ab", "ba"]


def decode_bytes(rows: list[list[int]]) -> list[str]:
    """As byte-level tokenizers: a character may be spread over several tokens."""
    return [b"".join(BYTES[i] for i in row if i != SPECIAL).decode(errors="replace") for row in rows]


def decode_words(rows: list[list[int]]) -> list[str]:
    """As sentencepiece: the space before the first token goes."""
    return [
        "".join(WORDS[i] for i in row if i != SPECIAL).replace("▁", " ").removeprefix(" ") for row in rows
    ]


def first_end(stops: StopStrings, tokens: list[int]) -> int | None:
    """The number of tokens after which the watch says that a lone response ends."""
    watch = stops.watch(1)
    return next((n for n, token in enumerate(tokens, 1) if watch.ended([0], [token])[0]), None)


@pytest.mark.parametrize(("decode", "size"), [(decode_bytes, len(BYTES)), (decode_words, len(WORDS))])
@given(data=st.data())
def test_a_response_ends_with_the_first_token_at_which_its_whole_text_has_a_stop_string(
    decode, size: int, data: st.DataObject
) -> None:
    texts = data.draw(st.lists(st.text("ab ä€", min_size=1, max_size=4), min_size=1, max_size=3))
    tokens = data.draw(st.lists(st.integers(0, size - 1), max_size=30))
    texts_so_far = [decode([tokens[:n]])[0] for n in range(1, len(tokens) + 1)]
    expected = next(
        (n for n, text in enumerate(texts_so_far, 1) if any(stop in text for stop in texts)), None
    )
    assert first_end(StopStrings(tuple(texts), decode, {SPECIAL}), tokens) == expected


def test_rows_are_told_apart_and_may_come_and_go() -> None:
    watch = StopStrings(("ab",), decode_bytes, {SPECIAL}).watch(3)
    a, b = BYTES.index(b"a"), BYTES.index(b"b")
    assert watch.ended([0, 1, 2], [a, b, a]) == [False, False, False]
    assert watch.ended([2, 1], [b, b]) == [True, False]
    assert watch.ended([0], [b]) == [True]


def test_a_text_is_cut_before_the_stop_string_that_comes_first() -> None:
    stops = StopStrings(("END", "\n\n"), decode_bytes)
    assert stops.cut("one\n\ntwo END") == "one"
    assert stops.cut("one END\n\n") == "one "
    assert stops.cut("one\nEN") == "one\nEN"


@pytest.mark.parametrize("texts", [(), ("a", "")])
def test_an_empty_stop_string_is_refused(texts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings(texts, decode_bytes)
