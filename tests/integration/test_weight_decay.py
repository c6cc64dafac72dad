"""Weight decay that spares biases and norms, on ranks that each have a part of a weight."""

from pathlib import Path

import pytest
from model_types import write_directory

from integration.ranks import launch

DEADLINE_S = 120

pytestmark = pytest.mark.slow


def test_on_two_ranks_matrices_alone_decay_in_every_engine(tmp_path: Path):
    write_directory("qwen2", tmp_path / "model")
    for report in launch("integration.weight_decay_main", 2, tmp_path / "model", deadline_s=DEADLINE_S):
        assert {"fsdp", "3d 1-1-2", "3d 1-1-2 sharded", "3d 1-2-1", "3d 2-1-1"} <= report.keys()
        for engine, shares in report.items():
            assert any(name.endswith("q_proj.bias") for name in shares), "biases are compared"
            for name, share in shares.items():
                is_spared = "norm" in name or name.endswith("bias")
                assert share == pytest.approx(0.0 if is_spared else 1.0, abs=1e-6), f"{engine}: {name}"
