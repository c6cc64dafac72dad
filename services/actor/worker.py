"""The actor: generates with a rollout engine, scores and learns with a training engine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from rlhf.errors import ConfigError, InvalidRequest
from rlhf.v1 import actor_pb2, worker_pb2
from services.actor.losses import PolicyLossConfig, policy_loss, pretraining_loss, supervised_loss
from services.actor.parity import rollout_parity
from services.compute.heads import PolicyHead, PolicyOutput
from services.compute.microbatch import MicroBatch
from services.engines.base import LossFn, TrainEngine
from services.engines.three_d.engine import ThreeDParallelEngine
from services.models.families import load_causal_lm
from services.roles.model_worker import LossTerm, ModelWorker, Sequences, per_token
from services.rollout.base import Generation, RolloutEngine, SamplingOptions
from services.rollout.hf import HFRollout
from services.rollout.sampling import row_seeds
from services.rollout.sharded import ShardedDecoder
from services.rollout.stops import StopStrings
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, CallRows, register, require
from settings.actor import ActorTable


class ActorWorker(ModelWorker):
    """The policy."""

    role = "actor"

    def __init__(self, table: ActorTable, ranks: Ranks) -> None:
        super().__init__(table, ranks, load_causal_lm, table.optimizer)
        self.eos_ids = _eos_ids(table.model, self.eos_id)
        self.rollout = _rollout_engine(table, self.engine, ranks.mesh, self.torch_device)
        # None yet: the weights come before the first generation, and after each change.
        self._rollout_version = -1

    def describe(self) -> worker_pb2.DescribeResponse:
        answer = super().describe()
        answer.engine = f"{answer.engine}, rollout {self.rollout.name}"
        answer.limits.extend(self.rollout.limits)
        return answer

    @register("3D_ALL_MICRO_DP")
    def generate_sequences(
        self, rows: CallRows, request: actor_pb2.GenerateSequencesRequest, call: CallContext
    ) -> CallResult:
        require(request, "sampling")
        with self.ranks.together(call.peers_deadline):
            self.rollout.check_awake()
            options = self._sampling(request.sampling)
            prompts = self.tokenized(rows.texts("prompt"), call)
        self._update_rollout(call)
        seeds = row_seeds(call.call.seed, call.call.step, f"generate/{call.call.ordinal}", rows.numbers)
        with self.ranks.together(call.peers_deadline):
            generation = self._generate(prompts, options, seeds, call) if prompts else None
        if generation is None:
            return CallResult()
        columns: dict[str, Any] = {
            "prompt_ids": _token_ids(prompts),
            "response_ids": Jagged(generation.responses.values.int(), generation.responses.lengths),
            "rollout_log_probs": generation.log_probs,
        }
        if request.return_text:
            columns["response"] = self._response_texts(generation.responses, options.stop)
        finished = sum(reason == "stop" for reason in generation.finish_reasons)
        return CallResult(columns, {"finished": (finished, rows.count)})

    @register("3D_PROTO")
    def compute_log_prob(
        self, rows: CallRows, request: actor_pb2.ComputeLogProbRequest, call: CallContext
    ) -> CallResult:
        sequences = self.sequences(rows)
        computed = self.forward(sequences, PolicyHead(_temperature(request.temperature)), call)
        log_probs = per_token(computed, lambda output: output.log_probs_BR, sequences[1].lengths)
        entropy = per_token(computed, lambda output: output.entropy_BR, sequences[1].lengths)
        total = float(entropy.values.double().sum())
        fields = {}
        if "rollout_log_probs" in rows and self.engine.sees_outputs:
            rollout = self.column(rows, "rollout_log_probs")
            fields["parity"] = rollout_parity(rollout.values, log_probs.values)
        return CallResult({"log_probs": log_probs}, {"entropy": (total, len(entropy.values))}, fields)

    @register("3D_PROTO")
    def compute_loss(
        self, rows: CallRows, request: actor_pb2.ComputeLossRequest, call: CallContext
    ) -> CallResult:
        with self.ranks.together(call.peers_deadline):
            sequences = self._pretraining_sequences(rows.texts("text"), call)
        computed = self.forward(sequences, PolicyHead(), call)
        log_probs = per_token(computed, lambda output: output.log_probs_BR, sequences[1].lengths)
        totals = [float(-row.double().sum()) for row in log_probs.values.split(log_probs.lengths.tolist())]
        means = [
            total / max(length, 1) for total, length in zip(totals, log_probs.lengths.tolist(), strict=True)
        ]
        loss = (sum(totals), float(log_probs.lengths.sum()))
        return CallResult(
            {"pretrain_loss": torch.tensor(means, dtype=torch.float32)}, {"pretrain_loss": loss}
        )

    @register("3D_PROTO")
    def update_actor(
        self, rows: CallRows, request: actor_pb2.UpdateActorRequest, call: CallContext
    ) -> CallResult:
        require(request, "loss", "schedule")
        config = _loss_config(request.loss)
        old_log_probs, advantages = self.column(rows, "log_probs"), self.token_column(rows, "advantages")
        reference, rollout = (
            self.column(rows, name) if name in rows else None
            for name in ("ref_log_probs", "rollout_log_probs")
        )
        if config.kl_coef and reference is None:
            raise InvalidRequest("loss.kl_coefficient needs column 'ref_log_probs'")
        if config.correction != "none" and rollout is None:
            raise InvalidRequest("loss.rollout_correction needs column 'rollout_log_probs'")

        def loss_for(num_tokens: int, num_rows: int) -> LossFn[PolicyOutput]:
            def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
                return policy_loss(
                    output.log_probs_BR,
                    micro_batch.spread(old_log_probs),
                    micro_batch.spread(advantages),
                    micro_batch.response_mask_BR,
                    config,
                    num_tokens=num_tokens,
                    num_sequences=num_rows,
                    entropy_BT=output.entropy_BR,
                    ref_log_probs_BT=micro_batch.spread(reference) if reference is not None else None,
                    rollout_log_probs_BT=micro_batch.spread(rollout) if rollout is not None else None,
                )

            return loss

        head = PolicyHead(_temperature(request.temperature), entropy_gradient=config.entropy_coef != 0)
        columns = [c for c in (old_log_probs, advantages, reference, rollout) if c is not None]
        term = self._pretraining(rows, request.loss.pretrain_coefficient, call)
        return self.update(rows, request.schedule, call, head, loss_for, *columns, term=term)

    @register("3D_PROTO")
    def tokenize(self, rows: CallRows, request: actor_pb2.TokenizeRequest, call: CallContext) -> CallResult:
        prompts = self.tokenized(rows.texts("prompt"), call)
        responses = self._response_ids(rows.texts("response"), call)
        most = request.max_response_tokens or max(map(len, responses), default=0)
        num_cut = sum(len(row) > most for row in responses)
        columns = {
            "prompt_ids": _token_ids(prompts),
            "response_ids": _token_ids([row[:most] for row in responses]),
        }
        return CallResult(columns, {"cut": (num_cut, len(responses))}) if prompts else CallResult()

    @register("3D_PROTO")
    def update_supervised(
        self, rows: CallRows, request: actor_pb2.UpdateSupervisedRequest, call: CallContext
    ) -> CallResult:
        require(request, "schedule")

        def loss_for(num_tokens: int, num_rows: int) -> LossFn[PolicyOutput]:
            def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
                mask_BR = micro_batch.response_mask_BR
                return supervised_loss(output.log_probs_BR, mask_BR, num_tokens=num_tokens), {}

            return loss

        return self.update(rows, request.schedule, call, PolicyHead(), loss_for)

    def start_over(self) -> None:
        self._rollout_version = -1
        super().start_over()
        self.rollout.wake()

    @register("ONE_TO_ALL")
    def offload(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        self.ranks.agree(None, call.peers_deadline)
        moved_bytes = self.engine.offload() + self.rollout.sleep()
        if not self.rollout.keeps_weights:
            self._rollout_version = -1
        return CallResult(fields={"moved_bytes": moved_bytes})

    @register("ONE_TO_ALL")
    def onload(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        self.ranks.agree(None, call.peers_deadline)
        return CallResult(fields={"moved_bytes": self.engine.onload() + self.rollout.wake()})

    def load(self, directory: Path) -> None:
        self._rollout_version = -1
        super().load(directory)

    def _update_rollout(self, call: CallContext) -> None:
        """Gives the rollout engine the current weights, on all ranks where one of them lacks them. Collective."""
        lacks = self._rollout_version != self.policy_version
        if not any(self.ranks.total([lacks], call.peers_deadline)):
            return
        self._rollout_version = -1
        self.rollout.load_weights(self.engine.rollout_weights())
        self._rollout_version = self.policy_version

    def _generate(
        self, prompts: list[list[int]], options: SamplingOptions, seeds: np.ndarray, call: CallContext
    ) -> Generation:
        return self.rollout.generate(
            prompts,
            options,
            seeds,
            should_stop=lambda: call.stopping,
            progress=lambda finished, tokens: call.progress(finished, len(prompts)),
        )

    def _sampling(self, sampling: actor_pb2.Sampling) -> SamplingOptions:
        return SamplingOptions(
            max_new_tokens=sampling.max_new_tokens,
            eos_ids=self.eos_ids,
            greedy=sampling.greedy,
            temperature=sampling.temperature or 1.0 if sampling.greedy else sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p or 1.0,
            stop=self._stop_strings(tuple(sampling.stop)),
        )

    def _stop_strings(self, texts: tuple[str, ...]) -> StopStrings | None:
        if not texts:
            return None
        return StopStrings(texts, self._decode, frozenset(self.tokenizer.all_special_ids))

    def _response_ids(self, responses: list[str], call: CallContext) -> list[list[int]]:
        """As if they had been generated: no beginning of a text, and an end."""
        ids = self.tokenized(responses, call, add_special_tokens=False)
        return ids if self.eos_id is None else [[*row, self.eos_id] for row in ids]

    def _response_texts(self, responses: Jagged[Tensor], stop: StopStrings | None) -> list[str]:
        rows = [row.tolist() for row in responses.values.cpu().split(responses.lengths.tolist())]
        texts = self._decode(rows)
        return [stop.cut(text) for text in texts] if stop else texts

    def _decode(self, rows: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)

    def _pretraining(
        self, rows: CallRows, coefficient: float, call: CallContext
    ) -> LossTerm[PolicyOutput] | None:
        """The texts of an update, as a term of its loss; None where they do not count."""
        if coefficient < 0:
            raise InvalidRequest(f"loss.pretrain_coefficient must not be negative (given: {coefficient})")
        if not coefficient:
            return None
        with self.ranks.together(call.peers_deadline):
            sequences = self._pretraining_sequences(rows.texts("pretrain_text"), call)

        def loss_for(num_tokens: int) -> LossFn[PolicyOutput]:
            def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
                mask_BR = micro_batch.response_mask_BR
                return pretraining_loss(output.log_probs_BR, mask_BR, coefficient, num_tokens=num_tokens)

            return loss

        return LossTerm(sequences, PolicyHead(), loss_for, ("pretrain_loss",))

    def _pretraining_sequences(self, texts: list[str], call: CallContext) -> Sequences:
        """The first token of a text is given; every later one is predicted. An empty text has only an end."""
        ids = [self._ended(row) for row in self.tokenized(texts, call)]
        return _jagged([row[:1] for row in ids]), _jagged([row[1:] for row in ids])

    def _ended(self, ids: list[int]) -> list[int]:
        """The ids of a text to learn from, with an end."""
        if self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids = [*ids, self.eos_id]
        if not ids:
            raise InvalidRequest("an empty text has no tokens to learn from")
        return ids


def _token_ids(rows: list[list[int]]) -> Jagged[Tensor]:
    """A column of ids as they travel: int32, which holds those of any vocabulary."""
    return _jagged(rows, torch.int32)


def _jagged(rows: list[list[int]], dtype: torch.dtype = torch.int64) -> Jagged[Tensor]:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64).numpy()
    return Jagged(torch.tensor([token for row in rows for token in row], dtype=dtype), lengths)


def _temperature(temperature: float) -> float:
    if not 0 < temperature < math.inf:
        raise InvalidRequest(f"temperature must be above 0 and finite (given: {temperature})")
    return temperature


def _loss_config(loss: actor_pb2.PolicyLoss) -> PolicyLossConfig:
    return PolicyLossConfig(
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip or None,
        entropy_coef=loss.entropy_coefficient,
        kl_coef=loss.kl_coefficient,
        kl_kind=loss.kl_estimator or "k3",
        aggregation=loss.aggregation or "token-mean",
        max_length=loss.max_length or None,
        surrogate=loss.surrogate or "ppo",
        correction=loss.rollout_correction or "none",
        correction_level=loss.rollout_correction_level or "token",
        correction_low=loss.rollout_correction_low,
        correction_high=loss.rollout_correction_high,
    )


def _rollout_engine(
    table: ActorTable, engine: TrainEngine, mesh: Mesh, device: torch.device
) -> RolloutEngine:
    """The engine that the table names. Its weights come by `load_weights`."""
    dtype = getattr(torch, table.dtype)
    transition = engine.transition if isinstance(engine, ThreeDParallelEngine) else None
    if table.rollout_engine == "hf" and transition is not None:
        decoder = ShardedDecoder(table.model, mesh, transition, dtype=dtype, device=device)
        return HFRollout(decoder, token_budget=table.rollout_tokens)
    if table.rollout_engine == "hf":
        model: Any = load_causal_lm(table.model, dtype)
        return HFRollout(model.to(device), token_budget=table.rollout_tokens)
    try:
        # An install of its own, and seconds of import.
        from services.rollout.vllm import VLLMRollout
    except ImportError as error:
        raise ConfigError(
            f"rollout_engine vllm: {error}; docs/rollout.md says how to install vLLM"
        ) from error
    try:
        identity = f"rlhf-{table.address.rpartition(':')[2]}"
        return VLLMRollout(
            table.model,
            dtype=dtype,
            table=table.vllm,
            identity=identity,
            layouts=transition.layouts if transition is not None else None,
            tensor_parallel=mesh.generation_tensor,
        )
    except ValueError as error:
        raise ConfigError(f"rollout_engine vllm: {error}") from error


def _eos_ids(directory: Path, tokenizer: int | None) -> tuple[int, ...]:
    """End-of-sequence tokens of the model's generation config, or else its config, and of its tokenizer."""
    try:
        generation = GenerationConfig.from_pretrained(directory, local_files_only=True)
    except OSError:
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(directory))
    configured: Any = generation.eos_token_id
    given = configured if isinstance(configured, list) else [configured]
    return tuple(sorted({token for token in [*given, tokenizer] if token is not None}))
