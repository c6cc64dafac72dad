"""Draws rows in the order of a `Loader` and leaves out those that are too long; computes the limits on their
length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from controller.config.config import Config
from controller.data.chat import Chat
from controller.data.loader import Loader, NothingKept
from rlhf.errors import ConfigError
from rlhf.v1 import worker_pb2

T = TypeVar("T", covariant=True)

NUM_SAMPLED = 1000
"""Maximum number of rows in the sample whose tokens are counted at the start of a run, and in a batch of token
counts."""


class Data(Protocol[T]):
    """Protocol of data whose rows are read one by one; `where` returns the place of a row, for messages."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> T: ...

    def where(self, row: int) -> str: ...


@dataclass(frozen=True)
class Limit:
    """Limit on the length of a text.

    Attributes:
        tokens: Maximum number of tokens.
        why: Origin of the limit, for messages.
        count: Function that returns the number of tokens of each text.
        refuses: Whether a longer text is an error. False: its row is left out.
    """

    tokens: int
    why: str
    count: Callable[[Sequence[str]], Sequence[int]]
    refuses: bool = False

    def fits(self, texts: Sequence[str], where: Callable[[int], str]) -> np.ndarray:
        """Returns for each text whether it is within the limit [n] bool.

        Args:
            texts: The texts.
            where: Function that returns the place of a text by its index, for messages.

        Raises:
            ConfigError: A text is longer than the limit, and `refuses` is True.
        """
        lengths = np.asarray(self.count(texts), np.int64)
        fits = lengths <= self.tokens
        if self.refuses and not fits.all():
            first = int(np.argmin(fits))
            raise ConfigError(
                f"{where(first)}: {lengths[first]} tokens are more than the {self.tokens} of {self.why}; data.overlong "
                'is "error", and "skip" would leave the row out'
            )
        return fits


def draw(
    data: Data[T], loader: Loader, count: int, limit: Limit | None, text_of: Callable[[T], str]
) -> list[T]:
    """Draws and reads the next `count` rows whose text is within the limit.

    Args:
        data: The rows.
        loader: Determines the order of the rows, and advances.
        count: Number of rows to return.
        limit: Limit on the length of a row's text; None: any length.
        text_of: Function that returns the text of a row.

    Raises:
        ConfigError: A row cannot be read, all rows of a source are too long, or one is too long and `limit.refuses`
            is True.
    """
    if limit is None:
        return [data[int(row)] for row in loader.take(count)]
    found: dict[int, T] = {}

    def keeps(rows: np.ndarray) -> np.ndarray:
        kept = _read_fitting(data, rows, limit, text_of)
        found.update(kept)
        return np.isin(rows, list(kept))

    try:
        return [found[int(row)] for row in loader.take(count, keeps)]
    except NothingKept as error:
        raise ConfigError(f"{error}: more than the {limit.tokens} tokens of {limit.why}") from None


def rows_that_fit(data: Data[T], limit: Limit | None, text_of: Callable[[T], str]) -> np.ndarray:
    """Returns the numbers of all rows whose text is within the limit [n] int64, ascending; all rows without reading
    them where `limit` is None. Arguments are those of `draw`.

    Raises:
        ConfigError: A row cannot be read, all rows are too long, or one is too long and `limit.refuses` is True.
    """
    rows = np.arange(len(data))
    if limit is None:
        return rows
    parts = [rows[first : first + NUM_SAMPLED] for first in range(0, len(rows), NUM_SAMPLED)]
    kept = [row for part in parts for row in _read_fitting(data, part, limit, text_of)]
    if not kept:
        raise ConfigError(
            f"{data.where(0)}, and all rows after it: more than the {limit.tokens} tokens of {limit.why}"
        )
    return np.asarray(kept)


def overlong_share(data: Data[T], limit: Limit, text_of: Callable[[T], str]) -> tuple[int, int]:
    """Counts the tokens of a sample of at most `NUM_SAMPLED` rows. Returns the number of rows that are too long, and
    the size of the sample.

    Raises:
        ConfigError: A row cannot be read, or one is too long and `limit.refuses` is True.
    """
    rows = sample(data)
    return len(rows) - len(_read_fitting(data, rows, limit, text_of)), len(rows)


def longest_prompt(config: Config, data: Sequence[Data[Any]]) -> int:
    """Estimates the length of the longest prompt, in tokens: data.max_prompt_tokens, or, without it, the longest of a
    sample of each of `data`; 0 where tokens cannot be counted."""
    if config.data.max_prompt_tokens:
        return config.data.max_prompt_tokens
    try:
        count = counter(config)
    except ConfigError:
        return 0
    return max(max(count([rows[int(row)].text for row in sample(rows)])) for rows in data)


