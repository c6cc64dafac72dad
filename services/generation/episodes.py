"""Multi-turn episodes: a turn continues the previous tokens, unchanged, followed by the tokens that the environment
added."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from rlhf.errors import InvalidRequest
from services.compute.jagged_rows import counts
from services.generation.partial import extended
from services.roles.columns import jagged_column, jagged_ids
from services.rollout.base import Generation
from services.runtime.worker import CallRows

COLUMNS = ("partial_ids", "partial_mask", "partial_log_probs", "observation")
MASK_DTYPE = torch.uint8


@dataclass(frozen=True, eq=False)
class Episodes:
    """The responses of episodes so far, of which some go on.

    Attributes:
        ids: Token ids of each response, observations included.
        mask: Whether each of these tokens was sampled.
        log_probs: Log-probability of each sampled token under the distribution that it was drawn from, float32.
        going: Indices of the rows that go on, ascending.
        begun: Tokens of each response before what this turn generates.
        ends: Why each turn ended; empty for a response without room for a turn, or before it is generated; or why the
            observation of the response cannot be added.
    """

    ids: list[list[int]]
    mask: list[list[bool]]
    log_probs: Jagged[Tensor]
    going: list[int]
    begun: list[int]
    ends: list[str]

    @classmethod
    def first(cls, num_rows: int) -> Self:
        """Returns empty responses, which all go on."""
        nothing = jagged_ids([[] for _ in range(num_rows)], torch.float32)
        rows = range(num_rows)
        return cls(
            [[] for _ in rows], [[] for _ in rows], nothing, list(rows), [0] * num_rows, [""] * num_rows
        )

    @classmethod
    def of(
        cls,
        rows: CallRows,
        observations: Sequence[list[int]],
        faults: Sequence[str],
        eos_ids: Set[int],
        *,
        max_new_tokens: int,
        max_response_tokens: int,
    ) -> Self:
        """Returns the responses in the columns COLUMNS of a call. Those whose observation can be added, and that have
        room for it and `max_new_tokens` further tokens within `max_response_tokens`, have it added and go on; the
        others stay as they are.

        Args:
            rows: Rows of the call.
            observations: Token ids of column "observation".
            faults: Why each of them cannot be added; empty where it can.
            eos_ids: End-of-sequence tokens. One that ends a response and begins its observation is not added again.

        Raises:
            InvalidRequest: A column is missing, or columns have rows of different lengths.
        """
        ids, mask, log_probs = (jagged_column(rows, name) for name in COLUMNS[:3])
        mask = Jagged(mask.values.cpu() != 0, mask.lengths)
        for name, given, wanted in (
            ("partial_mask", mask.lengths, ids.lengths),
            ("partial_log_probs", log_probs.lengths, counts(mask)),
        ):
            if not np.array_equal(given, wanted):
                raise InvalidRequest(f"column {name!r} does not fit 'partial_ids' and 'partial_mask'")
        found = cls(ids.tolist(), mask.tolist(), log_probs, [], [], list(faults))
        for row, observation in enumerate(observations):
            own = found.ids[row]
            repeats = bool(own) and own[-1] in eos_ids and observation[:1] == own[-1:]
            added = observation[repeats:]
            if not faults[row] and len(own) + len(added) + max_new_tokens <= max_response_tokens:
                own += added
                found.mask[row] += [False] * len(added)
                found.going.append(row)
                found.begun.append(len(own))
            else:
                found.begun.append(_last_turn(found.mask[row]))
        return found

    def prompts(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Returns what the model reads before the next turn of the rows that go on: prompt and response so far."""
        return [[*prompts[row], *self.ids[row]] for row in self.going]

    def extended(self, generation: Generation) -> Episodes:
        """Returns the responses with what was generated for those that go on."""
        ids, mask, ends = [*self.ids], [*self.mask], [*self.ends]
        generated = zip(self.going, generation.responses.tolist(), generation.finish_reasons, strict=True)
        for row, new, reason in generated:
            ids[row], mask[row], ends[row] = [*ids[row], *new], [*mask[row], *[True] * len(new)], reason
        log_probs = extended(self.log_probs, self.going, generation.log_probs)
        return replace(self, ids=ids, mask=mask, log_probs=log_probs, ends=ends)

    def mask_column(self) -> Jagged[Tensor]:
        """Returns column "response_mask"."""
        return jagged_ids([list(map(int, row)) for row in self.mask], MASK_DTYPE)


def _last_turn(mask: Sequence[bool]) -> int:
    """Returns the index at which the last turn of a response begins, that after the last token of an environment."""
    return next((place for place in range(len(mask), 0, -1) if not mask[place - 1]), 0)
