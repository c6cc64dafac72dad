"""Weight shards in the modules of vLLM's model: in the memory that CUDA graphs read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from services.rollout.vllm_shards import load_parts
from services.storage.layout import Layout

LAYOUTS = {f"mlp.{name}.weight": Layout((6, 4), stage=0, parts=2) for name in ("gate_proj", "up_proj")}


class MLP(nn.Module):
    """The first layer of an MLP as vLLM has it, with `rows` rows of the fused weight."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"gate_up_proj": nn.Linear(4, rows, bias=False)})

    @property
    def weight(self) -> nn.Parameter:
        return self.mlp["gate_up_proj"].get_parameter("weight")


def parts() -> dict[str, torch.Tensor]:
    return {name: torch.full((3, 4), float(number)) for number, name in enumerate(LAYOUTS)}


def test_a_fused_weight_is_filled_in_place() -> None:
    model = MLP(rows=6)
    place = model.weight.data_ptr()
    load_parts(model, LAYOUTS, parts().items())
    assert torch.equal(model.weight, torch.cat(list(parts().values())))
    assert model.weight.data_ptr() == place


def test_a_weight_that_is_kept_in_a_packed_form_alone_is_replaced() -> None:
    model = MLP(rows=0)
    load_parts(model, LAYOUTS, parts().items())
    assert torch.equal(model.weight, torch.cat(list(parts().values())))


def test_a_shard_of_another_shape_is_an_error() -> None:
    model = MLP(rows=8)
    with pytest.raises(
        ValueError, match=r"mlp\.gate_proj\.weight \+ .*: .*\[6, 4\], in vLLM it has \[8, 4\]"
    ):
        load_parts(model, LAYOUTS, parts().items())
