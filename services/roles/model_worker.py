"""Base of the roles with a model: an engine, a tokenizer, inference in micro-batches, atomic updates."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.store.tensors import to_torch
from rlhf.errors import (
    CallCancelled,
    ConfigError,
    InvalidRequest,
    PeerFailed,
    Refused,
    RlhfError,
    UpdateRejected,
)
from rlhf.v1 import actor_pb2, worker_pb2
from services.compute import matmul
from services.compute.heads import Head
from services.compute.microbatch import MicroBatch, assemble, split
from services.engines.agreement import PeerRankFailed
from services.engines.base import (
    EngineOffloaded,
    InferenceStopped,
    LossFn,
    NonFiniteGradient,
    OptimizerOptions,
    TrainEngine,
)
from services.engines.fsdp.engine import FSDPEngine
from services.engines.three_d.engine import ThreeDParallelEngine
from services.models.families import (
    ValueModel,
    check_tokenizer,
    check_vocabulary,
    load_tokenizer,
    load_value_model,
    vocabulary_hash,
)
from services.models.loading import Load, load_on_meta
from services.roles.minibatch import check_schedule, deal
from services.roles.traces import Traces
from services.rollout.base import GenerationStopped
from services.runtime.ranks import Ranks, known_to_all
from services.runtime.worker import CallContext, CallResult, CallRows, Worker, register, require
from services.storage.publish import check_writable
from settings.actor import ActorTable
from settings.model import ModelTable, OptimizerTable
from settings.service import ServiceTable

if TYPE_CHECKING:
    from services.engines.zero.engine import ZeROEngine

Output = TypeVar("Output")
Other = TypeVar("Other")
Sequences = tuple[Jagged[Tensor], Jagged[Tensor]]
Computed = tuple[MicroBatch, Output]

MATMUL_TIMEOUT_S = 60.0
"""Longest wait at start for the measurements of the other ranks."""

STEP_METRICS = ("loss", "grad_norm", "lr")

MAX_CHARACTERS = 1 << 18
CHARACTERS_A_TOKEN = 16
"""Longest text that is tokenized, whatever the model, and for each token that fits: a tokenizer takes seconds for that
much where a text has no spaces, and cannot be stopped in between."""

LONG_CHARACTERS = 1 << 14
"""Texts from this length on are tokenized one by one, so that the call may stop between them."""

MAX_TRACED_CALLS = 100
"""Most calls of one profile: the profiler keeps all their events in memory."""


@dataclass(frozen=True)
class MiniBatch:
    """This rank's part of a mini-batch: its micro-batches, response tokens, rows and tokens of a further term."""

    micro_batches: list[MicroBatch]
    tokens: int
    rows: int
    term_tokens: int


@dataclass(frozen=True)
class LossTerm(Generic[Other]):
    """A further term of an update's loss, over sequences of its own.

    Attributes:
        sequences: One for each row of the update; of those without a second part nothing is computed.
        head: What the loss reads off the model.
        loss_for: From the tokens, of the second parts, of a whole mini-batch over all ranks, to its loss.
        metrics: The sums that the loss counts, over those tokens.
    """

    sequences: Sequences
    head: Head[Other]
    loss_for: Callable[[int], LossFn[Other]]
    metrics: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class LossTermBatch(MicroBatch):
    """A micro-batch of a further term."""


