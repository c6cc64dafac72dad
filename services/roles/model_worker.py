"""Base class of the roles with a training engine: the RPC methods that use it, inference, and updates that take effect
on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch

from rlhf.errors import ConfigError, InvalidRequest
from rlhf.v1 import actor_pb2, worker_pb2
from services.compute.heads import Head
from services.compute.microbatch import to_device
from services.engines.base import EngineSetup, TrainEngine
from services.engines.implementation import compute_dtype
from services.models.loading import Load
from services.models.positions import longest_row
from services.models.tokenizers import check_vocabulary
from services.roles.background import BackgroundWriter
from services.roles.columns import Sequences
from services.roles.early_gradient import EarlyGradient
from services.roles.engine_factory import make_engine, optimizer_options
from services.roles.language_worker import LanguageWorker
from services.roles.micro_batching import Computed, MicroBatcher
from services.roles.rejected import RowKeeper
from services.roles.state_history import StateHistory, check_state_id
from services.roles.update import Updater
from services.roles.update_loss import UpdateLoss
from services.roles.update_plan import NO_ROWS, MiniBatch, first_rows, plan_first, plan_mini_batches
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, CallRows, register, require
from services.storage.publish import check_writable
from services.storage.written import WrittenFile
from services.weights.sending import SendingWorker
from settings.model import ModelTable, OptimizerTable

Output = TypeVar("Output")


class ModelWorker(SendingWorker, LanguageWorker):
    """Worker of a role whose model is in a training engine.

    Args:
        table: Table of the service.
        ranks: Ranks of the service.
        load: Loads the role's model from a directory in a dtype.
        optimizer: Table of the optimizer; None for a model that is not trained.

    Raises:
        ConfigError: The model directory cannot be used; the message says why.
    """

    engine: TrainEngine
    copies_weights = False
    """Whether the role keeps a further copy of the weights, which `copy_weights` updates."""

    def __init__(self, table: ModelTable, ranks: Ranks, load: Load, optimizer: OptimizerTable | None) -> None:
        super().__init__(table, ranks)
        self.table: ModelTable = table
        self.longest_row = table.token_budget
        try:
            options = optimizer_options(optimizer) if optimizer else None
            self.engine = make_engine(table, EngineSetup(load, ranks.mesh, self.torch_device, options))
            self.model_config = self.engine.config.get_text_config()
            self.vocab_size = self.model_config.vocab_size
            check_vocabulary(self.tokenizer, self.vocab_size, table.model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: {error}") from error
        self.engine.progressed = self.progressed
        self._micro_batcher = MicroBatcher(
            self.engine,
            table.token_budget,
            packs=table.packing,
            pad_id=self.tokenizer.pad_token_id or 0,  # any id will do: outputs of the padding are not read
            vocab_size=self.model_config.vocab_size,
        )
        self.row_keeper = RowKeeper(self)
        self._updater = Updater(self.engine, ranks, self.row_keeper)
        self._early = EarlyGradient(self.engine, ranks)
        self._history = StateHistory(f"{table.address} {ranks.epoch}")
        self._writer = BackgroundWriter(self.prepare_thread)

    @property
    def state_id(self) -> str:
        return self._history.id_at(self.policy_version)

    def engine_name(self) -> str:
        """Returns the name of the engine that Describe reports."""
        return ", ".join(filter(None, (self.table.engine, self.engine.detail)))

    def close(self) -> None:
        self._writer.close()

    def writing(self, directory: Path) -> Future[list[WrittenFile]]:
        return self._writer.writing(directory)

    def describe(self) -> worker_pb2.DescribeResponse:
        answer = super().describe()
        answer.parameters = self.engine.num_parameters
        answer.engine = self.engine_name()
        answer.limits.extend(_limits_of(self.torch_device, compute_dtype(self.table)))
        answer.max_tokens = longest_row(self.model_config, self.table.token_budget)
        return answer

    def around(self, run: Callable[[], CallResult]) -> CallResult:
        """Calls `run` as the base class does, and forgets the id of the state where ranks fall out of step."""
        with self._history.lost_if_out_of_step():
            return super().around(run)

    def make_room(self, call: CallContext) -> None:
        """Called on all ranks before the engine infers or trains in a call; frees memory of the device that the role
        needs in other calls alone. May be collective. Default: does nothing."""

    def forward(self, sequences: Sequences, head: Head[Output], call: CallContext) -> list[Computed[Output]]:
        """Splits sequences into micro-batches and runs the model on them without gradients. Collective.

        Returns:
            Each micro-batch, on the engine's device, with the output of `head` for it; an empty list on pipeline stages
            before the last.
        """
        self.make_room(call)
        with self.ranks.together(call.peers_deadline):
            self.engine.check_onloaded()
            micro_batches = to_device(self._micro_batcher.split(sequences), self.engine.device)
        total = len(micro_batches)
        call.progress(0, total)
        outputs = self.engine.infer(
            micro_batches,
            head,
            should_stop=lambda: call.stopping,
            progress=lambda done: call.progress(done, total),
        )
        return list(zip(micro_batches, outputs, strict=True)) if self.engine.sees_outputs else []

    def update(
        self,
        rows: CallRows,
        schedule: actor_pb2.Schedule,
        call: CallContext,
        loss: UpdateLoss[Any],
        *,
        prepared_as: Hashable = None,
    ) -> CallResult:
        """Trains on the rows of a call for all epochs and mini-batches of a schedule. If anything fails, weights and
        optimizer state are restored on every rank. Collective.

        Args:
            rows: Rows of the call, with columns "prompt_ids" and "response_ids".
            loss: Loss to minimize.
            prepared_as: Argument `of` of the calls of `prepare` for this update. Default: there were none.
        """
        self.make_room(call)
        first = NO_ROWS
        if prepared_as is not None:
            with self.ranks.together(call.peers_deadline):
                first = rows.numbers[first_rows(rows.numbers, schedule, call)]
        with self._early.used(prepared_as, first, call) as held:
            with self.ranks.together(call.peers_deadline):
                mini_batches = plan_mini_batches(rows, schedule, call, self._micro_batcher, loss, held)
            return self.apply(rows, mini_batches, call, loss)

    def prepare(
        self,
        rows: CallRows,
        schedule: actor_pb2.Schedule,
        call: CallContext,
        loss: UpdateLoss[Any],
        *,
        num_rows: int,
        of: Hashable,
    ) -> CallResult:
        """Computes the gradient of those rows of a call that are in the first mini-batch of a later `update`, for that
        update. Changes no weights. Where the engine cannot hold gradients between calls, does nothing. Collective.

        Args:
            rows, schedule: As for `update`.
            loss: As for `update`, without a term. It must not depend on the number of response tokens, for which it is
                given 0.
            num_rows: Number of rows of the update, over all ranks.
            of: Id of that update, by its place in the session, its loss, and the weights that it begins with.
        """
        self.make_room(call)
        with self.ranks.together(call.peers_deadline):
            self.engine.check_onloaded()
            mine, num_first = plan_first(rows, schedule, call, self._micro_batcher, loss, num_rows)
        self._early.add(of, mine, loss.head, loss.loss_for(0, num_first), rows, call)
        return CallResult(verified=True)

    def apply(
        self, rows: CallRows, mini_batches: list[MiniBatch], call: CallContext, loss: UpdateLoss[Any]
    ) -> CallResult:
        """Makes one optimizer step per mini-batch, of which `mini_batches` holds this rank's parts, increments the
        policy version, and returns the metrics of the steps. If anything fails, weights and optimizer state are
        restored on every rank. Collective. Other arguments as for `update`."""
        copy = self.copy_weights if self.copies_weights else None
        self.verify_before_update(call)
        metrics = self._updater.run(mini_batches, loss, call, rows, copy_weights=copy)
        self.policy_version += 1
        self._history.changed(call.call.call_id, self.policy_version)
        return CallResult(metrics=metrics, verified=True)

    def copy_weights(self) -> None:
        """Copies new weights to the role's further copy of the model, on every rank or on none. Collective. Default:
        does nothing; a role that overrides it also sets `copies_weights`."""

    def start_over(self) -> None:
        """Resets the worker to the weights of the model directory, a new optimizer and policy version 0. Collective;
        if any rank fails, every rank keeps its weights and optimizer state.

        Raises:
            ValueError, FileNotFoundError: The directory can no longer be read (`PeerRankFailed` on ranks that could).
        """
        self.weight_check.before_start_over()
        self.engine.start_over()
        self.policy_version = 0

    def load(self, directory: Path) -> None:
        """Brings an offloaded engine back, and loads a sharded checkpoint, on all ranks or none. Collective."""
        self.weight_check.before_load()
        self.engine.onload()
        self.policy_version = int(self.engine.load(directory)["policy_version"])

    @register("ONE_TO_ALL")
    def begin_session(
        self, rows: CallRows, request: worker_pb2.BeginSessionRequest, call: CallContext
    ) -> CallResult:
        with self.ranks.together(call.peers_deadline):
            for directory in map(self.output_path, request.directories):
                if self.ranks.rank == 0:  # the rank that creates directories
                    check_writable(directory)
        self.row_keeper.directory = request.rejected_directory
        self._early.drop()
        if request.keep_weights:
            self.onload(rows, request, call)
        else:
            self.start_over()
            self._history.changed(call.call.call_id, self.policy_version)
        return CallResult(fields={"model": str(self.table.model)})

    @register("ONE_TO_ALL")
    def offload(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Implements Offload: moves weights and optimizer state from a GPU to host memory."""
        self.ranks.agree(None, call.peers_deadline)
        return CallResult(fields={"moved_bytes": self.engine.offload()})

    @register("ONE_TO_ALL")
    def onload(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        self.ranks.agree(None, call.peers_deadline)
        return CallResult(fields={"moved_bytes": self.engine.onload()})

    @register("ONE_TO_ALL")
    def save_checkpoint(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        with self.ranks.together(call.peers_deadline):
            require(request, "directory", "format")
            if request.dtype not in ("", "float32", "bfloat16"):
                raise InvalidRequest(f"dtype: {request.dtype!r} is neither float32 nor bfloat16")
            directory = self.output_path(request.directory)
            self.engine.check_onloaded()
        match request.format:
            case worker_pb2.CHECKPOINT_FORMAT_HUGGING_FACE:
                dtype = getattr(torch, request.dtype or self.table.export_dtype)
                sha256 = self.engine.export(directory, self.tokenizer, dtype)
                return CallResult(fields={"sha256": sha256 if self.ranks.rank == 0 else ""})
            case worker_pb2.CHECKPOINT_FORMAT_SHARDED:
                scalars = {"policy_version": self.policy_version}
                if request.in_background:
                    self._writer.start(directory, self.engine.begin_save(directory, scalars))
                else:
                    self.engine.save(directory, scalars)
                return CallResult()
            case _:
                raise InvalidRequest("save_checkpoint: format must be SHARDED or HUGGING_FACE")

    @register("ONE_TO_ALL")
    def load_checkpoint(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        with self.ranks.together(call.peers_deadline):
            require(request, "directory")
            directory = self.output_path(request.directory)
            check_state_id(request.state_id)
        self.load(directory)
        self._history.loaded(request.state_id, call.call.call_id, self.policy_version)
        return CallResult()


def _limits_of(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Returns the limits that Describe reports for a rank that computes in this data type on this device."""
    if device.type == "cpu":
        return ["Offload and Onload move nothing: weights are in host memory already"]
    if dtype == torch.float32:
        return ["computes in float32, matrix products in TF32; dtype = 'bfloat16' computes in bfloat16"]
    return ["computes in bfloat16; dtype = 'float32' computes in float32"]
