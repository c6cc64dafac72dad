"""vLLM beside a training engine on a real GPU: with CUDA graphs, asynchronous scheduling and its sleep."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from services.compute.splitting import split
from services.engines.base import EngineSetup, TrainEngine
from services.models.families import load_causal_lm
from services.roles.device import use_device
from services.roles.engine_factory import make_engine
from services.rollout.base import Generation, RolloutEngine, RolloutSetup, SamplingOptions
from services.rollout.factory import make_rollout
from services.rollout.sampling import row_seeds
from services.rollout.stops import StopStrings
from services.testing.engine_task import OPTIONS, TEMPERATURE, Task, log_probs
from services.testing.engines import LARGEST_LOG_PROB_ERROR, MEAN_LOG_PROB_ERROR
from services.testing.rollouts import same, spell
from services.testing.single_rank import single_rank
from settings.actor import ActorTable

pytest.importorskip("vllm", reason="vLLM is not installed: pip install '.[cu13,vllm]'")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

KV_CACHE_GB = 0.5
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.035,
}
SAMPLING = SamplingOptions(max_new_tokens=24, temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def device(gpu: torch.device) -> torch.device:
    return gpu


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=128, eos_token_id=None))
    directory = tmp_path_factory.mktemp("llama")
    model.save_pretrained(directory)
    return Task(directory, SIZES["vocab_size"])


@pytest.fixture(scope="module")
def actor(
    device: torch.device, task: Task, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TrainEngine, RolloutEngine]]:
    """The two engines of an actor on one rank."""
    from vllm.distributed import cleanup_dist_env_and_memory  # type: ignore[import-not-found]

    keys: dict[str, Any] = {
        "role": "actor",
        "address": "127.0.0.1:1",
        "model": task.directory,
        "dtype": "bfloat16",
        "rollout_engine": "vllm",
        "vllm": {"kv_cache_gb": KV_CACHE_GB},
    }
    table = ActorTable.model_validate(keys)
    with single_rank(device, Path(tmp_path_factory.mktemp("process_group"))):
        engine = make_engine(table, EngineSetup(load_causal_lm, Mesh(), device, OPTIONS))
        yield engine, make_rollout(table, RolloutSetup(engine.generation_shards, Mesh(), device))
        cleanup_dist_env_and_memory()


def load(actor: tuple[TrainEngine, RolloutEngine]) -> None:
    actor[1].load_weights(actor[0].rollout_weights())


def sample(rollout: RolloutEngine, task: Task, options: SamplingOptions = SAMPLING) -> Generation:
    prompts = [task.prompts.row(row).tolist() for row in range(task.prompts.rows)]
    return rollout.generate(prompts, options, row_seeds(0, 1, "generate/0", np.arange(len(prompts))))


def test_training_finds_the_log_probs_of_its_rollouts_after_each_update(
    actor: tuple[TrainEngine, RolloutEngine], task: Task
) -> None:
    engine, rollout = actor
    for _ in range(3):
        task.step(engine)
        load(actor)
        generation = sample(rollout, task)
        responses = Jagged(generation.responses.values.cpu(), generation.responses.lengths)
        batch = split(task.prompts, responses, token_budget=96, pad_id=0, packed=engine.packs)
        errors = (generation.log_probs.values.cpu() - log_probs(engine, batch, responses.lengths)).abs()
        assert float(errors.max()) < LARGEST_LOG_PROB_ERROR
        assert float(errors.mean()) < MEAN_LOG_PROB_ERROR


def test_another_thread_than_the_one_that_started_it_generates_the_same(
    device: torch.device, actor: tuple[TrainEngine, RolloutEngine], task: Task
) -> None:
    load(actor)
    first = sample(actor[1], task)
    with ThreadPoolExecutor(1, initializer=lambda: use_device(device)) as thread:
        assert same(thread.submit(sample, actor[1], task).result(), first)


@pytest.mark.parametrize("keep_weights", [True, False])
def test_it_frees_its_memory_while_it_sleeps_and_generates_the_same_afterwards(
    keep_weights: bool, actor: tuple[TrainEngine, RolloutEngine], task: Task
) -> None:
    load(actor)
    first = sample(actor[1], task)
    assert actor[1].sleep(keep_weights=keep_weights) > 0.9 * KV_CACHE_GB * (1 << 30)
    task.log_probs(actor[0])
    actor[1].wake()
    if not keep_weights:
        load(actor)
    assert same(sample(actor[1], task), first)


def test_rows_that_end_at_stop_strings_leave_nothing_behind(
    actor: tuple[TrainEngine, RolloutEngine], task: Task
) -> None:
    load(actor)
    first = sample(actor[1], task)
    texts = [spell([first.responses.row(row).tolist()])[0][row % 8 + 1] for row in range(task.prompts.rows)]
    stopped = sample(actor[1], task, replace(SAMPLING, stop=StopStrings(tuple(texts), spell)))
    assert max(stopped.responses.lengths) <= 9
    assert set(stopped.finish_reasons) == {"stop"}
    assert same(sample(actor[1], task), first)
