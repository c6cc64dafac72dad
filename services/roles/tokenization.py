"""Tokenizes texts in groups, so that a call can be stopped between two groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf.errors import InvalidRequest
from services.models.tokenizers import adds_bos
from services.runtime.worker import CallContext

MAX_CHARACTERS = 1 << 18
CHARACTERS_PER_TOKEN = 16
"""A text may have MAX_CHARACTERS, or CHARACTERS_PER_TOKEN times the tokens that the model can read if that is more. A
tokenizer takes seconds for a text of MAX_CHARACTERS without spaces, and cannot be interrupted."""

LONG_CHARACTERS = 1 << 14
"""If a text of a call has at least this many characters, the call's texts are tokenized one by one."""

TEXTS_PER_GROUP = 64


def tokenize_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    call: CallContext,
    *,
    max_tokens: int,
    vocab_size: int | None = None,
    progressed: Callable[[], None] = lambda: None,
    **options: Any,
) -> list[list[int]]:
    """Returns the token ids of each text. One that begins with the BOS token which the tokenizer adds has it once.

    Args:
        tokenizer: Tokenizer of the model.
        texts: Texts to tokenize.
        call: The call, which may be stopped between two groups of texts.
        max_tokens: Most tokens of a row that the model can read. A text may have CHARACTERS_PER_TOKEN times as many
            characters, or MAX_CHARACTERS if that is more.
        vocab_size: Number of embeddings of the model. Default: ids are not checked.
        progressed: Called after each group of texts.
        options: Keyword arguments of the tokenizer's `__call__`.

    Raises:
        InvalidRequest: A text has more characters than the limit, or a token that is not below `vocab_size`.
        CallCancelled, DeadlineExceeded: The call was stopped between two groups.
    """
    longest = max(map(len, texts), default=0)
    most = max(MAX_CHARACTERS, CHARACTERS_PER_TOKEN * max_tokens)
    if longest > most:
        raise InvalidRequest(f"a text has {longest} characters; at most {most} are tokenized")
    group = TEXTS_PER_GROUP if longest < LONG_CHARACTERS else 1
    is_special = options.get("add_special_tokens", True)
    ids: list[list[int]] = []
    for first in range(0, len(texts), group):
        call.check()
        found: Any = tokenizer(list(texts[first : first + group]), **options)["input_ids"]
        ids += [row[1:] if is_special and _has_two_bos(tokenizer, row) else row for row in found]
        if vocab_size is not None:
            for row in ids[first:]:
                if fault := unknown_token(tokenizer, row, vocab_size):
                    raise InvalidRequest(f"a text {fault}")
        progressed()
    return ids


def _has_two_bos(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> bool:
    """Whether token ids begin with the BOS token that the tokenizer adds, and with that of the text."""
    return len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id and adds_bos(tokenizer)


def unknown_token(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], vocab_size: int) -> str:
    """Returns a clause that names a token of `ids` without an embedding among the `vocab_size` of the model; empty if
    all tokens have one."""
    largest = max(ids, default=0)
    if largest < vocab_size:
        return ""
    token = tokenizer.convert_ids_to_tokens(largest)
    return f"contains the token {token!r}, whose id {largest} is beyond the model's {vocab_size} embeddings"
