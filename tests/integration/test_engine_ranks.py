"""Two ranks of the training engine compute what one does, and hold together when one of them fails."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from integration.ranks import launch
from services.storage.checkpoint import WeightShard, read_manifest, read_shards

DEADLINE_S = 90
MODELS = ["policy", "kept", "tied", "value"]


@dataclass(frozen=True)
class Run:
    """Results of the ranks of one launch."""

    directory: Path
    reports: list[dict]

    def tensors(self, name: str) -> dict[str, Tensor]:
        return load_file(self.directory / f"{name}.safetensors")


def run(num_ranks: int, directory: Path, other: Path) -> Run:
    reports = launch("integration.engine_ranks_main", num_ranks, directory, other, deadline_s=DEADLINE_S)
    return Run(directory, reports)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """One rank, and two of which each also continues the checkpoint of the one."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    return run(1, one, other=two), run(2, two, other=one)


def relative_distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest over all tensors."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in a)


def test_the_ranks_have_different_numbers_of_micro_batches(runs: tuple[Run, Run]):
    counts = [report["policy"]["num_micro_batches"] for report in runs[1].reports]
    assert counts[0] > counts[1] >= 1


@pytest.mark.parametrize("model", MODELS)
def test_what_two_ranks_infer_is_what_one_infers(runs: tuple[Run, Run], model: str):
    one, two = runs
    values = torch.cat([two.tensors(f"{model}-inferred-{rank}")["values"] for rank in range(2)])
    torch.testing.assert_close(values, one.tensors(f"{model}-inferred-0")["values"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("model", MODELS)
def test_two_steps_of_two_ranks_are_those_of_one(runs: tuple[Run, Run], model: str):
    one, two = runs
    for rank in range(2):
        for step, expected in zip(
            two.reports[rank][model]["steps"], one.reports[0][model]["steps"], strict=True
        ):
            assert step == pytest.approx(expected, rel=1e-5)
        assert relative_distance(two.tensors(f"{model}-{rank}"), one.tensors(f"{model}-0")) < 1e-5
    assert one.reports[0][model]["steps"][0]["grad_norm"] > 0.1, "the gradient must be clipped"


@pytest.mark.parametrize("model", MODELS)
def test_all_ranks_gather_and_export_the_same_bits(runs: tuple[Run, Run], model: str):
    for key in ("gathered", "exported", "steps"):
        assert runs[1].reports[0][model][key] == runs[1].reports[1][model][key]


def test_the_export_of_two_ranks_is_a_hugging_face_directory(runs: tuple[Run, Run]):
    for model in ("policy", "tied"):
        exported = AutoModelForCausalLM.from_pretrained(runs[1].directory / f"{model}-export").state_dict()
        expected = runs[1].tensors(f"{model}-0")
        assert all(torch.equal(tensor, expected[name]) for name, tensor in exported.items())


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_continue_their_checkpoint_bit_for_bit(runs: tuple[Run, Run], model: str):
    for report in runs[1].reports:
        assert report[model]["reloaded"] == report[model]["exported"]


@pytest.mark.parametrize("model", MODELS)
def test_a_restored_engine_computes_with_the_restored_weights(runs: tuple[Run, Run], model: str):
    for report in runs[1].reports:
        assert report[model]["begun_early"]
        assert report[model]["moved"]
        assert report[model]["restored"]


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_continue_the_checkpoint_of_one(runs: tuple[Run, Run], model: str):
    one, two = runs
    assert relative_distance(two.tensors(f"{model}-resharded"), one.tensors(f"{model}-0")) < 1e-5


@pytest.mark.parametrize("model", MODELS)
def test_the_checkpoint_of_two_ranks_reads_as_one(runs: tuple[Run, Run], model: str):
    directory = runs[1].directory / f"{model}-checkpoint"
    num_ranks, scalars = read_manifest(directory)
    assert (num_ranks, scalars) == (2, {"engine.num_steps": 1})
    expected = runs[1].tensors(f"{model}-step1-0")
    if model == "tied":
        del expected["lm_head.weight"]
    whole = {
        f"weight.{name}": WeightShard(torch.full_like(x, torch.nan), (0,) * x.ndim, tuple(x.shape))
        for name, x in expected.items()
    }
    read_shards(directory, num_ranks, whole)
    assert all(torch.equal(whole[f"weight.{name}"].tensor, x) for name, x in expected.items())


@pytest.mark.parametrize("model", MODELS)
def test_a_gradient_that_is_not_finite_on_one_rank_is_refused_on_all(runs: tuple[Run, Run], model: str):
    for report in runs[1].reports:
        assert "gradient norm is nan" in report[model]["refused"]
        assert report[model]["unmoved"]


def test_an_export_that_rank_0_cannot_write_fails_on_all(runs: tuple[Run, Run]):
    assert [report["policy"]["failed_export"] for report in runs[1].reports] == [
        "NotADirectoryError",
        "PeerRankFailed",
    ]


@pytest.mark.parametrize("model", MODELS)
def test_no_rank_moves_where_one_has_no_memory_for_it(runs: tuple[Run, Run], model: str):
    first, last = (report[model]["offloaded"] for report in runs[1].reports)
    assert first == {"left": "PeerRankFailed", "came back": "PeerRankFailed", "stays": True}
    assert last == {"left": "MemoryError", "came back": "MemoryError", "stays": True}
