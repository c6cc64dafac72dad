"""Rewards by a sequence-classification model: one that only scores, and one that learns from pairs too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from rlhf.config import ModelTable, RewardTable
from rlhf.errors import ConfigError, InvalidRequest
from rlhf.v1 import reward_pb2, worker_pb2
from services.compute import matmul
from services.compute.microbatch import MicroBatch, pad
from services.compute.splitting import cut
from services.engines.agreement import all_or_none
from services.engines.base import LossFn
from services.models.families import load_classifier
from services.models.sequence_scorer import SequenceScorer
from services.models.tokenizers import vocabulary_hash
from services.reward.losses import LOSSES, bradley_terry_loss, cost_loss
from services.reward.scorers.base import Scorer, row_score, score_request
from services.roles.columns import jagged_ids
from services.roles.device import rank_device
from services.roles.micro_batching import check_token_ids
from services.roles.minibatch import check_schedule, deal
from services.roles.model_worker import ModelWorker
from services.roles.update_plan import MiniBatch
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, CallRows, register, require


class ModelScorer(Scorer):
    """A Hugging Face sequence-classification model, with a tokenizer of its own or over the actor's ids.

    Args:
        load: Loads the model; None: one whose weights are all there.
    """

    def __init__(self, table: RewardTable, load: Callable[..., Any] | None = None) -> None:
        if table.model is None:
            raise ConfigError("model: a reward of kind model needs the directory of one")
        torch.set_num_threads(table.threads)
        if table.matmul != "auto":
            matmul.use(table.matmul)
        try:
            self._scorer = SequenceScorer(
                table.model,
                token_budget=table.micro_batch_tokens,
                dtype=getattr(torch, table.dtype),
                device=rank_device(),
                load=load,
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: {error}") from error
        self.stage_weights, self.load_weights = self._scorer.stage_weights, self._scorer.load_weights
        if table.input == "tensor":
            self.input_form = worker_pb2.INPUT_FORM_TENSOR
            self.vocabulary_hash = vocabulary_hash(self._scorer.tokenizer)

    def kind(self) -> str:
        return "model"

    def score_texts(self, rows: Sequence[reward_pb2.TextRow], call: CallContext) -> list[reward_pb2.RowScore]:
        if self.input_form == worker_pb2.INPUT_FORM_TENSOR:
            return super().score_texts(rows, call)
        texts = [row.prompt + row.response for row in rows]
        return self._scores(self._scorer.tokenizer(texts)["input_ids"] if texts else [])

    def score_tokens(self, rows: CallRows, call: CallContext) -> list[reward_pb2.RowScore]:
        if self.input_form == worker_pb2.INPUT_FORM_TEXT:
            return super().score_tokens(rows, call)
        prompts, responses = _id_rows(rows, "prompt_ids"), _id_rows(rows, "response_ids")
        return self._scores([p + r for p, r in zip(prompts, responses, strict=True)])

    def _scores(self, rows: list[list[int]]) -> list[reward_pb2.RowScore]:
        """Scores of token ids; a row that the model cannot read carries an error, and the others their scores."""
        scorer = self._scorer
        readable = [ids for ids in rows if 0 < len(ids) <= scorer.max_tokens]
        scores = iter(scorer.score_tokens(readable).tolist())
        return [
            row_score(next(scores))
            if 0 < len(ids) <= scorer.max_tokens
            else reward_pb2.RowScore(
                error=f"the row has {len(ids)} tokens; the reward model reads from 1 to {scorer.max_tokens}, as "
                "micro_batch_tokens and the positions of the model allow"
            )
            for ids in rows
        ]


class LearningRewardWorker(ModelWorker):
    """A reward or cost model that learns from pairs of responses.

    The engine holds the weights that learn. Rows are scored by a copy, whole on every rank, which takes over the
    weights in each update. So scoring is what it is with a model that does not learn: a rank needs no others for it.
    """

    role = "reward"
    copies_weights = True

    def __init__(self, table: RewardTable, ranks: Ranks) -> None:
        super().__init__(_model_table(table), ranks, load_classifier, table.optimizer)
        self.config_table = table
        self.scorer = ModelScorer(table, load_classifier)
        self._reads_ids = table.input == "tensor"
        # The model looks for the end of a text by the padding after it.
        self.pad_id = self.model_config.pad_token_id

    def describe(self) -> worker_pb2.DescribeResponse:
        answer = super().describe()
        answer.input_form = self.scorer.input_form
        answer.engine = f"{self.table.engine}, scores by {self.scorer.kind()}"
        return answer

    @register("DP_PROTO", collective=False)
    def compute_reward(
        self, rows: CallRows, request: reward_pb2.ComputeRewardRequest, call: CallContext
    ) -> CallResult:
        return score_request(self.scorer, rows, request, call)

    @register("DP_PROTO")
    def compare_pairs(
        self, rows: CallRows, request: reward_pb2.ComparePairsRequest, call: CallContext
    ) -> CallResult:
        with self.ranks.together(call.peers_deadline):
            micro_batches = self._pair_batches(self._pair_ids(rows, request.max_response_tokens))
        outputs = self.engine.infer(micro_batches, last_score, should_stop=lambda: call.stopping)
        if not outputs:
            return CallResult()
        scores = torch.empty(2 * rows.count)
        scores[np.concatenate([each.rows for each in micro_batches])] = torch.cat(outputs).cpu()
        return CallResult({"chosen_scores": scores[::2].clone(), "rejected_scores": scores[1::2].clone()})

    @register("DP_PROTO")
    def update_reward(
        self, rows: CallRows, request: reward_pb2.UpdateRewardRequest, call: CallContext
    ) -> CallResult:
        require(request, "loss", "epochs", "mini_batches")
        if request.loss not in LOSSES:
            raise InvalidRequest(f"loss {request.loss!r} is none of: {', '.join(LOSSES)}")
        with self.ranks.together(call.peers_deadline):
            signs = _signs(rows) if request.loss == "cost" else None
            mini_batches = self._deal(rows, request, call)

        def loss_for(_: int, num_pairs: int) -> LossFn[Tensor]:
            def loss(scores_S: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
                mine = signs[micro_batch.rows].to(scores_S.device) if signs is not None else None
                return pair_loss(scores_S, mine, num_pairs=num_pairs)

            return loss

        return self.apply(rows, mini_batches, call, last_score, loss_for)

    def copy_weights(self) -> None:
        with all_or_none("copying the weights to the scorer", self.torch_device):
            staged = self.scorer.stage_weights(self.engine.full_tensors())
        self.scorer.load_weights(staged)

    def start_over(self) -> None:
        self.engine.onload()
        with self._taken_over():
            super().start_over()

    def load(self, directory: Path) -> None:
        with self._taken_over():
            super().load(directory)

    @contextmanager
    def _taken_over(self) -> Iterator[None]:
        """A block that changes the weights, which the scorer takes over too; if either fails, both are as before."""
        with all_or_none("keeping the weights", self.torch_device):
            before, version = self.engine.snapshot(), self.policy_version
        try:
            yield
            self.copy_weights()
        except BaseException:
            self.engine.restore(before)
            self.policy_version = version
            raise

    def _deal(
        self, rows: CallRows, request: reward_pb2.UpdateRewardRequest, call: CallContext
    ) -> list[MiniBatch]:
        """This rank's part of every mini-batch of every epoch, in order; its tokens are its pairs."""
        check_schedule(request.epochs, request.mini_batches)
        ids, header, parts = self._pair_ids(rows, request.max_response_tokens), call.call, []
        for epoch in range(request.epochs):
            key = (header.seed, header.step, header.ordinal, epoch)
            for pairs in deal(rows.numbers, request.mini_batches, key):
                call.check()
                parts.append(MiniBatch(self._pair_batches(ids, pairs), len(pairs), len(pairs), 0))
        return parts

    def _pair_ids(self, rows: CallRows, most: int) -> Jagged[Tensor]:
        """The chosen and the rejected text of every pair, one after the other, as they are scored."""
        prompts = rows.texts("prompt")
        answers = zip(rows.texts("chosen"), rows.texts("rejected"), strict=True)
        return jagged_ids(
            [
                self._ids(prompt, answer, most)
                for prompt, pair in zip(prompts, answers, strict=True)
                for answer in pair
            ]
        )

    def _ids(self, prompt: str, response: str, most: int) -> list[int]:
        """A row as the scorer reads it: the actor's tokens, of which a finished response has an end, or the whole text
        in the tokenizer's own framing."""
        start = self.tokenizer(prompt)["input_ids"]
        if not self._reads_ids:
            ids = self.tokenizer(prompt + response)["input_ids"]
            return ids[: len(start) + most] if most else ids
        ids = self.tokenizer(response, add_special_tokens=False)["input_ids"]
        ids = ids if self.eos_id is None else [*ids, self.eos_id]
        return start + (ids[:most] if most else ids)

    def _pair_batches(self, ids: Jagged[Tensor], pairs: np.ndarray | None = None) -> list[MicroBatch]:
        """Pairs cut by the token budget; the two of a pair stay together, and side by side."""
        check_token_ids(ids.values, self.model_config.vocab_size)
        longest = ids.lengths.reshape(-1, 2).max(axis=1)
        nothing = Jagged(torch.empty(0, dtype=torch.int64), np.zeros(ids.rows, np.int64))
        cuts = cut(2 * longest, self.table.micro_batch_tokens, pairs)
        return [
            pad(ids, nothing, np.stack([2 * part, 2 * part + 1], axis=1).reshape(-1), self.pad_id)
            for part in cuts
        ]


