"""The vLLM rollout engine: vLLM in the actor's own ranks, beside the training engine, on the same devices.

vLLM starts no processes here. Each rank builds an engine for itself (vLLM calls that an external launcher), and the
ranks of a tensor group are given the same rows and take the same steps. Weights are replaced in place.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from nccl_transfer.refs.columns import Jagged
from services.rollout.base import (
    FinishReason,
    Generation,
    Meter,
    RolloutEngine,
    SamplingOptions,
    check_names,
)
from services.rollout.stops import StopMatcher
from services.rollout.vllm_shards import load_parts
from services.storage.layout import Layout
from settings.actor import VLLM_TEMPERATURES, VllmTable

# vLLM reads some of them when it is imported. Its engine is to run in this process, on the threads this process has;
# the log is this service's; and nothing is sent home.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CONFIGURE_LOGGING="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_DO_NOT_TRACK="1",
)

# Its warnings are of what is meant here: no compiler, no Triton, modules that have no weights. Whether all weights came
# is checked here.
logging.getLogger("vllm").setLevel(logging.ERROR)

from vllm.distributed.parallel_state import get_tp_group  # type: ignore[import-not-found] # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found] # noqa: E402
from vllm.exceptions import VLLMError  # type: ignore[import-not-found] # noqa: E402
from vllm.sampling_params import RequestOutputKind, SamplingParams  # type: ignore[import-not-found] # noqa: E402
from vllm.usage.usage_lib import UsageContext  # type: ignore[import-not-found] # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # type: ignore[import-not-found] # noqa: E402
from vllm.v1.executor.uniproc_executor import (  # type: ignore[import-not-found] # noqa: E402
    ExecutorWithExternalLauncher,
)

_GIB = 1 << 30
_SHARED_MEMORY = Path("/dev/shm")
# The size of the KV cache is given. vLLM would also refuse to start unless a share of the device is free, which
# is not so where a training engine lives on it too.
_SHARE_THAT_MUST_BE_FREE = 0.01


class VLLMRollout(RolloutEngine):
    """Generates with vLLM, on the device of this rank. torch.distributed must be initialised; a collective.

    Args:
        directory: Hugging Face directory of the model.
        identity: names the shared memory of this service's tensor groups; no other service on the host may have it.
        layouts: of the weights that come, where each rank gets its parts; None where they come whole.
        tensor_parallel: ranks that generate together, tg.

    Raises:
        ValueError: vLLM cannot run the model, or not in the memory it is given.
    """

    name = "vllm"

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
            self.limits = ("rollout engine vllm: Offload frees nothing, vLLM does not sleep on a CPU",)
        # vLLM's declared types leave out what it takes here: dtypes by name, and no length for that of the model.
        dtype_name: Any = str(dtype).removeprefix("torch.")
        max_model_len: Any = table.max_model_len or None
        arguments = EngineArgs(
            model=str(directory),
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype=dtype_name,
            max_model_len=max_model_len,
            max_num_seqs=table.max_num_seqs,
            tensor_parallel_size=tensor_parallel,
            kv_cache_memory_bytes=int(table.kv_cache_gb * _GIB),
            gpu_memory_utilization=_SHARE_THAT_MUST_BE_FREE,
            enforce_eager=table.enforce_eager,
            enable_sleep_mode=self._on_gpu,
            logprobs_mode="processed_logprobs",
            distributed_executor_backend=_OwnRanks,
            additional_config={"identity": identity},
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        self._engine = _start(arguments, identity)
        self.max_positions: int = self._engine.vllm_config.model_config.max_model_len

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
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
            # Other ranks wait in the iterator's collectives, whatever has happened here.
            deque(all_weights, maxlen=0)
        check_names(came, self._names)

    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions, row_seeds: np.ndarray, meter: Meter
    ) -> Generation:
        requests = [parameters(sampling, int(seed)) for seed in row_seeds]
        # The cache may be of other weights. And what an earlier call left there changes last bits, which a service
        # that was restarted meanwhile would not repeat.
        self._engine.reset_prefix_cache()
        for row, prompt in enumerate(prompts):
            self._engine.add_request(str(row), {"prompt_token_ids": list(prompt)}, requests[row])
        watch = sampling.stop.watch(len(prompts)) if sampling.stop else None
        completions = self._run(len(prompts), watch, meter)
        try:
            return _generation(completions)
        except FloatingPointError:
            # Attention multiplies what it masks by zero, and zero times nan is nan: it would stay in every row.
            self._engine.collective_rpc(_zero_kv_cache)
            raise

    def _check_sampling(self, sampling: SamplingOptions) -> None:
        check_temperature(sampling)

    def _run(self, num_rows: int, watch: StopMatcher | None, meter: Meter) -> list[Any]:
        """Steps the engine until every row is complete; returns vLLM's outputs, in the order of the rows."""
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
            self._engine.abort_request([str(row) for row in range(num_rows) if row not in completions])
        return [completions[row] for row in range(num_rows)]

    def _end_at_stop_strings(self, stepped: dict[int, Any], watch: StopMatcher) -> None:
        """Marks the completions that have just come to a stop string as finished, and has vLLM go on without them."""
        rows = list(stepped)
        ended = watch.ended(rows, [stepped[row].token_ids[-1] for row in rows])
        stopped = [row for row, ends in zip(rows, ended, strict=True) if ends]
        self._engine.abort_request([str(row) for row in stopped if not stepped[row].finish_reason])
        for row in stopped:
            stepped[row].finish_reason = "stop"

    def _agreed(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        if self._tensor_parallel == 1:
            return should_stop

        def agreed() -> bool:
            wants = torch.tensor(should_stop(), dtype=torch.int32)
            dist.all_reduce(wants, dist.ReduceOp.MAX, group=get_tp_group().cpu_group)
            return bool(wants)

        return agreed

    def _free_memory(self) -> int:
        return self._changed(lambda: self._engine.sleep(level=1))

    def _take_memory(self) -> int:
        return self._changed(self._engine.wake_up)

    def _changed(self, change: Callable[[], object]) -> int:
        """Bytes of the device that a change frees or takes; on a CPU, where vLLM does not sleep, there is none."""
        if not self._on_gpu:
            return 0
        free, _ = torch.cuda.mem_get_info()
        change()
        return abs(torch.cuda.mem_get_info()[0] - free)


class _OwnRanks(ExecutorWithExternalLauncher):
    """Runs the model in this process, as one of the ranks of torch.distributed."""

    def _distributed_args(self) -> tuple[str, int, int]:
        # vLLM names the shared memory of its tensor groups by what follows the last colon.
        config: Any = self.vllm_config.additional_config
        method = f"env://:{config['identity']}"
        return method, dist.get_rank(), int(os.environ.get("LOCAL_RANK", "0"))


def _start(arguments: EngineArgs, identity: str) -> LLMEngine:
    """A running engine, whose shared memory no longer has names: it goes with its last process, however that ends."""
    # A process killed while it started may have left some.
    _unlink_shared_memory(identity)
    set_num_threads = torch.set_num_threads
    try:
        # Of vLLM's defaults those for throughput.
        engine = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
    except VLLMError as error:
        raise ValueError(str(error)) from error
    finally:
        # vLLM's CPU worker puts a function there that does nothing.
        torch.set_num_threads = set_num_threads
    _unlink_shared_memory(identity)
    return engine


def _unlink_shared_memory(identity: str) -> None:
    """Removes the names of shared memory, between two barriers: no rank is creating or opening any."""
    dist.barrier()
    for path in _SHARED_MEMORY.glob(f"*{identity}-*cpushm*"):
        path.unlink(missing_ok=True)
    dist.barrier()


def _zero_kv_cache(worker: Any) -> None:
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def _weight_names(directory: Path) -> set[str]:
    """Names of all weights of the checkpoint, tied ones under every name."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory, local_files_only=True))
    return set(model.state_dict())


def check_temperature(sampling: SamplingOptions) -> None:
    """Raises ValueError for a temperature that vLLM would change."""
    lowest, highest = VLLM_TEMPERATURES
    if not (sampling.greedy or lowest <= sampling.temperature <= highest):
        raise ValueError(
            f"vLLM samples at temperatures from {lowest} to {highest}, got {sampling.temperature}"
        )


def parameters(sampling: SamplingOptions, seed: int) -> SamplingParams:
    """vLLM's sampling parameters of one row."""
    greedy: dict[str, Any] = {"temperature": 0.0}
    drawn: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": seed,
    }
    return SamplingParams(
        **(greedy if sampling.greedy else drawn),
        max_tokens=sampling.max_new_tokens,
        ignore_eos=True,
        stop_token_ids=list(sampling.eos_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        # Stop strings are looked for here, token by token: vLLM would need a tokenizer, and might find others than hf.
        output_kind=RequestOutputKind.CUMULATIVE if sampling.stop else RequestOutputKind.FINAL_ONLY,
    )


def _generation(completions: Sequence[Any]) -> Generation:
    """vLLM's outputs as responses."""
    lengths = np.array([len(completion.token_ids) for completion in completions], dtype=np.int64)
    log_probs = torch.tensor([x for completion in completions for x in completion.logprobs.logprobs])
    if not log_probs.isfinite().all():
        position = int((~log_probs.isfinite()).nonzero()[0])
        row = int(np.searchsorted(np.cumsum(lengths), position, side="right"))
        raise FloatingPointError(f"the output of the rollout model is not finite, first seen in row {row}")
    tokens = torch.tensor([token for completion in completions for token in completion.token_ids])
    reasons: list[FinishReason] = [completion.finish_reason for completion in completions]
    return Generation(Jagged(tokens, lengths), Jagged(log_probs, lengths), reasons)
