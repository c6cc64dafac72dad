"""The suite of the engines on a real GPU, with a model of 100 million parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.testing.engines import EngineNumbers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


class OnGPU(EngineNumbers):
    @pytest.fixture(scope="class")
    @classmethod
    def device(cls, gpu: torch.device) -> torch.device:
        return gpu

    @pytest.fixture(scope="class")
    @classmethod
    def sizes(cls) -> dict[str, Any]:
        return {
            "vocab_size": 4096,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "initializer_range": 0.035,
        }


class TestFSDP(OnGPU):
    keys = {"engine": "fsdp"}


class TestThreeD(OnGPU):
    keys = {"engine": "3d", "mesh": "1-1-1"}


class TestZeRO1(OnGPU):
    keys = {"engine": "zero", "zero": {"stage": 1}}


class TestZeRO2(OnGPU):
    keys = {"engine": "zero", "zero": {"stage": 2}}


class TestZeRO2Offloading(OnGPU):
    keys = {"engine": "zero", "zero": {"stage": 2, "offload_optimizer": True}}


class TestZeRO3(OnGPU):
    keys = {"engine": "zero", "zero": {"stage": 3}}
