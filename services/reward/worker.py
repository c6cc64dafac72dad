"""The reward: scores by a function, a sequence-classification model or the code grader. Only the model needs torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.errors import InvalidRequest
from rlhf.v1 import reward_pb2, worker_pb2
from services.reward.functions import find_function, score_range, score_row, truth_reader
from services.reward.judge import JudgeScorer
from services.reward.processes import ProcessScorer
from services.reward.sandbox.scorer import SandboxScorer
from services.reward.scorers.base import Scorer, gave_up_metrics, score_request
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, CallRows, Worker, register
from settings.reward import RewardTable
from settings.service import ServiceTable

DOES_NOT_LEARN = "this reward does not learn: it takes kind model and an optimizer table"


class FunctionScorer(Scorer):
    """Calls a function once per row; a row on which it fails carries the error."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._name = name
        self._function = find_function(name, options)
        self.score_range = score_range(name)

    def kind(self) -> str:
        return f"function {self._name}"

    def score_texts(self, rows: Sequence[reward_pb2.TextRow], call: CallContext) -> list[reward_pb2.RowScore]:
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
    """The scorer that a table asks for."""
    if table.kind == "model":
        # Only a model needs torch.
        from services.reward.model import ModelScorer

        return ModelScorer(table)
    if table.kind == "sandbox":
        return SandboxScorer(table.sandbox)
    if table.kind == "judge":
        return JudgeScorer(table.judge)
    if table.processes or truth_reader(table.function):
        processes = table.processes or len(os.sched_getaffinity(0))
        return ProcessScorer(table.function, table.options, processes, table.row_timeout_s)
    return FunctionScorer(table.function, table.options)


class RewardWorker(Worker):
    """A reward or cost."""

    role = "reward"

    def __init__(self, table: RewardTable, ranks: Ranks) -> None:
        super().__init__(table, ranks)
        self.scorer = make_scorer(table)

    @classmethod
    def uses_torch(cls, table: ServiceTable) -> bool:
        return isinstance(table, RewardTable) and table.kind == "model"

    def prepare_thread(self) -> None:
        if self.uses_torch(self.table):
            import torch

            torch.set_num_threads(self.table.threads)

    def close(self) -> None:
        self.scorer.close()

    def describe(self) -> worker_pb2.DescribeResponse:
        answer = super().describe()
        answer.input_form = self.scorer.input_form
        answer.vocabulary_hash = self.scorer.vocabulary_hash
        answer.engine = self.scorer.kind()
        if self.uses_torch(self.table):
            import torch

            answer.torch, answer.cpu_capability = torch.__version__, torch.backends.cpu.get_cpu_capability()
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
