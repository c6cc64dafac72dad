"""Responses that are generated in several calls, each of which continues the responses of the previous call."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from rlhf.errors import InvalidRequest
from services.roles.columns import jagged_column, jagged_ids
from services.rollout.base import Generation
from services.runtime.worker import CallRows

COLUMNS = ("partial_ids", "partial_log_probs", "partial_versions")


@dataclass(frozen=True, eq=False)
class PartialResponses:
    """The tokens of responses so far, per row.

    Attributes:
        ids: Token ids, int64, in host memory.
        log_probs: Log-probability of each token under the distribution that it was drawn from, float32.
        versions: Policy version that generated each token, int64, in host memory.
    """

    ids: Jagged[Tensor]
    log_probs: Jagged[Tensor]
    versions: Jagged[Tensor]

    @classmethod
    def of(cls, rows: CallRows) -> Self:
        """Returns the responses in the columns COLUMNS of a call; empty responses if the call has no such columns.

        Raises:
            InvalidRequest: Only some of the columns are given, or their rows have different lengths.
        """
        if not any(name in rows for name in COLUMNS):
            empty = [[] for _ in range(rows.count)]
            return cls(jagged_ids(empty), jagged_ids(empty, torch.float32), jagged_ids(empty))
        ids, log_probs, versions = (jagged_column(rows, name) for name in COLUMNS)
        for name, column in zip(COLUMNS[1:], (log_probs, versions), strict=True):
            if not (column.lengths == ids.lengths).all():
                raise InvalidRequest(f"columns 'partial_ids' and {name!r} have rows of different lengths")
        return cls(
            Jagged(ids.values.to("cpu", torch.int64), ids.lengths),
            log_probs,
            Jagged(versions.values.to("cpu", torch.int64), versions.lengths),
        )

    def unfinished(self, eos_ids: Set[int], most_tokens: int) -> list[int]:
        """Returns the indices of the rows that do not end with an end-of-sequence token and have fewer than
        `most_tokens` tokens.

        Raises:
            InvalidRequest: A response has more tokens, or two unfinished ones have different numbers of them.
        """
        rows = self.ids.tolist()
        if any(len(row) > most_tokens for row in rows):
            raise InvalidRequest(
                f"partial_ids: a response has more than sampling.max_new_tokens, {most_tokens}, tokens"
            )
        found = [
            number
            for number, row in enumerate(rows)
            if len(row) < most_tokens and not (row and row[-1] in eos_ids)
        ]
        if len({len(rows[number]) for number in found}) > 1:
            raise InvalidRequest("partial_ids: unfinished responses have different numbers of tokens")
        return found

    def prompts(self, prompts: Sequence[list[int]], numbers: Sequence[int]) -> list[list[int]]:
        """Returns the prompts of the rows `numbers` with the tokens of their responses so far."""
        rows = self.ids.tolist()
        return [[*prompts[number], *rows[number]] for number in numbers]

    def extended(self, numbers: Sequence[int], generation: Generation, version: int) -> PartialResponses:
        """Returns the responses with what the weights of `version` have generated for the rows `numbers`."""
        new = generation.responses
        versions = Jagged(torch.full((len(new.values),), version, dtype=torch.int64), new.lengths)
        return PartialResponses(
            extended(self.ids, numbers, new),
            extended(self.log_probs, numbers, generation.log_probs),
            extended(self.versions, numbers, versions),
        )


def extended(column: Jagged[Tensor], numbers: Sequence[int], new: Jagged[Tensor]) -> Jagged[Tensor]:
    """Returns a column with the rows of `new` appended to its rows `numbers`, on the device of `new`."""
    rows = list(column.values.to(new.values.device).split(column.lengths.tolist()))
    lengths = column.lengths.copy()
    for number, more in zip(numbers, new.values.split(new.lengths.tolist()), strict=True):
        rows[number] = torch.cat((rows[number], more))
        lengths[number] += len(more)
    return Jagged(torch.cat(rows), lengths)