def prompt_limit(config: Config, services: Mapping[str, worker_pb2.DescribeResponse]) -> Limit | None:
    """Returns the limit on the length of prompts: the smallest of data.max_prompt_tokens and, for each service, its
    limit on prompt and response together minus rollout.max_response_tokens. None where there is no limit, or where
    tokens cannot be counted and no key (see Raises) needs their number.

    Args:
        config: Configuration of the run.
        services: Descriptions of the services that read token ids, by name.

    Raises:
        ConfigError: Tokens cannot be counted, and data.max_prompt_tokens or data.overlong "error" needs their number.
    """
    response = config.rollout.max_response_tokens
    limits = [
        (most - response, f"services.{name}, {most} less rollout.max_response_tokens")
        for name, most in _longest(config, services).items()
    ]
    if config.data.max_prompt_tokens:
        limits.append((config.data.max_prompt_tokens, "data.max_prompt_tokens"))
    return _limit(config, limits, "data.max_prompt_tokens" if config.data.max_prompt_tokens else "")


def text_limit(config: Config, services: Mapping[str, worker_pb2.DescribeResponse]) -> Limit | None:
    """Returns the limit on the length of the texts of data.pretrain: the smallest limit of an actor, less 1 for the EOS
    token that it appends. None where no actor has a limit, or where tokens cannot be counted and data.overlong is
    "skip"; raises ConfigError where they cannot be counted and it is "error"."""
    actors = {name: each for name, each in services.items() if config.services[name].role == "actor"}
    longest = _longest(config, actors).items()
    return _limit(config, [(most - 1, f"services.{name}, {most} less an end") for name, most in longest])


def _longest(config: Config, services: Mapping[str, worker_pb2.DescribeResponse]) -> dict[str, int]:
    """Returns the limits on the tokens of a prompt and its response together: that of a service's description by
    "SERVICE", and those of its table in the config by "SERVICE.KEY"."""
    found = {name: each.max_tokens for name, each in services.items() if each.max_tokens}
    for name in services:
        found |= {f"{name}.{key}": most for key, most in config.services[name].row_limits.items()}
    return found


def _limit(config: Config, limits: Sequence[tuple[int, str]], asked_by: str = "") -> Limit | None:
    """Returns the smallest of `limits` as a `Limit`; None where there is none, or where tokens cannot be counted and no
    key needs their number.

    Args:
        config: Configuration of the run.
        limits: Numbers of tokens, each with its origin for messages.
        asked_by: Config key that needs the number of tokens; empty: none, unless data.overlong is "error".

    Raises:
        ConfigError: Tokens cannot be counted, and a key needs their number.
    """
    if not limits:
        return None
    refuses = config.data.overlong == "error"
    asked_by = asked_by or ('data.overlong = "error"' if refuses else "")
    try:
        count = counter(config, asked_by)
    except ConfigError:
        if asked_by:
            raise
        return None
    tokens, why = min(limits)
    return Limit(tokens, why, count, refuses)


def counter(config: Config, asked_by: str = "") -> Callable[[Sequence[str]], list[int]]:
    """Returns the function that counts the tokens of texts, by the tokenizer of the config. `asked_by` is the config
    key that needs it, for the message of the error.

    Raises:
        ConfigError: No tokenizer is configured, or it cannot be read.
    """
    if config.tokenizer is None:
        raise ConfigError(f"{asked_by}: needs data.tokenizer, or a service with a model")
    chat = Chat(config.tokenizer)
    chat.count([""])
    return chat.count


def sample(data: Data[Any]) -> np.ndarray:
    """Returns the numbers of at most `NUM_SAMPLED` rows, evenly spaced over the data."""
    return np.unique(np.linspace(0, len(data) - 1, NUM_SAMPLED).astype(np.int64))


def _read_fitting(data: Data[T], rows: np.ndarray, limit: Limit, text_of: Callable[[T], str]) -> dict[int, T]:
    """Reads `rows` and returns those whose text is within the limit, by number. Raises ConfigError where a row cannot
    be read, or where a text is too long and `limit.refuses` is True."""
    read = [data[int(row)] for row in rows]
    fits = limit.fits([text_of(each) for each in read], lambda i: data.where(int(rows[i])))
    return {int(row): each for row, each, is_short in zip(rows, read, fits, strict=True) if is_short}
