"""Workers whose reward or cost is a sequence-classification model: one that only scores, and one that also learns
from pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from rlhf.errors import ConfigError, InvalidRequest
from rlhf.v1 import reward_pb2, worker_pb2
from services.compute.copies import copy_together
from services.compute.microbatch import MicroBatch, pad
from services.compute.splitting import cut
from services.engines.agreement import RunToEnd, all_or_none, takes_effect
from services.engines.base import HeldTensor, LossFn
from services.engines.rollback import undo
from services.models.families import load_classifier
from services.reward.losses import LOSSES, pair_loss
from services.reward.model_scorer import ModelScorer, SequenceModelScorer
from services.reward.worker import RewardWorker
from services.roles.columns import jagged_ids, response_ends
from services.roles.micro_batching import check_token_ids
from services.roles.minibatch import check_schedule, deal
from services.roles.model_worker import ModelWorker
from services.roles.torch_worker import TorchWorker
from services.roles.update_loss import UpdateLoss
from services.roles.update_plan import MiniBatch
from services.roles.verified_worker import VerifiedWorker
from services.roles.weight_check import WeightCheck
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, CallRows, register, require
from settings.model import ModelTable
from settings.reward import RewardTable


class ModelRewardWorker(VerifiedWorker, TorchWorker, RewardWorker):
    """Worker of a reward or cost model that only scores. Ranks score independently of each other; on CPUs all of them
    choose the same library for matrix products."""

    def __init__(self, table: RewardTable, ranks: Ranks) -> None:
        def make(table: RewardTable) -> ModelScorer:
            self.choose_libraries()
            return ModelScorer(table)

        super().__init__(table, ranks, make)
        self.weight_check = WeightCheck(self.progressed)

    def held(self) -> Iterator[HeldTensor]:
        assert isinstance(self.scorer, ModelScorer), "it is made of one"
        return self.scorer.held(learns=False)

    def describe(self) -> worker_pb2.DescribeResponse:
        answer = super().describe()
        answer.MergeFrom(self.libraries())
        return answer


class PairRewardWorker(ModelWorker):
    """Base class of workers of a reward or cost model that learns from pairs of responses. The engine trains sharded
    weights; subclasses score rows, by `scorer`."""

    role = "reward"
    scorer: SequenceModelScorer

    def __init__(self, table: RewardTable, ranks: Ranks) -> None:
        super().__init__(model_table(table), ranks, load_classifier, table.optimizer)
        self.config_table = table
        self._reads_ids = table.input == "tensor"
        # The model finds the last token of a text by the padding after it.
        self.pad_id = self.model_config.pad_token_id

    def describe(self) -> worker_pb2.DescribeResponse:
        answer = super().describe()
        answer.input_form = self.scorer.input_form
        answer.engine = f"{self.table.engine}, scores by {self.scorer.kind()}"
        return answer

    @register("DP_PROTO")
    def compare_pairs(
        self, rows: CallRows, request: reward_pb2.ComparePairsRequest, call: CallContext
    ) -> CallResult:
        with self.ranks.together(call.peers_deadline):
            micro_batches = self._pair_batches(self._pair_ids(rows, request.max_response_tokens, call))
        outputs = self.engine.infer(micro_batches, last_score, should_stop=lambda: call.stopping)
        if not outputs:
            return CallResult()
        scores = in_row_order(micro_batches, outputs)
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
            signs_of = {} if signs is None else _signs_by_rows(signs, mini_batches, self.engine.device)

        def loss_for(_: int, num_pairs: int) -> LossFn[Tensor]:
            def loss(scores_S: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
                mine = None if signs is None else signs_of[micro_batch.rows.tobytes()]
                return pair_loss(scores_S, mine, num_pairs=num_pairs)

            return loss

        return self.apply(rows, mini_batches, call, UpdateLoss(last_score, loss_for))

    def _deal(
        self, rows: CallRows, request: reward_pb2.UpdateRewardRequest, call: CallContext
    ) -> list[MiniBatch]:
        """Returns this rank's part of every mini-batch of every epoch, in order. The loss is averaged over pairs, so
        a mini-batch counts pairs as its tokens and as its rows."""
        check_schedule(request.epochs, request.mini_batches)
        ids, header = self._pair_ids(rows, request.max_response_tokens, call), call.call
        parts = []
        for epoch in range(request.epochs):
            key = (header.seed, header.step, header.ordinal, epoch)
            for pairs in deal(rows.numbers, request.mini_batches, key):
                call.check()
                parts.append(MiniBatch(self._pair_batches(ids, pairs), len(pairs), len(pairs), 0, pairs))
        return parts

    def _pair_ids(self, rows: CallRows, most: int, call: CallContext) -> Jagged[Tensor]:
        """Returns token ids of the texts of all pairs, jagged [2 * pairs]: chosen, rejected, chosen, .... A text is
        prompt and response, tokenized as the scorer reads it: as the actor's ids, with what ends the response
        (`response_ends`), or as one text with the tokenizer's special tokens.

        Args:
            most: Number of tokens to which responses are cut; 0 for no limit.
        """
        prompts = [prompt for prompt in rows.texts("prompt") for _ in range(2)]
        pairs = zip(rows.texts("chosen"), rows.texts("rejected"), strict=True)
        responses = [response for pair in pairs for response in pair]
        starts = self.prompt_ids(prompts, call)
        if self._reads_ids:
            ends = [end for end in response_ends(rows) for _ in range(2)]
            ids = self.response_ids(responses, ends, call)
            cut_ids = [start + own[: most or None] for start, own in zip(starts, ids, strict=True)]
        else:
            whole = self.tokenized([p + r for p, r in zip(prompts, responses, strict=True)], call)
            cut_ids = [
                own[: len(start) + most if most else None] for start, own in zip(starts, whole, strict=True)
            ]
        return jagged_ids(cut_ids)

    def _pair_batches(self, ids: Jagged[Tensor], pairs: np.ndarray | None = None) -> list[MicroBatch]:
        """Returns micro-batches of pairs within the token budget, in which the two responses of a pair are adjacent
        rows.

        Args:
            ids: Token ids of all pairs, from `_pair_ids`.
            pairs: Numbers of the pairs to use. Default: all.
        """
        check_token_ids(ids.values, self.model_config.vocab_size)
        longest = ids.lengths.reshape(-1, 2).max(axis=1)
        nothing = Jagged(torch.empty(0, dtype=torch.int64), np.zeros(ids.rows, np.int64))
        cuts = cut(2 * longest, self.table.micro_batch_tokens, pairs)
        return [
            pad(ids, nothing, np.stack([2 * part, 2 * part + 1], axis=1).reshape(-1), self.pad_id)
            for part in cuts
        ]


class LearningRewardWorker(PairRewardWorker):
    """Worker of a reward or cost model that learns. A copy of the whole model on every rank scores rows and gets the
    new weights after each update, so ranks score independently of each other, as with a model that does not
    learn."""

    copies_weights = True
    scorer: ModelScorer

    def __init__(self, table: RewardTable, ranks: Ranks) -> None:
        super().__init__(table, ranks)
        self.scorer = ModelScorer(table, load_classifier)

    compute_reward = RewardWorker.compute_reward

    def held(self) -> Iterator[HeldTensor]:
        yield from super().held()
        yield from self.scorer.held(learns=True)

    def copy_weights(self) -> None:
        gathered = RunToEnd(self.engine.full_tensors(), self.progressed)
        with all_or_none("copying the weights to the scorer", gathered):
            staged = self.scorer.stage_weights(gathered)
        with takes_effect("taking the weights to score with"):
            self.scorer.load_weights(staged)

    def start_over(self) -> None:
        self.engine.onload()
        with self._taken_over():
            super().start_over()

    def load(self, directory: Path) -> None:
        self.engine.onload()
        with self._taken_over():
            super().load(directory)

    @contextmanager
    def _taken_over(self) -> Iterator[None]:
        """Context manager for a block that changes the engine's weights. Afterwards it copies them to the scorer; if
        either fails, it restores the engine's weights and the policy version, or raises OutOfStep where it cannot."""
        with all_or_none("keeping the weights"):
            before, version = self.engine.snapshot(), self.policy_version
        try:
            yield
            self.copy_weights()
        except BaseException as failure:
            undo(self.engine, before, failure)
            self.policy_version = version
            raise


