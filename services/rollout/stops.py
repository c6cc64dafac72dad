"""Stop strings, which end a response when its text contains one; matched in the same way for every rollout engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class StopStrings:
    """Stop strings of a request. A response ends at the first token with which its text contains one of them.

    Args:
        texts: the stop strings; at least one, none of them empty.
        decode: returns the text of each row of token ids, without special tokens.
        special_ids: ids of the special tokens, which `decode` leaves out.

    Raises:
        ValueError: there are no texts, or one is empty.
    """

    texts: tuple[str, ...]
    decode: Callable[[list[list[int]]], list[str]]
    special_ids: Set[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.texts or not all(self.texts):
            raise ValueError(f"stop strings must not be empty, got {list(self.texts)}")

    def cut(self, text: str, begin: int = 0) -> str:
        """Returns the part of a text before the first stop string that begins at `begin` or later; the whole text if it
        contains none."""
        found = [position for stop in self.texts if (position := text.find(stop, begin)) >= 0]
        return text[: min(found)] if found else text

    def watch(self, num_rows: int) -> StopMatcher:
        """Returns a matcher for `num_rows` responses that are about to be generated."""
        return StopMatcher(self, num_rows)


class StopMatcher:
    """Matches stop strings in several responses while they are generated. It decodes only the last tokens of each.

    As many tokens as the longest stop string has bytes are enough, since a token that is not special stands for at
    least one byte. One more is kept because some decoders strip the space before the first token.
    """

    def __init__(self, stops: StopStrings, num_rows: int) -> None:
        self._stops = stops
        longest = max(len(text.encode()) for text in stops.texts)
        self._tails: list[deque[int]] = [deque(maxlen=longest + 1) for _ in range(num_rows)]

    def ended(self, rows: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Adds the next token of some responses; returns, for each, whether its text now contains a stop string.
        End-of-sequence tokens do not count.

        Args:
            rows: numbers of the responses, from 0, each at most once.
            tokens: the next token of each of these responses.
        """
        for row, token in zip(rows, tokens, strict=True):
            if token not in self._stops.special_ids:
                self._tails[row].append(token)
        texts = self._stops.decode([list(self._tails[row]) for row in rows])
        return [any(stop in text for stop in self._stops.texts) for text in texts]
