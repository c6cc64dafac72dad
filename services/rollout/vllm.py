"""The rollout engine `vllm`: vLLM in the ranks' own processes, those of an actor beside its training engine, on the
same devices.

The ranks of a tensor-parallel group generate the same rows and make the same steps. Weights are replaced in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf.errors import OutOfStep
from services.engines.base import HeldTensor
from services.engines.collectives import max_over_ranks
from services.engines.implementation import compute_dtype
from services.engines.offload import DroppedStorage, allocate_again, drop
from services.engines.three_d.stage import layouts_of_directory
from services.models.configs import load_config
from services.rollout.base import (
    Generation,
    Meter,
    RolloutEngine,
    RolloutSetup,
    SamplingOptions,
    check_names,
)
from services.rollout.stops import StopMatcher
from services.rollout.vllm_engine import (
    get_tp_group,  # pyright: ignore[reportAttributeAccessIssue] - without vLLM
    runs_eagerly,
    start_engine,
    use_current_stream,
)
from services.rollout.vllm_requests import check_temperature, generation_of, parameters
from services.rollout.vllm_shards import load_parts
from services.storage.layout import Layout
from settings.engines import VllmTable
from settings.generation import GeneratingTable


class VLLMRollout(RolloutEngine):
    """Rollout engine on vLLM, on the device of this rank. torch.distributed must be initialized. Construction is
    collective.

    Args:
        layouts: layouts on the generation mesh of the weight shards that are given to `load_weights`; None if whole
            weights are.
        directory, dtype, table, identity, tensor_parallel: as in `start_engine`.

    Raises:
        ValueError: vLLM cannot run the model, or not in the memory that it is given.
    """

    positions_key = "vllm.max_model_len"
    _dropped: Sequence[DroppedStorage] = ()
    _slopes: Sequence[tuple[Tensor, Tensor]] = ()

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype,
        table: VllmTable,
        identity: str,
        layouts: Mapping[str, Layout] | None = None,
        tensor_parallel: int = 1,
    ) -> None:
        self._names = _weight_names(directory)
        self._on_gpu = torch.cuda.is_available()
        self._tensor_parallel, self._layouts = tensor_parallel, layouts
        self.ranks_together = tensor_parallel
        if not self._on_gpu:
            self.limits = (
                "rollout engine vllm: sleep and Offload free the KV cache alone, vLLM does not sleep on a CPU",
            )
        elif runs_eagerly(table):
            self.limits = ("rollout engine vllm: eager mode, without CUDA graphs: vllm.enforce_eager = true",)
        self._engine = start_engine(
            directory, dtype=dtype, table=table, identity=identity, tensor_parallel=tensor_parallel
        )
        self.max_positions: int = self._engine.vllm_config.model_config.max_model_len

    @classmethod
    def create(cls, table: GeneratingTable, options: VllmTable, setup: RolloutSetup) -> Self:
        shards, mesh = setup.shards, setup.mesh
        layouts = shards.layouts if shards is not None else None
        if layouts is None and mesh.replica_size > 1:
            layouts = layouts_of_directory(table.model, pipeline=1, tensor=mesh.generation_tensor)
        return cls(
            table.model,
            dtype=compute_dtype(table),
            table=options,
            identity=f"rlhf-{table.address.rpartition(':')[2]}",
            layouts=layouts,
            tensor_parallel=mesh.generation_tensor,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        use_current_stream()
        if self._layouts is not None:
            layouts = self._layouts

            def load(worker: Any) -> None:
                load_parts(worker.model_runner.get_model(), layouts, weights)

            self._engine.collective_rpc(load)
            return
        came: set[str] = set()
        all_weights = iter(weights)

        def known() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in all_weights:
                came.add(name)
                if name in self._names:
                    yield name, tensor

        try:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": known()})
        finally:
            # Other ranks wait in the iterator's collectives, even if this rank failed.
            deque(all_weights, maxlen=0)
        check_names(came, self._names)

    def held(self) -> Iterator[HeldTensor]:
        """Yields the tensors of vLLM's model on this rank. On a CPU, vLLM keeps most weights in a packed form, which is
        not included."""
        (tensors,) = self._engine.collective_rpc(_model_tensors)
        for name, tensor in tensors.items():
            yield HeldTensor(f"generation.{name}", f"of rank {dist.get_rank()}", tensor, learns=True)

    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions, row_seeds: np.ndarray, meter: Meter
    ) -> Generation:
        use_current_stream()
        requests = [parameters(sampling, int(seed)) for seed in row_seeds]
        # The cache may be of earlier weights. Cached prefixes also change the last bits of a result, so that a service
        # restarted in between would not reproduce it.
        if not self._engine.reset_prefix_cache():
            raise RuntimeError(
                "vLLM could not reset its prefix cache: it still has blocks of requests, whose results may be of "
                "earlier weights"
            )
        for row, prompt in enumerate(prompts):
            self._engine.add_request(str(row), {"prompt_token_ids": list(prompt)}, requests[row])
        watch = sampling.stop.watch(len(prompts)) if sampling.stop else None
        completions = self._run(len(prompts), watch, meter)
        try:
            return generation_of(completions)
        except FloatingPointError:
            self._engine.collective_rpc(_zero_kv_cache)
            raise

    def _check_request(self, lengths: np.ndarray, sampling: SamplingOptions) -> None:
        check_temperature(sampling)

    def _run(self, num_rows: int, watch: StopMatcher | None, meter: Meter) -> list[Any]:
        """Steps vLLM until every row is complete; returns its completions (`CompletionOutput`) in the order of the
        rows. The requests, named by row number, must have been added; those that remain are aborted if this fails."""
        completions: dict[int, Any] = {}
        try:
            while len(completions) < num_rows:
                outputs: list[Any] = self._engine.step()
                stepped = {int(output.request_id): output.outputs[0] for output in outputs}
                if watch:
                    self._end_at_stop_strings(stepped, watch)
                finished = {row: each for row, each in stepped.items() if each.finish_reason}
                completions |= finished
                num_tokens = sum(len(completion.token_ids) for completion in finished.values())
                meter.advance(rows=len(finished), tokens=num_tokens)
        finally:
            self._abort(row for row in range(num_rows) if row not in completions)
        return [completions[row] for row in range(num_rows)]

    def _end_at_stop_strings(self, stepped: dict[int, Any], watch: StopMatcher) -> None:
        """Marks the completions that now end with a stop string as finished, and aborts their requests.

        Args:
            stepped: completions that the last step extended, by row; changed.
            watch: matcher of the stop strings.
        """
        rows = list(stepped)
        ended = watch.ended(rows, [stepped[row].token_ids[-1] for row in rows])
        stopped = [row for row, ends in zip(rows, ended, strict=True) if ends]
        self._abort(row for row in stopped if not stepped[row].finish_reason)
        for row in stopped:
            stepped[row].finish_reason = "stop"

    def _abort(self, rows: Iterable[int]) -> None:
        """Aborts the requests of rows, one after another. vLLM frees the cache blocks of requests that are aborted
        together in the order of a set (`Scheduler.finish_requests`), which differs between processes; which prefixes
        are still in the cache for later rows, and so how many tokens ranks compute together, would differ with it."""
        for row in rows:
            self._engine.abort_request([str(row)])

    def _agreed(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        if self._tensor_parallel == 1:
            return should_stop

        return lambda: bool(max_over_ranks(should_stop(), get_tp_group().cpu_group))

    def _free_memory(self) -> int:
        return self._sleep(level=1)

    def _drop_memory(self) -> int:
        return self._sleep(level=2)

    def _sleep(self, level: int) -> int:
        """Drops the KV cache, and moves the weights to host memory (vLLM's sleep level 1) or drops them too (level 2).
        On a CPU, where vLLM does not sleep and has repacked most weights, these stay. Returns the bytes freed."""
        if self._on_gpu:
            if level == 2:
                (self._slopes,) = self._engine.collective_rpc(_copy_slopes)
            return self._changed(lambda: self._engine.sleep(level=level))
        (self._dropped,) = self._engine.collective_rpc(_drop_kv_cache)
        return sum(item.num_bytes for item in self._dropped)

    def _take_memory(self) -> int:
        if self._on_gpu:
            # vLLM has an allocator of its own, for which memory in torch's cache is not free.
            torch.cuda.empty_cache()
            taken = self._changed(self._engine.wake_up)
            for tensor, copy in self._slopes:
                tensor.copy_(copy)
            self._slopes = ()
        else:
            taken, self._dropped = allocate_again(self._dropped), ()
        self._engine.collective_rpc(_zero_kv_cache)
        return taken

    def _changed(self, change: Callable[[], object]) -> int:
        """Calls `change`; returns the bytes of device memory that it freed or allocated.

        Raises:
            OutOfStep: It failed. vLLM frees and allocates its memory piece by piece and cannot undo that, so the
                process has to exit.
        """
        free, _ = torch.cuda.mem_get_info()
        try:
            change()
        except Exception as error:
            raise OutOfStep(
                f"rollout engine vllm has lost a part of its memory: {type(error).__name__}: {error}"
            ) from error
        return abs(torch.cuda.mem_get_info()[0] - free)


def _model_tensors(worker: Any) -> dict[str, Tensor]:
    """Returns the parameters and buffers of a vLLM worker's model by name; run by vLLM's `collective_rpc`."""
    return dict(worker.model_runner.get_model().state_dict())


def _copy_slopes(worker: Any) -> list[tuple[Tensor, Tensor]]:
    """Returns the slopes of ALiBi in all layers of a vLLM worker's model, each with a copy in host memory; run by
    vLLM's `collective_rpc`. They are in the memory of the weights and no buffers, so vLLM's sleep level 2 drops them,
    and nothing loads them again."""
    layers = (getattr(module, "impl", None) for module in worker.model_runner.get_model().modules())
    slopes = (getattr(layer, "alibi_slopes", None) for layer in layers)
    return [(each, each.cpu().clone()) for each in slopes if isinstance(each, Tensor)]


def _drop_kv_cache(worker: Any) -> list[DroppedStorage]:
    """Frees the KV cache of a vLLM worker and returns its storages; run by vLLM's `collective_rpc`."""
    return drop(worker.model_runner.kv_caches)


def _zero_kv_cache(worker: Any) -> None:
    """Fills the KV cache of a vLLM worker with zeros; run by vLLM's `collective_rpc`. Attention multiplies masked
    values by zero, and zero times nan, which memory without values may have, is nan."""
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def _weight_names(directory: Path) -> set[str]:
    """Returns the names of all weights of the directory's model; tied weights are under every one of their names."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(directory), trust_remote_code=False)
    return set(model.state_dict())
