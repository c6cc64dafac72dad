"""Workers of rewards that need no torch: a Python function, the code grader, or an LLM judge."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf.errors import InvalidRequest
from rlhf.v1 import reward_pb2, worker_pb2
from services.reward.functions import (
    find_function,
    is_over_groups,
    score_group,
    score_range,
    score_row,
    truth_reader,
)
from services.reward.groups import groups_of, in_row_order
from services.reward.judge import JudgeScorer
from services.reward.processes import ProcessScorer
from services.reward.sandbox.scorer import SandboxScorer
from services.reward.scorers.base import Scorer, gave_up_metrics, score_request
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, CallRows, Worker, register
from settings.reward import RewardTable

DOES_NOT_LEARN = "this reward does not learn: it takes kind model and an optimizer table"


class FunctionScorer(Scorer):
    """Scores rows by a function that runs in this process, once per row or group. Its exceptions become the rows'
    errors.

    Args:
        name: Name of the function, as taken by `find_function`.
        options: Keyword arguments of every call.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._name = name
        self._function = find_function(name, options)
        self.score_range = score_range(name)
        self.scores_groups = is_over_groups(name)

    def kind(self) -> str:
        return f"function {self._name}"

    def score_texts(self, rows: Sequence[reward_pb2.TextRow], call: CallContext) -> list[reward_pb2.RowScore]:
        return self._score_groups(rows, call) if self.scores_groups else self._score_rows(rows, call)

    def _score_groups(
        self, rows: Sequence[reward_pb2.TextRow], call: CallContext
    ) -> list[reward_pb2.RowScore]:
        groups, scores = groups_of(rows), []
        for group in groups:
            call.check()
            scores.append(score_group(self._name, self._function, [rows[index] for index in group]))
            call.progress(len(scores), len(groups))
        return in_row_order(groups, scores)

    def _score_rows(self, rows: Sequence[reward_pb2.TextRow], call: CallContext) -> list[reward_pb2.RowScore]:
        scores, causes = [], Counter[str]()
        for done, row in enumerate(rows):
            call.check()
            score, cause = score_row(self._name, self._function, row)
            scores.append(score)
            causes[cause] += 1
            call.progress(done + 1, len(rows))
        self.metrics = gave_up_metrics(causes, len(rows)) if any(causes) else {}
        return scores


def make_scorer(table: RewardTable) -> Scorer:
    """Creates the scorer of a config whose kind is "sandbox", "judge" or "function". A function runs in processes of
    its own if the config sets `processes` or the function is a verifier; else in this process."""
    if table.kind == "sandbox":
        return SandboxScorer(table.sandbox)
    if table.kind == "judge":
        return JudgeScorer(table.judge)
    if table.processes or truth_reader(table.function):
        processes = table.processes or len(os.sched_getaffinity(0))
        return ProcessScorer(table.function, table.options, processes, table.row_timeout_s)
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
