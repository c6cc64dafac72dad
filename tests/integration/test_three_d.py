"""3D-parallel ranks compute what one process with plain transformers does, on every mesh."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from integration.ranks import launch
from integration.references import STEPS_TOLERANCE, TOLERANCE, References
from services.models.families import load_value_model

DEADLINE_S = {"fast": 240, "every mesh": 1100}
"""Of a launch: beside other tests ranks mostly wait for each other."""

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

Meshes = list[tuple[tuple[int, ...], bool]]
"""p, t, d, where two more numbers are the generation mesh, which permutes the ranks; and whether weights are sharded
over d."""


def replicated(*sizes: tuple[int, ...]) -> Meshes:
    return [(each, False) for each in sizes]


def sharded(*sizes: tuple[int, ...]) -> Meshes:
    return [(each, True) for each in sizes]


# By number of ranks, then by case.
FAST: dict[int, dict[str, Meshes]] = {
    4: {
        "llama-float64": [*replicated((1, 2, 2), (2, 2, 1, 1, 2)), *sharded((2, 1, 2))],
        "llama-float32": replicated((1, 2, 2)),
        "qwen2-float64": replicated((2, 2, 1, 1, 2)),
        "critic-value": sharded((2, 1, 2)),
    },
}
EVERY = {
    2: [*replicated((1, 2, 1), (1, 1, 2), (2, 1, 1), (1, 2, 1, 1, 1)), *sharded((1, 1, 2))],
    3: sharded((1, 1, 3)),
    4: [
        *replicated(
            (1, 2, 2),
            (2, 2, 1, 1, 2),
            (2, 1, 2),
            (1, 1, 4),
            (2, 2, 1),
            (1, 2, 2, 1, 1),
            (1, 4, 1, 1, 2),
            (4, 1, 1, 2, 1),
            (2, 2, 1, 2, 1),
        ),
        *sharded((2, 1, 2), (1, 2, 2), (1, 2, 2, 1, 1), (1, 1, 4), (2, 2, 1)),
    ],
    8: [
        *replicated((2, 2, 2), (1, 4, 2), (2, 2, 2, 1, 2), (1, 4, 2, 1, 2), (4, 2, 1, 2, 1)),
        *sharded((2, 2, 2), (2, 2, 2, 1, 2)),
    ],
}
EVERY_CASE = (*FAST[4], "qwen2-float32", "qwen3-float64", "mistral-float64")
FULL = [pytest.mark.full, pytest.mark.timeout(1200)]
LAUNCHES = [
    *(pytest.param((size, FAST[size]), id=f"{size} ranks") for size in FAST),
    *(
        pytest.param(
            (size, dict.fromkeys(EVERY_CASE, EVERY[size])), id=f"{size} ranks, every mesh", marks=FULL
        )
        for size in EVERY
    ),
]


@dataclass(frozen=True)
class Run:
    """Results of the ranks of one launch: per rank, a report for each case and mesh."""

    directory: Path
    reports: list[dict[str, dict]]


@pytest.fixture(scope="module", params=LAUNCHES)
def launched(
    request: pytest.FixtureRequest, references: References, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    num_ranks, meshes = request.param
    cases = {name: (*references[name], meshes[name]) for name in meshes}
    directory = tmp_path_factory.mktemp("ranks")
    deadline_s = DEADLINE_S["fast" if meshes is FAST.get(num_ranks) else "every mesh"]
    return Run(
        directory, launch("integration.three_d_main", num_ranks, directory, cases, deadline_s=deadline_s)
    )


def policies(run: Run) -> list[tuple[str, str, dict]]:
    """Name, dtype and report of each case, mesh and rank of a policy."""
    return [
        (f"{name}, rank {rank}", name.split("-")[1], report)
        for rank, reports in enumerate(run.reports)
        for name, report in reports.items()
        if "-value-" not in name
    ]


def beyond(tolerance: dict[str, float], run: Run, *keys: str) -> dict[str, float]:
    """Distances from the reference above tolerance, by name."""
    return {
        f"{name}: {key}": report[key]
        for name, dtype, report in policies(run)
        for key in keys
        if not report[key] <= tolerance[dtype]
    }


def test_every_rank_loads_the_parts_that_are_its_own(launched: Run):
    assert {name: r["wrong_parts"] for name, _, r in policies(launched) if r["wrong_parts"]} == {}


def test_the_parts_gather_to_the_model(launched: Run):
    assert {name: r["wrong_whole"] for name, _, r in policies(launched) if r["wrong_whole"]} == {}


def test_log_probs_come_out_where_results_are_collected(launched: Run):
    for name, dtype, report in policies(launched):
        assert report["num_outputs"] == (report["num_micro_batches"] if report["sees_outputs"] else 0), name
        assert report["log_probs"] <= 10 * TOLERANCE[dtype], name


def test_loss_and_every_gradient_are_those_of_one_process(launched: Run):
    assert beyond(TOLERANCE, launched, "loss", "gradients") == {}


def test_packed_rows_that_share_all_they_read_have_the_numbers_of_padded_ones(launched: Run):
    found = {name: report["packed"] for name, dtype, report in policies(launched) if dtype == "float64"}
    assert {name: distance for name, distance in found.items() if not distance < 1e-5} == {}


def test_gradient_norms_and_losses_of_three_steps_are_those_of_one_process(launched: Run):
    assert beyond(STEPS_TOLERANCE, launched, "norms", "losses") == {}


def test_weights_after_three_steps_are_those_of_one_process(launched: Run):
    assert beyond(STEPS_TOLERANCE, launched, "weights") == {}


def test_a_step_that_fails_somewhere_is_refused_everywhere_and_moves_nothing(launched: Run):
    for name, _, report in policies(launched):
        fails_here = report["sees_outputs"] and report["data"][0] == report["data"][1] - 1
        assert report["refused"] == ["NonFiniteGradient", "KeyError" if fails_here else "PeerRankFailed"], (
            name
        )


def test_a_checkpoint_of_one_mesh_continues_on_another(launched: Run):
    assert beyond(STEPS_TOLERANCE, launched, "resumed") == {}


def test_a_snapshot_comes_back(launched: Run):
    assert all(report["restored"] for _, _, report in policies(launched))


def test_a_step_whose_gradient_was_begun_before_has_the_same_bits(launched: Run):
    assert all(report["begun_early"] for _, _, report in policies(launched))


def test_an_engine_that_starts_over_has_the_bits_of_a_new_one(launched: Run):
    assert all(report["started_over"] for _, _, report in policies(launched))


def test_an_engine_that_computes_in_bfloat16_exports_what_learns(launched: Run):
    found = [report["exports_masters"] for _, dtype, report in policies(launched) if dtype == "float32"]
    assert found
    assert all(found)


def test_all_ranks_know_the_hash_of_the_export(launched: Run):
    for name in launched.reports[0]:
        assert len({reports[name].get("exported") for reports in launched.reports}) == 1


def test_an_export_is_a_hugging_face_directory_with_the_same_logits(launched: Run):
    ids = torch.tensor([[5, 9, 3, 60]])
    for name in launched.reports[0]:
        if "-value-" in name:
            continue
        exported = AutoModelForCausalLM.from_pretrained(launched.directory / name / "export")
        whole = load_file(launched.directory / name / "whole.safetensors")
        assert all(torch.equal(x, whole[key]) for key, x in exported.state_dict().items()), name
        copy = AutoModelForCausalLM.from_config(exported.config).to(exported.dtype).eval()
        copy.load_state_dict(whole)
        assert torch.equal(copy(ids).logits, exported.eval()(ids).logits), name


def test_value_models_learn_as_in_one_process(launched: Run):
    for reports in launched.reports:
        assert {name: r for name, r in reports.items() if "-value-" in name and not r["weights"] < 1e-8} == {}


def test_the_export_of_a_value_model_is_one(launched: Run, references: References):
    expected = load_file(Path(references["critic-value"][1]) / "weights.safetensors")
    for name in launched.reports[0]:
        if "-value-" in name:
            loaded = load_value_model(launched.directory / name / "export", torch.float64).state_dict()
            for key, x in loaded.items():
                torch.testing.assert_close(x, expected[key], rtol=1e-8, atol=1e-10)