class ModelWorker(Worker):
    """A role whose model an engine holds.

    Args:
        load: Loads the role's model from a directory in a dtype.
        optimizer: How the model learns; None for one that does not.

    Raises:
        ConfigError: The directory cannot be used; the text says why.
    """

    copies_weights = False
    """Whether the role has copies of the weights that change in the same call."""
    writes_to_rows = True  # tensors, which share the memory of arrays, know no memory that is read only

    def __init__(
        self,
        table: ModelTable,
        ranks: Ranks,
        load: Load,
        optimizer: OptimizerTable | None,
    ) -> None:
        super().__init__(table, ranks)
        self.table: ModelTable = table
        self.prepare_thread()
        self.torch_device = rank_device()
        if self.torch_device.type == "cpu":
            self._choose_matmul()
        try:
            self.tokenizer = load_tokenizer(table.model)
            # Once: of 128,000 tokens it takes 0.1 s, in which the event loop would answer nobody.
            self._vocabulary_hash = vocabulary_hash(self.tokenizer)
            self.engine: TrainEngine
            self.engine, config = self._load(load, optimizer)
            self.engine.progressed = self.progressed
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: {error}") from error
        tokenizer: Any = self.tokenizer
        self.eos_id: int | None = tokenizer.eos_token_id
        # Any id will do where there is none: nothing is read off the padding.
        self.pad_id: int = tokenizer.pad_token_id or 0
        self.model_config = config.get_text_config()
        self._traces = Traces(self)

    def _choose_matmul(self) -> None:
        """Uses the configured library on every rank, or the one that was faster on all ranks together."""
        setting = self.table.matmul
        if setting == "auto":
            setting = matmul.faster(*self.ranks.total(matmul.measure(), time.monotonic() + MATMUL_TIMEOUT_S))
        try:
            matmul.use(setting)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def _load(
        self,
        load: Load,
        optimizer: OptimizerTable | None,
    ) -> tuple[TrainEngine, Any]:
        """The engine that the table names, and the configuration of its model."""
        table, compute_dtype = self.table, getattr(torch, self.table.dtype)
        # Weights that learn are kept in float32; `dtype` is what they are computed in.
        dtype = torch.float32 if optimizer else compute_dtype
        options = optimizer_options(optimizer) if optimizer else None
        if table.engine == "3d":
            generates = isinstance(table, ActorTable)
            engine = ThreeDParallelEngine(
                table.model,
                self.ranks.mesh,
                self.torch_device,
                dtype=compute_dtype,
                optimizer=options,
                with_value_head=load is load_value_model,
                transition=table.transition if generates else None,
                generates_in_place=generates
                and not table.shards_over_data
                and (table.rollout_engine, table.transition) == ("hf", "hybridflow"),
                activation_checkpointing=table.activation_checkpointing,
                shards_over_data=table.shards_over_data,
            )
            check_vocabulary(self.tokenizer, engine.config.vocab_size, table.model)
            return engine, engine.config
        if table.engine == "zero":
            engine = _zero_engine()(
                table.model,
                table.zero.stage,
                self.torch_device,
                dtype=dtype,
                compute_dtype=compute_dtype,
                optimizer=options,
                offloads=table.zero.offload_optimizer,
                with_value_head=load is load_value_model,
            )
            check_vocabulary(self.tokenizer, engine.config.vocab_size, table.model)
            return engine, engine.config
        model = load_on_meta(load, table.model, dtype)
        check_tokenizer(self.tokenizer, model)
        engine = FSDPEngine(
            model,
            self.torch_device,
            optimizer=options,
            compute_dtype=compute_dtype,
            activation_checkpointing=table.activation_checkpointing,
            directory=table.model,
            load=load,
        )
        return engine, _config_of(model)

    @classmethod
    def uses_torch(cls, table: ServiceTable) -> bool:
        return True

    def prepare_thread(self) -> None:
        torch.set_num_threads(self.table.threads)

    def device(self) -> dict[str, str]:
        if self.torch_device.type != "cuda":
            return {"device": "cpu", "device_uuid": ""}
        uuid = torch.cuda.get_device_properties(self.torch_device).uuid
        return {"device": str(self.torch_device), "device_uuid": f"GPU-{uuid}"}

    def device_memory(self) -> int:
        return torch.cuda.memory_allocated(self.torch_device) if self.torch_device.type == "cuda" else 0

    def peak_device_memory(self) -> int:
        on_device = self.torch_device.type == "cuda"
        return torch.cuda.max_memory_allocated(self.torch_device) if on_device else 0

    def describe(self) -> worker_pb2.DescribeResponse:
        limits = []
        if self.torch_device.type == "cpu":
            limits.append("Offload and Onload move nothing: weights are in host memory already")
        return worker_pb2.DescribeResponse(
            vocabulary_hash=self._vocabulary_hash,
            parameters=self.engine.num_parameters,
            engine=self._engine_name(),
            limits=limits,
            max_tokens=min(self.table.micro_batch_tokens, self.model_config.max_position_embeddings),
            matmul=matmul.backend() if self.torch_device.type == "cpu" else "",
            cpu_capability=torch.backends.cpu.get_cpu_capability(),
            torch=torch.__version__,
        )

    def _engine_name(self) -> str:
        table = self.table
        return f"zero, stage {table.zero.stage}" if table.engine == "zero" else table.engine

    def around(self, run: Callable[[], CallResult]) -> CallResult:
        """Errors of engines become errors of the tree; a profile may be taken."""
        try:
            with self._device_in_use(), self._traces.around():
                return run()
        except NonFiniteGradient as error:
            raise UpdateRejected(
                f"{error}; every rank is back on policy version {self.policy_version}"
            ) from error
        except PeerRankFailed as error:
            raise PeerFailed(str(error)) from error
        except (GenerationStopped, InferenceStopped) as error:
            raise CallCancelled(str(error)) from error
        except EngineOffloaded as error:
            raise Refused(str(error)) from error
        except (ValueError, FileNotFoundError) as error:
            raise InvalidRequest(str(error)) from error
        except OSError as error:
            raise RlhfError(
                f"{error.strerror}: {error.filename}" if error.strerror else str(error)
            ) from error

    @contextmanager
    def _device_in_use(self) -> Iterator[None]:
        """A call, of which the most memory is noted, and after which services that take turns on the device find what
        this one's allocator only kept to itself."""
        if self.torch_device.type == "cpu":
            yield
            return
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        try:
            yield
        finally:
            if self.table.pool:
                torch.cuda.empty_cache()

    def sequences(self, rows: CallRows) -> Sequences:
        """Columns "prompt_ids" and "response_ids" as tensors, int64 as torch wants them."""
        prompts, responses = self.column(rows, "prompt_ids"), self.column(rows, "response_ids")
        return Jagged(prompts.values.long(), prompts.lengths), Jagged(
            responses.values.long(), responses.lengths
        )

    def column(self, rows: CallRows, name: str) -> Jagged[Tensor]:
        """A jagged column as tensors."""
        column = rows[name]
        if not isinstance(column, Jagged):
            raise InvalidRequest(f"column {name!r} is not jagged")
        return to_torch(column, rows.fetched.dtypes[name])

    def token_column(self, rows: CallRows, name: str) -> Jagged[Tensor]:
        """A column with a number for each response token, or one for each row, which all its tokens have."""
        values, responses = rows[name], rows["response_ids"]
        if not isinstance(values, np.ndarray) or not isinstance(responses, Jagged):
            return self.column(rows, name)
        if values.ndim != 1:
            raise InvalidRequest(
                f"column {name!r} has rows of shape {values.shape[1:]}; one number is allowed"
            )
        each = to_torch(values, rows.fetched.dtypes[name])
        return Jagged(each.repeat_interleave(torch.from_numpy(responses.lengths.copy())), responses.lengths)

    def tokenized(self, texts: list[str], call: CallContext, **options: Any) -> list[list[int]]:
        """Token ids of each text, as the tokenizer gives them with these options; between texts the call may stop.

        Raises:
            InvalidRequest: A text is longer than any that fits.
        """
        longest = max(map(len, texts), default=0)
        most = max(MAX_CHARACTERS, CHARACTERS_A_TOKEN * self.table.micro_batch_tokens)
        if longest > most:
            raise InvalidRequest(f"a text has {longest} characters; at most {most} are tokenized")
        together = 64 if longest < LONG_CHARACTERS else 1
        ids: list[list[int]] = []
        for first in range(0, len(texts), together):
            call.check()
            ids += self.tokenizer(texts[first : first + together], **options)["input_ids"]
            self.progressed()
        return ids

    def micro_batches(self, sequences: Sequences, rows: np.ndarray | None = None) -> list[MicroBatch]:
        """Rows cut by the token budget; none where there are no rows."""
        for ids in sequences:
            self._check_tokens(ids.values)
        prompts, responses = sequences
        lengths = prompts.lengths + responses.lengths
        lengths = lengths if rows is None else lengths[rows]
        if not len(lengths):
            return []
        return split(
            prompts,
            responses,
            token_budget=self.engine.token_budget_for(self.table.micro_batch_tokens, int(lengths.max())),
            pad_id=self.pad_id,
            rows=rows,
            packed=self.table.packing and self.engine.packs,
        )

    def _check_tokens(self, ids: Tensor) -> None:
        known = self.model_config.vocab_size
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < known:
            raise InvalidRequest(f"token ids reach from {ids.min()} to {ids.max()}; the model has {known}")

    def forward(self, sequences: Sequences, head: Head[Output], call: CallContext) -> list[Computed[Output]]:
        """Outputs of the head for every micro-batch of the rows, without gradients; empty on ranks that see no
        outputs of the model."""
        with self.ranks.together(call.peers_deadline):
            self.engine.check_onloaded()
            micro_batches = self.micro_batches(sequences)
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
        head: Head[Output],
        loss_for: Callable[[int, int], LossFn[Output]],
        *columns: Jagged[Tensor],
        term: LossTerm[Any] | None = None,
    ) -> CallResult:
        """All epochs and mini-batches, or nothing: whatever fails, weights and optimizer are as before.

        Args:
            loss_for: From the response tokens and rows of a whole mini-batch, over all ranks, to its loss.
            columns: What the loss reads, one value per response token.
            term: What is learned beside the rows, in the same steps.
        """
        with self.ranks.together(call.peers_deadline):
            mini_batches = self._mini_batches(rows, schedule, call, columns, term)
        return self.apply(rows, mini_batches, call, head, loss_for, term)

    def apply(
        self,
        rows: CallRows,
        mini_batches: list[MiniBatch],
        call: CallContext,
        head: Head[Output],
        loss_for: Callable[[int, int], LossFn[Output]],
        term: LossTerm[Any] | None = None,
    ) -> CallResult:
        """An optimizer step for each mini-batch, or nothing; as `update`.

        A single step whose engine moves weights on all ranks or on none is confirmed before it moves them. Any other
        update is undone from a snapshot: it takes as much host memory as weights and optimizer state, once more.

        Args:
            mini_batches: As many on every rank.
        """

        def verify() -> None:
            with self.ranks.together(call.peers_deadline):
                rows.fetched.verify()

        if len(mini_batches) == 1 and self.engine.step_is_atomic and not self.copies_weights:
            metrics = self._steps(mini_batches, call, head, loss_for, term, confirm=verify)
        else:
            with self.ranks.together(call.peers_deadline):
                before = self.engine.snapshot()
            try:
                metrics = self._steps(mini_batches, call, head, loss_for, term)
                verify()
                self.copy_weights()
            except BaseException:
                self.engine.restore(before)
                raise
        self.policy_version += 1
        return CallResult(metrics=metrics, verified=True)

    def copy_weights(self) -> None:
        """Take over new weights into whatever copies of them the role has, on every rank or on none. Collective; a role
        that has copies sets `copies_weights`."""

    def _mini_batches(
        self,
        rows: CallRows,
        schedule: actor_pb2.Schedule,
        call: CallContext,
        columns: Sequence[Jagged[Tensor]],
        term: LossTerm[Any] | None,
    ) -> list[MiniBatch]:
        """This rank's part of every mini-batch of every epoch, in order."""
        check_schedule(schedule.epochs, schedule.mini_batches)
        sequences = self.sequences(rows)
        lengths = sequences[1].lengths
        for column in columns:
            if not np.array_equal(column.lengths, lengths):
                raise InvalidRequest("a column does not have one value per response token")
        header = call.call
        parts = []
        for epoch in range(schedule.epochs):
            key = (header.seed, header.step, header.ordinal, epoch)
            for mine in deal(rows.numbers, schedule.mini_batches, key):
                call.check()
                more, more_tokens = self._term_batches(term, mine) if term else ([], 0)
                micro_batches = [*self.micro_batches(sequences, mine), *more]
                parts.append(MiniBatch(micro_batches, int(lengths[mine].sum()), len(mine), more_tokens))
        return parts

    def _term_batches(self, term: LossTerm[Any], rows: np.ndarray) -> tuple[list[LossTermBatch], int]:
        """Micro-batches of a term's sequences at these rows, and their tokens."""
        lengths = term.sequences[1].lengths
        filled = rows[lengths[rows] > 0]
        micro_batches = self.micro_batches(term.sequences, filled)
        return [LossTermBatch(**vars(each)) for each in micro_batches], int(lengths[filled].sum())

    def _steps(
        self,
        mini_batches: list[MiniBatch],
        call: CallContext,
        head: Head[Output],
        loss_for: Callable[[int, int], LossFn[Output]],
        term: LossTerm[Any] | None,
        confirm: Callable[[], None] = lambda: None,
    ) -> dict[str, tuple[float, float]]:
        sums: dict[str, float] = {}
        for done, mine in enumerate(mini_batches):
            counts_here = self.ranks.is_row_owner
            share = [count * counts_here for count in (mine.tokens, mine.rows, mine.term_tokens)]
            totals = self.ranks.total([*share, call.stopping], call.peers_deadline)
            num_tokens, num_rows, term_tokens, stopping = totals
            if stopping:
                raise known_to_all(
                    CallCancelled(f"call {call.call.call_id} was stopped between mini-batches")
                )
            if not num_rows:
                raise known_to_all(
                    InvalidRequest(
                        f"a mini-batch of {len(mini_batches)} has no rows: schedule.mini_batches is too large"
                    )
                )
            read, loss = head, loss_for(int(num_tokens), int(num_rows))
            if term is not None:
                read, loss = _joined(head, loss, term.head, term.loss_for(int(term_tokens)))
            step = self.engine.step(mine.micro_batches, read, loss, confirm=confirm)
            measured = {**step.stats, "loss": step.loss, "grad_norm": step.grad_norm, "lr": step.lr}
            for name, value in measured.items():
                sums[name] = sums.get(name, 0.0) + value
            call.progress(done + 1, len(mini_batches))
        counts: dict[str, int] = {name: len(mini_batches) for name in STEP_METRICS}
        if term is not None:
            counts |= dict.fromkeys(term.metrics, sum(mine.term_tokens for mine in mini_batches))
        tokens = sum(mine.tokens for mine in mini_batches)
        return {name: (value, counts.get(name, tokens)) for name, value in sums.items()}

    def start_over(self) -> None:
        """Go back to the model directory's weights, an unused optimizer and policy version 0, as after a start of the
        service. Collective; if any rank fails, every rank keeps what it had.

        Raises:
            ValueError: the directory can no longer be read (`PeerRankFailed` on ranks that could).
        """
        self.engine.start_over()
        self.policy_version = 0

    def load(self, directory: Path) -> None:
        """Take over a sharded checkpoint. Collective; if any rank fails, every rank keeps what it had."""
        self.policy_version = int(self.engine.load(directory)["policy_version"])

    @register("ONE_TO_ALL")
    def begin_session(
        self, rows: CallRows, request: worker_pb2.BeginSessionRequest, call: CallContext
    ) -> CallResult:
        with self.ranks.together(call.peers_deadline):
            for directory in map(self.output_path, request.directories):
                if self.ranks.rank == 0:  # which makes directories for all
                    check_writable(directory)
        if not request.keep_weights:
            self.start_over()
        return CallResult(fields={"model": str(self.table.model)})

    @register("ONE_TO_ALL")
    def offload(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        self.ranks.agree(None, call.peers_deadline)
        return CallResult(fields={"moved_bytes": self.engine.offload()})

    @register("ONE_TO_ALL")
    def onload(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        self.ranks.agree(None, call.peers_deadline)
        return CallResult(fields={"moved_bytes": self.engine.onload()})

    @register("ONE_TO_ALL", collective=False)
    def profile(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        require(request, "directory", "calls")
        if request.calls > MAX_TRACED_CALLS:
            raise InvalidRequest(f"profile: calls is {request.calls}; at most {MAX_TRACED_CALLS} are traced")
        return CallResult(
            fields={"path": str(self._traces.arm(self.output_path(request.directory), request.calls))}
        )

    @register("ONE_TO_ALL")
    def save_checkpoint(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        with self.ranks.together(call.peers_deadline):
            require(request, "directory", "format")
            directory = self.output_path(request.directory)
            self.engine.check_onloaded()
        match request.format:
            case worker_pb2.CHECKPOINT_FORMAT_HUGGING_FACE:
                dtype = getattr(torch, self.table.export_dtype)
                sha256 = self.engine.export(directory, self.tokenizer, dtype)
                return CallResult(fields={"sha256": sha256 if self.ranks.rank == 0 else ""})
            case worker_pb2.CHECKPOINT_FORMAT_SHARDED:
                self.engine.save(directory, {"policy_version": self.policy_version})
                return CallResult()
            case _:
                raise InvalidRequest("save_checkpoint: format must be SHARDED or HUGGING_FACE")

    @register("ONE_TO_ALL")
    def load_checkpoint(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        with self.ranks.together(call.peers_deadline):
            require(request, "directory")
            directory = self.output_path(request.directory)
            self.engine.check_onloaded()
        self.load(directory)
        return CallResult()


def per_token(
    computed: list[Computed[Output]], read: Callable[[Output], Tensor], lengths: np.ndarray
) -> Jagged[Tensor]:
    """One float32 column, in the order of the rows, of the grids [B, R] that `read` takes from each output; nan on
    ranks that see no outputs of the model."""
    if not computed:
        return Jagged(torch.full((int(lengths.sum()),), torch.nan), lengths)
    values = [micro_batch.collect(read(output).cpu()) for micro_batch, output in computed]
    return assemble([micro_batch.rows for micro_batch, _ in computed], values, lengths)


def _joined(
    head: Head[Output], loss: LossFn[Output], term_head: Head[Other], term_loss: LossFn[Other]
) -> tuple[Head[Any], LossFn[Any]]:
    """One head and one loss for the micro-batches of the rows and of a further term."""

    def read(raw: Tensor, micro_batch: MicroBatch) -> Any:
        return (term_head if isinstance(micro_batch, LossTermBatch) else head)(raw, micro_batch)

    def lose(output: Any, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return (term_loss if isinstance(micro_batch, LossTermBatch) else loss)(output, micro_batch)

    return read, lose


def _zero_engine() -> type[ZeROEngine]:
    try:
        # An install of its own, and it sets the process up for DeepSpeed.
        from services.engines.zero.engine import ZeROEngine
    except ImportError as error:
        raise ConfigError(
            f"engine zero: {error}; install it: pip install 'rlhf-cluster[deepspeed]'"
        ) from error
    return ZeROEngine


def _config_of(model: PreTrainedModel | ValueModel) -> Any:
    return model.backbone.config if isinstance(model, ValueModel) else model.config


def rank_device() -> torch.device:
    """Where this rank computes, which becomes the thread's current device: the GPU of its local rank, or the CPU where
    the host has no GPU.

    Raises:
        ConfigError: The host has fewer GPUs than the service has ranks there.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise ConfigError(
            f"ranks: local rank {local_rank} has no GPU, this host shows {num_gpus}; each rank of a service on a "
            "host needs one of its own, or CUDA_VISIBLE_DEVICES= (empty) for all ranks to compute on the CPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def optimizer_options(table: OptimizerTable) -> OptimizerOptions:
    """A table as the engines take it."""
    return OptimizerOptions(
        lr=table.learning_rate,
        betas=table.betas,
        eps=table.eps,
        weight_decay=table.weight_decay,
        max_grad_norm=table.max_grad_norm,
        warmup_steps=table.warmup_steps,
        schedule=table.schedule,
        total_steps=table.total_steps,
        min_ratio=table.min_ratio,
    )
