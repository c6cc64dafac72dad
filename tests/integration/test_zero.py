"""Ranks that train on ZeRO compute what one process with plain transformers does, at every stage."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from integration.ranks import launch
from integration.references import STEPS_TOLERANCE, TOLERANCE, References
from services.models.families import load_value_model

pytest.importorskip("deepspeed")

DEADLINE_S = {"fast": 240, "full": 1100}
"""Of a launch: beside other tests ranks mostly wait for each other."""

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

# Case, stage and whether the optimizer is offloaded.
FAST = [
    ("llama-float64", 3, False),
    ("qwen2-float32", 2, True),
    ("llama-value", 2, False),
]
CASES = ("llama-float64", "llama-float32", "qwen2-float64", "qwen2-float32", "llama-value")
EVERY = [(case, stage, offloads) for case in CASES for stage in (1, 2, 3) for offloads in (False, True)]
THREE = [("llama-float64", stage, False) for stage in (1, 2, 3)] + [("llama-float32", 3, False)]
FULL = [pytest.mark.full, pytest.mark.timeout(1200)]
LAUNCHES = [
    pytest.param((2, FAST), id="2 ranks"),
    pytest.param((2, EVERY), id="2 ranks, everything", marks=FULL),
    # Where an average is not undone exactly.
    pytest.param((3, THREE), id="3 ranks", marks=FULL),
]


@dataclass(frozen=True)
class Run:
    """Results of the ranks of one launch: per rank, a report for each case, by its name."""

    directory: Path
    reports: list[dict[str, dict]]

    def policies(self) -> list[tuple[str, str, dict]]:
        """Name, dtype and report of each case and rank of a policy."""
        return [
            (f"{name}, rank {rank}", name.split("-")[1], report)
            for rank, reports in enumerate(self.reports)
            for name, report in reports.items()
            if "-value-" not in name
        ]

    def beyond(self, tolerance: dict[str, float], *keys: str) -> dict[str, float]:
        """Distances from the reference above tolerance, by name."""
        return {
            f"{name}: {key}": report[key]
            for name, dtype, report in self.policies()
            for key in keys
            if not report[key] <= tolerance[dtype]
        }


@pytest.fixture(scope="module", params=LAUNCHES)
def launched(
    request: pytest.FixtureRequest, references: References, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    num_ranks, chosen = request.param
    directory = tmp_path_factory.mktemp("ranks")
    plan = [(name, stage, offloads, *references[name]) for name, stage, offloads in chosen]
    deadline_s = DEADLINE_S["fast" if chosen == FAST else "full"]
    return Run(directory, launch("integration.zero_main", num_ranks, directory, plan, deadline_s=deadline_s))


def test_the_ranks_have_different_numbers_of_micro_batches(launched: Run):
    assert all(
        reports[name]["num_micro_batches"] > launched.reports[-1][name]["num_micro_batches"]
        for reports in launched.reports[:1]
        for name in reports
        if "-value-" not in name
    )


def test_every_element_is_kept_by_one_rank(launched: Run):
    for name in launched.reports[0]:
        if "-value-" not in name:
            kept = [reports[name]["num_kept"] for reports in launched.reports]
            assert sum(kept) == launched.reports[0][name]["num_parameters"]
            assert max(kept) - min(kept) < 0.01 * sum(kept)


def test_the_parts_gather_to_the_model(launched: Run):
    assert {name: r["wrong_whole"] for name, _, r in launched.policies() if r["wrong_whole"]} == {}


def test_stage_3_leaves_no_weight_whole(launched: Run):
    for name, _, report in launched.policies():
        visible = [*report["num_visible"], report["frozen"]["num_visible"]]
        assert visible == [0 if "-3" in name else report["num_parameters"]] * len(visible), name


def test_stage_3_gathers_few_layers_at_a_time(launched: Run):
    for name, _, report in launched.policies():
        if "-3" in name:
            # Two of the four layers, and a smaller embedding.
            assert report["most_visible"] < 0.6 * report["num_parameters"], name


def test_stage_3_holds_no_weights_between_forward_and_backward(launched: Run):
    assert {name: r["held"] for name, _, r in launched.policies() if "-3" in name and r["held"]} == {}


def test_log_probs_are_those_of_rows_computed_alone(launched: Run):
    for name, dtype, report in launched.policies():
        assert report["log_probs"] <= 10 * TOLERANCE[dtype], name
        assert report["frozen"]["log_probs"] <= 10 * TOLERANCE[dtype], name


def test_loss_and_every_gradient_are_those_of_one_process(launched: Run):
    assert launched.beyond(TOLERANCE, "loss", "gradients") == {}


def test_gradient_norms_and_losses_of_three_steps_are_those_of_one_process(launched: Run):
    assert launched.beyond(STEPS_TOLERANCE, "norms", "losses") == {}


def test_weights_after_three_steps_are_those_of_one_process(launched: Run):
    assert launched.beyond(STEPS_TOLERANCE, "weights") == {}


def test_every_rank_reports_the_same_steps(launched: Run):
    for name, _, report in launched.policies():
        assert report["steps"] == launched.reports[0][name.split(",")[0]]["steps"], name


def test_a_gradient_that_is_not_finite_on_one_rank_is_refused_on_all_and_moves_nothing(launched: Run):
    assert {
        name: r["refused"] for name, _, r in launched.policies() if r["refused"] != ["NonFiniteGradient"]
    } == {}


def test_the_model_computes_with_the_weights_that_are_kept(launched: Run):
    assert all(report["published"] for _, _, report in launched.policies())


# One rank restores once more than the others, as one does whose call fails alone.
def test_snapshots_and_checkpoints_continue_bit_for_bit(launched: Run):
    assert {name: r for name, _, r in launched.policies() if not (r["restored"] and r["reloaded"])} == {}


def test_a_step_whose_gradient_was_begun_before_has_the_same_bits(launched: Run):
    assert all(report["begun_early"] for _, _, report in launched.policies())


def test_an_engine_that_starts_over_has_the_bits_of_a_new_one(launched: Run):
    assert all(report["started_over"] for _, _, report in launched.policies())


def test_checkpoints_are_those_of_the_other_engines(launched: Run):
    for name, dtype, report in launched.policies():
        assert report["hashes"] == [True, True], name
        assert max(report["theirs"] + report["ours"]) <= STEPS_TOLERANCE[dtype], name


def test_an_export_is_a_hugging_face_directory_with_the_same_logits(launched: Run):
    ids = torch.tensor([[5, 9, 3, 60]])
    for name in launched.reports[0]:
        if "-value-" in name:
            continue
        assert len({reports[name]["exported"] for reports in launched.reports}) == 1
        exported = AutoModelForCausalLM.from_pretrained(launched.directory / name / "export")
        whole = load_file(launched.directory / name / "whole.safetensors")
        copy = AutoModelForCausalLM.from_config(exported.config).to(exported.dtype).eval()
        copy.load_state_dict(whole)
        assert torch.equal(copy(ids).logits, exported.eval()(ids).logits), name


def test_value_models_learn_as_in_one_process(launched: Run, references: References):
    expected = load_file(Path(references["llama-value"][1]) / "weights.safetensors")
    for name, report in launched.reports[0].items():
        if "-value-" in name:
            assert report["weights"] < 1e-8, name
            for key, x in (
                load_value_model(launched.directory / name / "export", torch.float64).state_dict().items()
            ):
                torch.testing.assert_close(x, expected[key], rtol=1e-8, atol=1e-10)