def last_score(scores_S1: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Score of each sequence [S], in float32 or finer: what the model says at its last token."""
    return scores_S1[:, 0].to(torch.promote_types(scores_S1.dtype, torch.float32))


def pair_loss(
    scores_S: Tensor, signs_S: Tensor | None, *, num_pairs: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the mean loss of the pairs of a mini-batch.

    Args:
        scores_S: of the chosen and the rejected response of each pair, side by side.
        signs_S: with costs, +1 where a response is unsafe and -1 where it is safe; of a pair the chosen one is the
            less harmful. None: with rewards.
        num_pairs: pairs of the whole mini-batch, over all micro-batches and data ranks.

    Returns:
        The scalar to call backward on, and the sums over pairs `accuracy` (in the right order) and `margin`.
    """
    chosen_B, rejected_B = scores_S[::2], scores_S[1::2]
    if signs_S is None:
        loss_B, margin_B = bradley_terry_loss(chosen_B, rejected_B), chosen_B - rejected_B
    else:
        loss_B = cost_loss(rejected_B, chosen_B, signs_S[1::2], signs_S[::2])
        margin_B = rejected_B - chosen_B
    stats = {"accuracy": (margin_B > 0).sum().to(loss_B.dtype), "margin": margin_B.detach().sum()}
    return loss_B.sum() / num_pairs, stats


def _signs(rows: CallRows) -> Tensor:
    """Columns chosen_sign and rejected_sign, side by side [2 rows]."""
    both = np.stack([np.asarray(rows[name]) for name in ("chosen_sign", "rejected_sign")], axis=1)
    if not np.all(np.abs(both) == 1):
        raise InvalidRequest("chosen_sign and rejected_sign must be 1 for unsafe or -1 for safe")
    return torch.from_numpy(both.reshape(-1).astype(np.float32))


def _model_table(table: RewardTable) -> ModelTable:
    if table.model is None:
        raise ConfigError("model: a reward of kind model needs the directory of one")
    known = {name: getattr(table, name) for name in ModelTable.model_fields if hasattr(table, name)}
    return ModelTable(**known)


def _id_rows(rows: CallRows, name: str) -> list[list[int]]:
    column = rows[name]
    if not isinstance(column, Jagged):
        raise InvalidRequest(f"column {name!r} is not jagged")
    return [column.row(row).tolist() for row in range(column.rows)]
