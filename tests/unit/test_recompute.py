"""Activation checkpointing: the same bits from less memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from services.compute.heads import PolicyHead, PolicyOutput
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines.base import OptimizerOptions
from services.engines.fsdp.engine import FSDPEngine
from services.engines.fsdp.lora import AdapterOptions, LoRAEngine
from services.engines.three_d.engine import ThreeDParallelEngine
from services.models.families import load_causal_lm

CPU = torch.device("cpu")
OPTIONS = OptimizerOptions(lr=1e-2)


pytestmark = pytest.mark.usefixtures("process_group")


def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -output.log_probs_BR.sum() / 50, {}


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine_name", ["fsdp", "3d", "lora"])
def test_steps_have_the_same_bits_and_keep_less(
    engine_name: str, compute_dtype: torch.dtype, tiny_llama_dir: Path
):
    prompts, responses = (Jagged(torch.arange(40) % 61, np.full(4, 10)) for _ in range(2))
    micro_batches = split(prompts, responses, token_budget=100, pad_id=0, packed=True)
    kept_bytes, weights = [], []
    for activation_checkpointing in (False, True):
        if engine_name == "fsdp":
            engine = FSDPEngine(
                load_causal_lm(tiny_llama_dir),
                CPU,
                optimizer=OPTIONS,
                compute_dtype=compute_dtype,
                activation_checkpointing=activation_checkpointing,
            )
        elif engine_name == "lora":
            engine = LoRAEngine(
                load_causal_lm(tiny_llama_dir),
                CPU,
                adapters=AdapterOptions(),
                optimizer=OPTIONS,
                compute_dtype=compute_dtype,
                activation_checkpointing=activation_checkpointing,
            )
        else:
            engine = ThreeDParallelEngine(
                tiny_llama_dir,
                Mesh(),
                CPU,
                optimizer=OPTIONS,
                dtype=compute_dtype,
                activation_checkpointing=activation_checkpointing,
            )
        saved: list[int] = []

        def note(x: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(x.nbytes)
            return x

        with saved_tensors_hooks(note, lambda x: x):
            for _ in range(2):
                engine.step(micro_batches, PolicyHead(), loss)
        kept_bytes.append(sum(saved))
        weights.append({name: x.clone() for name, x in engine.full_tensors()})
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())
    assert kept_bytes[1] < kept_bytes[0] / 2
