"""Workers of rewards that need no torch: a Python function, the code grader, an LLM judge, or an HTTP endpoint."""

from __future__ import annotations

import os
from collections.abc import Callable

from rlhf.errors import InvalidRequest
from rlhf.v1 import reward_pb2, worker_pb2
from services.reward.function_scorer import AsyncFunctionScorer, FunctionScorer
from services.reward.functions import is_awaited, truth_reader
from services.reward.judge import JudgeScorer
from services.reward.processes import ProcessScorer
from services.reward.remote import RemoteScorer
from services.reward.sandbox.scorer import SandboxScorer
from services.reward.scorers.base import Scorer, score_request
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, CallRows, Worker, register
from settings.reward import RewardTable

DOES_NOT_LEARN = "this reward does not learn: it takes kind model and an optimizer table"


def make_scorer(table: RewardTable) -> Scorer:
    """Creates the scorer of a config whose kind is "sandbox", "judge", "http" or "function". A function runs in
    processes of its own if the config sets `processes` or the function is a verifier; else in this process."""
    if table.kind == "sandbox":
        return SandboxScorer(table.sandbox)
    if table.kind == "judge":
        return JudgeScorer(table.judge)
    if table.kind == "http":
        return RemoteScorer(table.http)
    if table.processes or truth_reader(table.function):
        processes = table.processes or len(os.sched_getaffinity(0))
        return ProcessScorer(table.function, table.options, processes, table.row_timeout_s)
    if is_awaited(table.function):
        return AsyncFunctionScorer(table.function, table.options, table.concurrency, table.row_timeout_s)
    return FunctionScorer(table.function, table.options)


class RewardWorker(Worker):
    """Worker of a reward or cost that needs no torch, and base class of `ModelRewardWorker`.

    Args:
        table: Config of the service.
        ranks: Ranks of the service.
        make: Creates the scorer from the config. Default: `make_scorer`.
    """

    role = "reward"
    is_frozen = True

    def __init__(
        self, table: RewardTable, ranks: Ranks, make: Callable[[RewardTable], Scorer] = make_scorer
    ) -> None:
        super().__init__(table, ranks)
        self.scorer = make(table)

    def close(self) -> None:
        self.scorer.close()

    def describe(self) -> worker_pb2.DescribeResponse:
        answer = super().describe()
        answer.input_form = self.scorer.input_form
        answer.vocabulary_hash = self.scorer.vocabulary_hash
        answer.engine = self.scorer.kind()
        answer.scores_groups = self.scorer.scores_groups
        if self.scorer.score_range:
            lowest, highest = self.scorer.score_range
            answer.score_range.CopyFrom(worker_pb2.ScoreRange(lowest=lowest, highest=highest))
        return answer

    @register("DP_PROTO", collective=False)
    def compute_reward(
        self, rows: CallRows, request: reward_pb2.ComputeRewardRequest, call: CallContext
    ) -> CallResult:
        return score_request(self.scorer, rows, request, call)

    @register("DP_PROTO", collective=False)
    def compare_pairs(
        self, rows: CallRows, request: reward_pb2.ComparePairsRequest, call: CallContext
    ) -> CallResult:
        raise InvalidRequest(DOES_NOT_LEARN)

    @register("DP_PROTO", collective=False)
    def update_reward(
        self, rows: CallRows, request: reward_pb2.UpdateRewardRequest, call: CallContext
    ) -> CallResult:
        raise InvalidRequest(DOES_NOT_LEARN)
