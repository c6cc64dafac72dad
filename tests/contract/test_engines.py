"""The training engines of this project pass the contract that plug-ins pass. Here the device is the CPU and the model
tiny; tests/gpu runs a part of it on a GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from services.models.families import load_causal_lm
from services.rollout.decoder import WholeDecoder
from services.testing.engines import TINY, EngineContract, memory_for


class TestFSDP(EngineContract):
    keys = {"engine": "fsdp"}


class TestThreeD(EngineContract):
    keys = {"engine": "3d", "mesh": "1-1-1"}


class TestZeRO1(EngineContract):
    keys = {"engine": "zero", "zero": {"stage": 1}}


class TestZeRO2(EngineContract):
    keys = {"engine": "zero", "zero": {"stage": 2}}


class TestZeRO2Offloading(EngineContract):
    keys = {"engine": "zero", "zero": {"stage": 2, "offload_optimizer": True}}


class TestZeRO3(EngineContract):
    keys = {"engine": "zero", "zero": {"stage": 3}}


@pytest.mark.parametrize("step", ["_allocate", "_grow"])
def test_a_rollout_engine_stays_as_it_is_when_memory_runs_out_on_its_way(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**TINY, max_position_embeddings=128)).save_pretrained(tmp_path)
    decoder = WholeDecoder(load_causal_lm(tmp_path, torch.bfloat16))
    weights = {name: x.clone() for name, x in decoder._model.state_dict().items()}
    leave = partial(decoder._leave_device, [*decoder._model.parameters(), *decoder._model.buffers()])
    change = leave if step == "_allocate" else decoder.wake
    if step == "_grow":
        leave()
    for number in range(len(weights)):
        with memory_for(number, step, monkeypatch), pytest.raises(torch.OutOfMemoryError):
            change()
    decoder.wake()
    assert all(torch.equal(x, weights[name]) for name, x in decoder._model.state_dict().items())
