"""Workers whose reward or cost is a model that is sharded over the ranks of the service, which score together."""

from __future__ import annotations

from rlhf.errors import ConfigError
from rlhf.v1 import reward_pb2, worker_pb2
from services.compute.microbatch import pad
from services.compute.splitting import cut
from services.models.families import load_scoring_model
from services.models.positions import longest_row
from services.reward.model import PairRewardWorker, in_row_order, last_score, model_table
from services.reward.model_scorer import SequenceModelScorer
from services.reward.scorers.base import score_request
from services.reward.worker import RewardWorker
from services.roles.columns import jagged_ids
from services.roles.frozen_worker import FrozenModelWorker
from services.roles.model_worker import ModelWorker
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, CallRows, register
from settings.reward import RewardTable


class ShardedScorer(SequenceModelScorer):
    """Scores rows by the model in the engine of a worker. All ranks have to score at the same time, each its own rows.

    Args:
        table: Config of the service.
        worker: The worker.

    Raises:
        ConfigError: The model does not give one score per sequence, or cannot pad.
    """

    def __init__(self, table: RewardTable, worker: ModelWorker) -> None:
        config, budget = worker.model_config, table.micro_batch_tokens
        if (labels := worker.engine.config.num_labels) != 1:
            raise ConfigError(f"model: {table.model} gives {labels} labels, a reward model gives one")
        if config.pad_token_id is None:
            raise ConfigError(
                f"model: config.json of {table.model} has no pad_token_id, so rows cannot share a batch"
            )
        most = longest_row(config, budget)
        super().__init__(table, worker.tokenizer, most, config.vocab_size)
        self._worker, self._budget, self._pad_id = worker, budget, config.pad_token_id

    def kind(self) -> str:
        return "the same shards"

    def score_sequences(self, rows: list[list[int]], call: CallContext) -> list[float]:
        """As the base class. Collective; a rank without rows takes part."""
        with self._worker.ranks.together(call.peers_deadline):
            call.check()
            ids, nothing = jagged_ids(rows), jagged_ids([[] for _ in rows])
            micro_batches = [pad(ids, nothing, part, self._pad_id) for part in cut(ids.lengths, self._budget)]
        outputs = self._worker.engine.infer(
            micro_batches,
            last_score,
            should_stop=lambda: call.stopping,
            progress=lambda done: call.progress(done, len(micro_batches)),
        )
        return in_row_order(micro_batches, outputs).tolist()


class ShardedRewardWorker(FrozenModelWorker):
    """Worker of a sharded reward or cost model that only scores."""

    role = "reward"

    def __init__(self, table: RewardTable, ranks: Ranks) -> None:
        super().__init__(model_table(table), ranks, load_scoring_model)
        self.config_table = table
        self.scorer = ShardedScorer(table, self)

    def describe(self) -> worker_pb2.DescribeResponse:
        answer = super().describe()
        answer.input_form = self.scorer.input_form
        answer.vocabulary_hash = self.scorer.vocabulary_hash
        answer.engine = f"model, sharded by {self.engine_name()}"
        return answer

    @register("DP_PROTO")
    def compute_reward(
        self, rows: CallRows, request: reward_pb2.ComputeRewardRequest, call: CallContext
    ) -> CallResult:
        return score_request(self.scorer, rows, request, call)

    compare_pairs, update_reward = RewardWorker.compare_pairs, RewardWorker.update_reward


class ShardedLearningRewardWorker(PairRewardWorker):
    """Worker of a sharded reward or cost model that learns, and scores by the weights that it trains."""

    def __init__(self, table: RewardTable, ranks: Ranks) -> None:
        super().__init__(table, ranks)
        self.scorer = ShardedScorer(table, self)

    compute_reward = ShardedRewardWorker.compute_reward
