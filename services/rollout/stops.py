"""Stop strings: texts that end a response, found alike by every rollout engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class StopStrings:
    """A response ends with the first token at which its text contains one of these.

    Args:
        texts: at least one, none of them empty.
        decode: from the token ids of rows to their texts, special tokens left out.
        special_ids: the tokens it leaves out.

    Raises:
        ValueError: there are no texts, or one is empty.
    """

    texts: tuple[str, ...]
    decode: Callable[[list[list[int]]], list[str]]
    special_ids: Set[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.texts or not all(self.texts):
            raise ValueError(f"stop strings must not be empty, got {list(self.texts)}")

    def cut(self, text: str) -> str:
        """The text before the first stop string in it."""
        found = [position for stop in self.texts if (position := text.find(stop)) >= 0]
        return text[: min(found)] if found else text

    def watch(self, num_rows: int) -> StopMatcher:
        """Reads along while this many responses are generated."""
        return StopMatcher(self, num_rows)


class StopMatcher:
    """Which of several responses have come to a stop string. Of each it keeps and decodes the last tokens only.

    They are enough: a token that is not special stands for at least one byte of a text. One token more, because some
    decoders strip the space before their first token, which may be that of a stop string.
    """

    def __init__(self, stops: StopStrings, num_rows: int) -> None:
        self._stops = stops
        longest = max(len(text.encode()) for text in stops.texts)
        self._tails: list[deque[int]] = [deque(maxlen=longest + 1) for _ in range(num_rows)]

    def ended(self, rows: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Whether the response of each of these rows ends with its next token.

        Args:
            rows: numbers of the rows, each once.
            tokens: the next token of each.
        """
        for row, token in zip(rows, tokens, strict=True):
            if token not in self._stops.special_ids:
                self._tails[row].append(token)
        texts = self._stops.decode([list(self._tails[row]) for row in rows])
        return [any(stop in text for stop in self._stops.texts) for text in texts]
