"""Worker of role `novelty`, which counts n-grams of responses in a hash table (Tang et al. 2017, arXiv 1611.04717)."""

from __future__ import annotations

from typing import Any

import numpy as np

from nccl_transfer.refs.columns import Jagged
from rlhf.errors import InvalidRequest
from rlhf_example.novelty.table import NoveltyTable
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, CallRows, Worker, register

BITS = 16
"""The table has 2^16 counts; n-grams with equal hashes share one."""
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def places(response: np.ndarray, ngram: int) -> np.ndarray:
    """Returns the place in the table of each n-gram of a response; of a shorter response, that of the whole."""
    size = min(ngram, len(response))
    if not size:
        return np.empty(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(response.astype(np.uint64) + np.uint64(1), size)
    hashes = windows @ MULTIPLIER ** np.arange(1, size + 1, dtype=np.uint64)
    return ((hashes * MULTIPLIER) >> np.uint64(64 - BITS)).astype(np.int64)


class NoveltyWorker(Worker):
    """Scores and counts the rows of this rank. All ranks add up what they counted, so their number changes no score."""

    role = "rlhf_example.roles:novelty"

    def __init__(self, table: NoveltyTable, ranks: Ranks) -> None:
        super().__init__(table, ranks)
        self._ngram = table.ngram
        self._counts = np.zeros(1 << BITS, np.int64)

    @register("ONE_TO_ALL", collective=False)
    def begin_session(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        if not request.keep_weights:  # the state of a session is what weights are to other roles
            self._counts[:] = 0
        return super().begin_session(rows, request, call)

    @register("DP_PROTO")
    def compute_novelty(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        found, novelty = np.zeros_like(self._counts), np.zeros(rows.count, np.float32)
        # An error in the rows of one rank fails the call on all of them here, before any count has changed.
        with self.ranks.together(call.peers_deadline):
            responses = rows["response_ids"]
            if not isinstance(responses, Jagged):
                raise InvalidRequest("column 'response_ids' is not jagged")
            for row in range(rows.count):
                call.check()
                at = places(responses.row(row), self._ngram)
                np.add.at(found, at, 1)
                novelty[row] = np.mean(1 / np.sqrt(1 + self._counts[at])) if len(at) else 0
                call.progress(row + 1, rows.count)
            rows.fetched.verify()
        if self.ranks.size > 1:
            import torch  # ranks of a service with several have it, see ServiceTable.needs_torch

            torch.distributed.all_reduce(torch.from_numpy(found))
        self._counts += found
        return CallResult({"novelty": novelty}, {"mean": (float(novelty.sum()), rows.count)}, verified=True)
