"""The reward: scores by a Python function or a sequence-classification model. A function needs no torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from google.protobuf import json_format

from nccl_transfer.columns import Jagged
from rlhf.config import RewardTable, ServiceTable
from rlhf.errors import ConfigError, InvalidRequest
from rlhf.v1 import reward_pb2, worker_pb2
from services.ranks import Ranks
from services.reward.functions import find_function
from services.worker import CallContext, Result, Rows, Worker, register


class Scorer(ABC):
    """Scores rows of one input form.

    Attributes:
        input_form: What Describe says of it.
        vocabulary_hash: Of the tokenizer whose ids it reads; empty for text.
    """

    input_form = worker_pb2.INPUT_FORM_TEXT
    vocabulary_hash = ""

    def score_texts(self, rows: Sequence[reward_pb2.TextRow], call: CallContext) -> list[reward_pb2.RowScore]:
        """One verdict per text row."""
        raise InvalidRequest("this reward reads token ids: send a batch with prompt_ids and response_ids")

    def score_tokens(self, rows: Rows, call: CallContext) -> list[reward_pb2.RowScore]:
        """One verdict per row of "prompt_ids" and "response_ids"."""
        raise InvalidRequest("this reward reads text: send text_rows")

    @abstractmethod
    def kind(self) -> str:
        """What Describe calls it."""


class FunctionScorer(Scorer):
    """Calls a function once per row; a row on which it fails carries the error."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._function = find_function(name)

    def kind(self) -> str:
        return f"function {self._name}"

    def score_texts(self, rows: Sequence[reward_pb2.TextRow], call: CallContext) -> list[reward_pb2.RowScore]:
        scores = []
        for done, row in enumerate(rows):
            call.check()
            scores.append(self._score(row))
            call.progress(done + 1, len(rows))
        return scores

    def _score(self, row: reward_pb2.TextRow) -> reward_pb2.RowScore:
        metadata = json_format.MessageToDict(row.metadata)
        try:
            verdict = self._function(row.prompt, row.response, row.ground_truth, metadata)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything; the row carries it
            return reward_pb2.RowScore(error=f"{self._name} raised {type(error).__name__}: {error}")
        return row_score(verdict)


class ModelScorer(Scorer):
    """A Hugging Face sequence-classification model, with a tokenizer of its own or over the actor's ids."""

    def __init__(self, table: RewardTable) -> None:
        import torch

        from services.models import SequenceScorer, vocabulary_hash

        if table.model is None:
            raise ConfigError("model: a reward of kind model needs the directory of one")
        torch.set_num_threads(table.threads)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self._scorer = SequenceScorer(table.model, token_budget=table.micro_batch_tokens, device=device)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: {error}") from error
        if table.input == "tensor":
            self.input_form = worker_pb2.INPUT_FORM_TENSOR
            self.vocabulary_hash = vocabulary_hash(self._scorer.tokenizer)

    def kind(self) -> str:
        return "model"

    def score_texts(self, rows: Sequence[reward_pb2.TextRow], call: CallContext) -> list[reward_pb2.RowScore]:
        if self.input_form == worker_pb2.INPUT_FORM_TENSOR:
            return super().score_texts(rows, call)
        return self._scores(
            lambda: self._scorer.score_texts([row.prompt + row.response for row in rows]), len(rows)
        )

    def score_tokens(self, rows: Rows, call: CallContext) -> list[reward_pb2.RowScore]:
        if self.input_form == worker_pb2.INPUT_FORM_TEXT:
            return super().score_tokens(rows, call)
        prompts, responses = _id_rows(rows, "prompt_ids"), _id_rows(rows, "response_ids")
        sequences = [p + r for p, r in zip(prompts, responses, strict=True)]
        return self._scores(lambda: self._scorer.score_tokens(sequences), len(sequences))

    def _scores(self, score: Callable, rows: int) -> list[reward_pb2.RowScore]:
        try:
            return [row_score(value) for value in score().tolist()] if rows else []
        except ValueError as error:
            raise InvalidRequest(str(error)) from error


def _id_rows(rows: Rows, name: str) -> list[list[int]]:
    column = rows[name]
    if not isinstance(column, Jagged):
        raise InvalidRequest(f"column {name!r} is not jagged")
    return [column.row(row).tolist() for row in range(column.rows)]


def row_score(verdict: object) -> reward_pb2.RowScore:
    """A verdict as a message: a finite number, a sequence of them, or else an error."""
    if isinstance(verdict, str | bytes):
        return reward_pb2.RowScore(error=f"score is text: {verdict!r}")
    try:
        values = [float(x) for x in verdict] if isinstance(verdict, Sequence) else [float(verdict)]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return reward_pb2.RowScore(error=f"score is not a number: {verdict!r}")
    if not all(map(math.isfinite, values)):
        return reward_pb2.RowScore(error=f"score is not finite: {verdict!r}")
    if isinstance(verdict, Sequence):
        return reward_pb2.RowScore(token_scores=reward_pb2.TokenScores(scores=values))
    return reward_pb2.RowScore(score=values[0])


class RewardWorker(Worker):
    """A reward or cost."""

    role = "reward"

    def __init__(self, table: RewardTable, ranks: Ranks) -> None:
        super().__init__(table, ranks)
        self.scorer = ModelScorer(table) if table.kind == "model" else FunctionScorer(table.function)

    @classmethod
    def uses_torch(cls, table: ServiceTable) -> bool:
        return isinstance(table, RewardTable) and table.kind == "model"

    def prepare_thread(self) -> None:
        if self.uses_torch(self.table):
            import torch

            torch.set_num_threads(self.table.threads)

    def describe(self) -> worker_pb2.DescribeResponse:
        answer = super().describe()
        answer.input_form = self.scorer.input_form
        answer.vocabulary_hash = self.scorer.vocabulary_hash
        answer.engine = self.scorer.kind()
        return answer

    @register("DP_PROTO", collective=False)
    def compute_reward(
        self, rows: Rows, request: reward_pb2.ComputeRewardRequest, call: CallContext
    ) -> Result:
        if not request.HasField("batch"):
            return Result(fields={"scores": self.scorer.score_texts(request.text_rows, call)})
        if request.text_rows:
            raise InvalidRequest("compute_reward: give text_rows or a batch, not both")
        return Result(fields={"scores": self.scorer.score_tokens(rows, call)})
