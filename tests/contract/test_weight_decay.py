"""Weight decay of every training engine, beside torch's AdamW in float64 with the parameter groups of transformers'
Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from model_types import CONFIGS, configuration, write_directory
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, Trainer

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from services.compute.heads import PolicyHead, PolicyOutput
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines.base import OptimizerOptions, TrainEngine
from services.engines.fsdp.engine import FSDPEngine
from services.engines.three_d.engine import ThreeDParallelEngine
from services.models.families import load_causal_lm
from services.testing.single_rank import single_rank

CPU = torch.device("cpu")
# Decay is so large that a step that forgets it is far off, even beside AdamW's steps of about lr.
LR, DECAY, NUM_STEPS = 1e-2, 3.0, 3


def fsdp(directory: Path, options: OptimizerOptions) -> TrainEngine:
    return FSDPEngine(load_causal_lm(directory, torch.float64), CPU, optimizer=options)


def three_d(directory: Path, options: OptimizerOptions, *, sharded: bool = False) -> TrainEngine:
    return ThreeDParallelEngine(
        directory, Mesh(), CPU, dtype=torch.float64, optimizer=options, shards_over_data=sharded
    )


def zero(directory: Path, options: OptimizerOptions, *, stage: int, offloads: bool = False) -> TrainEngine:
    module = pytest.importorskip("services.engines.zero.engine")
    return module.ZeROEngine(directory, stage, CPU, dtype=torch.float64, optimizer=options, offloads=offloads)


ENGINES: dict[str, Callable[[Path, OptimizerOptions], TrainEngine]] = {
    "fsdp": fsdp,
    "3d": three_d,
    "3d sharded": partial(three_d, sharded=True),
    "zero 1": partial(zero, stage=1),
    "zero 2": partial(zero, stage=2),
    "zero 2 offloaded": partial(zero, stage=2, offloads=True),
    "zero 3": partial(zero, stage=3),
    "zero 3 offloaded": partial(zero, stage=3, offloads=True),
}


@pytest.fixture(autouse=True, scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with single_rank(CPU, tmp_path_factory.mktemp("process_group")):
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with norms, and with biases that are not 0."""
    made = tmp_path_factory.mktemp("qwen2")
    write_directory("qwen2", made)
    return made


def rows() -> tuple[Jagged[Tensor], Jagged[Tensor]]:
    """Prompts and responses."""
    generator = np.random.default_rng(1)
    lengths = generator.integers(1, 7, (2, 6)).astype(np.int64)
    prompts, responses = (
        Jagged(torch.from_numpy(generator.integers(3, 61, counts.sum())), counts) for counts in lengths
    )
    return prompts, responses


def engine_loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -output.log_probs_BR[micro_batch.response_mask_BR].sum(), {}


def plain_loss(model: PreTrainedModel) -> Tensor:
    """The same loss, row by row and without padding."""
    prompts, responses = rows()
    total = torch.zeros((), dtype=torch.float64)
    for row in range(prompts.rows):
        ids, first = torch.cat((prompts.row(row), responses.row(row))), len(prompts.row(row))
        log_p = model(ids[None], use_cache=False).logits[0, first - 1 : -1].log_softmax(-1)
        total = total - log_p.gather(1, responses.row(row)[:, None]).sum()
    return total


def decayed_by_trainer(model: nn.Module) -> set[str]:
    """Names of the parameters to which transformers' Trainer applies weight decay."""
    return set(Trainer.get_decay_parameter_names(cast(Any, None), model))


def trained_by_torch(directory: Path, decayed: set[str] | None) -> dict[str, Tensor]:
    """The weights after the steps of torch's AdamW, with weight decay on the named ones; on all if None."""
    model = load_causal_lm(directory, torch.float64)
    named = dict(model.named_parameters())
    names = named.keys() if decayed is None else decayed
    groups = [
        {"params": [p for name, p in named.items() if name in names], "weight_decay": DECAY},
        {"params": [p for name, p in named.items() if name not in names], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW([group for group in groups if group["params"]], lr=LR, foreach=False)
    for _ in range(NUM_STEPS):
        adamw.zero_grad()
        plain_loss(model).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        for gradient in gradients:
            gradient *= min(1.0, 1.0 / norm)
        adamw.step()
    return {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize("applied_to", ["all", "matrices"])
@pytest.mark.parametrize("engine", ENGINES)
def test_weight_decay_is_that_of_torch_with_the_groups_of_the_trainer(
    engine: str, applied_to: Any, directory: Path
) -> None:
    decayed = (
        decayed_by_trainer(load_causal_lm(directory, torch.float64)) if applied_to == "matrices" else None
    )
    expected = trained_by_torch(directory, decayed)
    options = OptimizerOptions(lr=LR, weight_decay=DECAY, weight_decay_on=applied_to)
    made, (prompts, responses) = ENGINES[engine](directory, options), rows()
    for _ in range(NUM_STEPS):
        made.step(split(prompts, responses, token_budget=30, pad_id=0), PolicyHead(), engine_loss)
    for name, tensor in made.full_tensors():
        if name in expected:
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-11)
    assert {name for name, _ in made.full_tensors()} >= expected.keys()


def test_biases_and_norms_of_the_model_are_told_apart_from_its_matrices(directory: Path) -> None:
    """Without this, the test above would compare nothing."""
    model = load_causal_lm(directory, torch.float64)
    decayed = decayed_by_trainer(model)
    without = {name for name, _ in model.named_parameters()} - decayed
    assert {name.rsplit(".", 2)[-2] for name in without} >= {"input_layernorm", "q_proj", "norm"}
    moved = [trained_by_torch(directory, names) for names in (decayed, None)]
    assert all(not torch.allclose(moved[0][name], moved[1][name], rtol=1e-3) for name in without)


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_matrices_are_what_the_trainer_decays(model_type: str) -> None:
    """Of every type of models that the tests have."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration(model_type), dtype=torch.float32)
    options = OptimizerOptions(weight_decay_on="matrices")
    ours = {name for name, p in model.named_parameters() if options.decays(name, p.shape)}
    theirs = decayed_by_trainer(model) & {name for name, _ in model.named_parameters()}
    vectors = {name for name, p in model.named_parameters() if p.ndim < 2}
    assert ours == theirs - vectors


def test_norms_with_a_weight_per_head_do_not_decay() -> None:
    """Those of queries and keys of Command R+ have two dimensions."""
    config = CONFIG_MAPPING["cohere"](**{**CONFIGS["cohere"], "use_qk_norm": True})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    options = OptimizerOptions(weight_decay_on="matrices")
    named = dict(model.named_parameters())
    assert {name for name, p in named.items() if p.ndim == 2 and name.endswith("norm.weight")}
    ours = {name for name, p in named.items() if options.decays(name, p.shape)}
    assert ours == decayed_by_trainer(model) & named.keys()
