"""Tokenizes texts in groups of bounded size, so that a call can be stopped between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf.errors import InvalidRequest
from services.runtime.worker import CallContext

MAX_CHARACTERS = 1 << 18
CHARACTERS_PER_TOKEN = 16
"""Longest text, whatever the model, and per token that the model can read. A tokenizer takes seconds for a text of this
length without spaces, and cannot be interrupted."""

LONG_CHARACTERS = 1 << 14
"""Texts from this length on are tokenized one by one."""

TEXTS_PER_GROUP = 64


def tokenize_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    call: CallContext,
    *,
    max_tokens: int,
    progressed: Callable[[], None] = lambda: None,
    **options: Any,
) -> list[list[int]]:
    """Token ids of each text.

    Args:
        max_tokens: Tokens of the longest row that the model can read; bounds the characters of a text.
        progressed: Called after each group of texts.
        options: Passed on to the tokenizer.

    Raises:
        InvalidRequest: A text has more characters than the bound.
        CallCancelled, DeadlineExceeded: The call stopped between two groups.
    """
    longest = max(map(len, texts), default=0)
    most = max(MAX_CHARACTERS, CHARACTERS_PER_TOKEN * max_tokens)
    if longest > most:
        raise InvalidRequest(f"a text has {longest} characters; at most {most} are tokenized")
    group = TEXTS_PER_GROUP if longest < LONG_CHARACTERS else 1
    ids: list[list[int]] = []
    for first in range(0, len(texts), group):
        call.check()
        ids += tokenizer(list(texts[first : first + group]), **options)["input_ids"]
        progressed()
    return ids
