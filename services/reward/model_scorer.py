"""Scores of a sequence-classification model: the texts that it reads, and a model that is whole in this process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlhf.errors import ConfigError
from rlhf.v1 import reward_pb2, worker_pb2
from services.engines.base import HeldTensor
from services.engines.implementation import compute_dtype
from services.models.families import load_scoring_model
from services.models.sequence_scorer import SequenceScorer
from services.models.tokenizers import vocabulary_hash
from services.reward.scorers.base import Scorer, row_score
from services.roles.columns import jagged_column
from services.roles.device import rank_device
from services.roles.micro_batching import check_token_ids
from services.roles.tokenization import CHARACTERS_PER_TOKEN, MAX_CHARACTERS, tokenize_texts, unknown_token
from services.runtime.worker import CallContext, CallRows
from settings.reward import RewardTable


class SequenceModelScorer(Scorer):
    """Base class of scorers by a Hugging Face sequence-classification model, which reads text through a tokenizer of
    its own, or the actor's token ids (`input = "tensor"`).

    Args:
        table: Config of the service.
        tokenizer: Tokenizer of the model.
        max_tokens: Most tokens of a row.
        vocab_size: Number of embeddings of the model.
    """

    def __init__(self, table: RewardTable, tokenizer: Any, max_tokens: int, vocab_size: int) -> None:
        self._tokenizer, self._max_tokens, self._vocab_size = tokenizer, max_tokens, vocab_size
        self._max_characters = max(MAX_CHARACTERS, CHARACTERS_PER_TOKEN * max_tokens)
        if table.input == "tensor":
            self.input_form = worker_pb2.INPUT_FORM_TENSOR
            self.vocabulary_hash = vocabulary_hash(tokenizer)

    @abstractmethod
    def score_sequences(self, rows: list[list[int]], call: CallContext) -> list[float]:
        """Returns the score of each row of token ids, from 1 to `max_tokens` of them."""

    def kind(self) -> str:
        return "model"

    def score_texts(self, rows: Sequence[reward_pb2.TextRow], call: CallContext) -> list[reward_pb2.RowScore]:
        """Scores prompt and response of each row as one text. Nothing is truncated: a row with too many characters, or
        with too many or no tokens, gets an error instead of a score. Raises as `Scorer.score_texts`."""
        if self.input_form == worker_pb2.INPUT_FORM_TENSOR:
            return super().score_texts(rows, call)
        texts = [row.prompt + row.response for row in rows]
        faults = [
            f"the row has {len(text)} characters; at most {self._max_characters} are tokenized"
            if len(text) > self._max_characters
            else ""
            for text in texts
        ]
        ids = tokenize_texts(
            self._tokenizer,
            ["" if fault else text for text, fault in zip(texts, faults, strict=True)],
            call,
            max_tokens=self._max_tokens,
            progressed=lambda: call.progress(0, len(rows)),
        )
        unknown = [unknown_token(self._tokenizer, row, self._vocab_size) for row in ids]
        faults = [
            fault or (f"the row {token}" if token else "")
            for fault, token in zip(faults, unknown, strict=True)
        ]
        return self._scores(ids, faults, call)

    def score_tokens(self, rows: CallRows, call: CallContext) -> list[reward_pb2.RowScore]:
        """Scores prompt and response of each row. Raises InvalidRequest also for a token id that the model has no
        embedding of; otherwise as `Scorer.score_tokens`."""
        if self.input_form == worker_pb2.INPUT_FORM_TEXT:
            return super().score_tokens(rows, call)
        prompts, responses = self._id_rows(rows, "prompt_ids"), self._id_rows(rows, "response_ids")
        ids = [p + r for p, r in zip(prompts, responses, strict=True)]
        return self._scores(ids, [""] * len(ids), call)

    def _id_rows(self, rows: CallRows, name: str) -> list[list[int]]:
        """Returns a column of token ids as one list per row. Raises InvalidRequest as `jagged_column` does, and for ids
        out of range."""
        column = jagged_column(rows, name)
        check_token_ids(column.values, self._vocab_size)
        return column.tolist()

    def _scores(
        self, rows: list[list[int]], faults: list[str], call: CallContext
    ) -> list[reward_pb2.RowScore]:
        """Scores rows of token ids. A row with a fault (a non-empty text in `faults`), or with too many or no tokens,
        gets an error instead of a score."""
        faults = [fault or self._fault(len(ids)) for ids, fault in zip(rows, faults, strict=True)]
        readable = [ids for ids, fault in zip(rows, faults, strict=True) if not fault]
        scores = iter(self.score_sequences(readable, call))
        return [reward_pb2.RowScore(error=fault) if fault else row_score(next(scores)) for fault in faults]

    def _fault(self, num_tokens: int) -> str:
        if 0 < num_tokens <= self._max_tokens:
            return ""
        return (
            f"the row has {num_tokens} tokens; the reward model reads from 1 to {self._max_tokens}, as "
            "micro_batch_tokens and the positions of the model allow"
        )


class ModelScorer(SequenceModelScorer):
    """Scores rows by a model that is whole on this rank.

    Args:
        table: Config of the service.
        load: Function that loads the model from its directory.

    Raises:
        ConfigError: The table names no model, or one that cannot be loaded.
    """

    def __init__(self, table: RewardTable, load: Callable[..., Any] = load_scoring_model) -> None:
        if table.model is None:
            raise ConfigError("model: a reward of kind model needs the directory of one")
        try:
            scorer = SequenceScorer(
                table.model,
                token_budget=table.micro_batch_tokens,
                dtype=compute_dtype(table),
                device=rank_device(),
                load=load,
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: {error}") from error
        super().__init__(table, scorer.tokenizer, scorer.max_tokens, scorer.vocab_size)
        self._scorer = scorer
        self.stage_weights, self.load_weights = scorer.stage_weights, scorer.load_weights

    def held(self, *, learns: bool) -> Iterator[HeldTensor]:
        """Yields the tensors of the model; `learns` says whether updates change them."""
        for name, tensor in self._scorer.model.state_dict().items():
            yield HeldTensor(f"scorer.{name}", "whole", tensor, learns)

    def score_sequences(self, rows: list[list[int]], call: CallContext) -> list[float]:
        call.check()

        def scored(num_rows: int) -> None:
            call.progress(num_rows, len(rows))
            call.check()

        return self._scorer.score_tokens(rows, scored).tolist()
