"""Private names of torch, transformers and DeepSpeed are there in the versions that pyproject.toml allows; libraries
that another version may break have upper bounds."""

from __future__ import annotations

import importlib.metadata
import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import _utils
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from services.compute import torch_internals, transformers_internals

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
BOUNDED_EXTRAS = ("engine", "deepspeed", "vllm", "cu12", "cu13")
REQUIREMENTS = {
    requirement.name: requirement
    for requirement in map(
        Requirement, [*PROJECT["dependencies"], *(text for extra in BOUNDED_EXTRAS for text in EXTRAS[extra])]
    )
    if requirement.name != PROJECT["name"]
}
PRIVATE_NAMES_USED = ["torch", "transformers", "peft", "deepspeed", "vllm"]
NATIVE = ["protobuf", "grpcio", "cupy-cuda12x", "cupy-cuda13x"]
"""Libraries whose generated code or binary interface is used."""


@pytest.mark.parametrize("name", [*PRIVATE_NAMES_USED, *NATIVE])
def test_a_library_that_another_version_may_break_has_an_upper_bound(name: str) -> None:
    specifier = REQUIREMENTS[name].specifier
    assert any(each.operator in ("<", "<=", "==") for each in specifier), f"{name}{specifier}"


@pytest.mark.parametrize("name", ["torch", "transformers", "peft", "deepspeed", "protobuf", "grpcio"])
def test_the_installed_version_is_one_that_is_allowed(name: str) -> None:
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    assert REQUIREMENTS[name].specifier.contains(installed.partition("+")[0], prereleases=True)


def test_names_of_torch() -> None:
    parameters = inspect.signature(_utils.compute_local_shape_and_global_offset).parameters
    assert list(parameters)[:3] == ["global_shape", "mesh", "placements"]
    module = nn.Linear(2, 3)
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("computed", torch.ones(2), persistent=False)
    assert torch_internals.buffers_of(module).keys() == {"kept", "computed"}
    assert torch_internals.non_persistent_buffers(module).keys() == {"computed"}
    names = [name for tensors in torch_internals.registered_tensors(module) for name in tensors]
    assert names == ["weight", "bias", "kept", "computed"]


def test_names_of_torch_for_process_groups() -> None:
    """`services.runtime.process_groups` gives all groups of a rank one device of gloo."""
    gloo: Any = distributed_c10d.ProcessGroupGloo
    assert {"_devices", "_timeout"} <= set(dir(gloo._Options()))
    assert callable(dist.ProcessGroup._get_backend)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
def test_the_linear_layer_of_onednn() -> None:
    x, weight = torch.ones(4, 2), torch.ones(3, 2)
    assert torch.equal(torch_internals.onednn_linear(x, weight, None, "none", [], ""), x @ weight.t())


def test_names_of_transformers() -> None:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = LlamaForCausalLM(config)
    assert isinstance(model, PreTrainedModel)
    assert transformers_internals.block_class_names(model) == {"LlamaDecoderLayer"}
    assert not transformers_internals.converts_weights(model)
    rotary = model.model.rotary_emb
    expected = rotary.inv_freq.clone()
    rotary.inv_freq.zero_()
    transformers_internals.initialize_module(model, rotary)
    assert torch.equal(rotary.inv_freq, expected)
    assert isinstance(model.model.norm, LlamaRMSNorm)


def test_names_of_deepspeed() -> None:
    pytest.importorskip("deepspeed")
    from services.engines.zero import deepspeed_internals as internals

    for optimizer, names in {
        internals.Stage12Optimizer: [
            "_configure_master_weights",
            "_release_ipg_buffers",
            "enter_backward",
            "exit_backward",
            "backward_epilogue",
            "clear_backward_seen_flag",
            "overlapping_partition_gradients_reduce_epilogue",
            "reduce_gradients",
            "reset_cpu_buffers",
            "set_gradient_accumulation_boundary",
            "update_lp_params",
        ],
        internals.Stage3Optimizer: [
            "_configure_master_weights",
            "_gradient_averaging_world_size",
            "_partition_all_parameters",
            "_reassign_or_swap_out_partitioned_parameters",
            "enter_backward",
            "exit_backward",
            "backward_epilogue",
            "clear_backward_seen_flag",
            "overlapping_partition_gradients_reduce_epilogue",
            "set_gradient_accumulation_boundary",
        ],
        internals.DeepSpeedZeRoOffload: ["partition_all_parameters"],
        internals.deepspeed.zero.Init: ["_convert_to_zero_parameters"],
    }.items():
        missing = [name for name in names if not hasattr(optimizer, name)]
        assert missing == [], optimizer.__name__