def last_score(scores_S1: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Returns the score of each sequence [S], in float32 or higher precision, from the model's outputs [S, 1]."""
    return scores_S1[:, 0].to(torch.promote_types(scores_S1.dtype, torch.float32))


def in_row_order(micro_batches: Sequence[MicroBatch], outputs: Sequence[Tensor]) -> Tensor:
    """Returns the scores of all rows in their order, [rows] float32 in host memory, from those of each micro-batch."""
    if not outputs:
        return torch.empty(0)
    rows = np.concatenate([each.rows for each in micro_batches])
    scores = torch.cat(list(outputs)).float().cpu()
    return scores[torch.from_numpy(np.argsort(rows))]


def _signs(rows: CallRows) -> Tensor:
    """Returns columns chosen_sign and rejected_sign, interleaved, [2 * rows] float32. Raises InvalidRequest where a
    sign is neither 1 nor -1."""
    both = np.stack([np.asarray(rows[name]) for name in ("chosen_sign", "rejected_sign")], axis=1)
    if not np.all(np.abs(both) == 1):
        raise InvalidRequest("chosen_sign and rejected_sign must be 1 for unsafe or -1 for safe")
    return torch.from_numpy(both.reshape(-1).astype(np.float32))


def _signs_by_rows(
    signs: Tensor, mini_batches: Sequence[MiniBatch], device: torch.device
) -> dict[bytes, Tensor]:
    """Returns the signs of the rows of each micro-batch on a device, to which all go in one copy, by the bytes of
    `MicroBatch.rows`."""
    rows = [each.rows for mine in mini_batches for each in mine.micro_batches]
    copied = copy_together([signs[each] for each in rows], device)
    return {each.tobytes(): x for each, x in zip(rows, copied, strict=True)}


def model_table(table: RewardTable) -> ModelTable:
    """Returns the settings that a reward of kind model shares with other services with a model. Raises ConfigError
    where it names no model."""
    if table.model is None:
        raise ConfigError("model: a reward of kind model needs the directory of one")
    known = {name: getattr(table, name) for name in ModelTable.model_fields if hasattr(table, name)}
    return ModelTable(**known)
