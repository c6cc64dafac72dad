"""Ranks that train on one mesh generate on another, as one process with the whole model would."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from integration.hybrid_main import NUM_TURNS
from integration.ranks import launch

DEADLINE_S = 240
PARITY = 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
}
# p, t, d, pg, tg, and the transition, of weights that are sharded over d or not. By number of ranks, then by model.
SOME = [
    ((1, 2, 2, 1, 1), "hybridflow"),
    ((2, 2, 1, 1, 2), "hybridflow"),
    ((2, 2, 1, 2, 1), "hybridflow_v"),
    ((1, 2, 2, 1, 1), "gather_all"),
    ((1, 2, 2, 1, 1), "hybridflow sharded"),
]
FAST = {4: {"llama": [SOME[0], *SOME[2:]], "qwen2": SOME[1:2]}}
EVERY = {
    4: [
        *SOME,
        ((4, 1, 1, 1, 1), "hybridflow"),
        ((2, 2, 1, 2, 1), "hybridflow"),
        ((2, 1, 2, 1, 1), "hybridflow"),
        ((1, 2, 2, 1, 1), "hybridflow_v"),
        ((2, 2, 1, 1, 2), "hybridflow_v"),
        ((4, 1, 1, 1, 1), "hybridflow_v"),
    ],
    8: [
        *(((2, 2, 2, 1, 1), kind) for kind in ("hybridflow", "hybridflow_v", "gather_all")),
        *(((1, 4, 2, 1, 2), kind) for kind in ("hybridflow", "hybridflow_v", "gather_all")),
        ((2, 2, 2, 1, 2), "hybridflow"),
        ((4, 2, 1, 2, 1), "hybridflow"),
        ((2, 2, 2, 2, 2), "hybridflow"),
        *(((2, 2, 2, 1, 2), f"{kind} sharded") for kind in ("hybridflow", "hybridflow_v", "gather_all")),
    ],
}
FULL = [pytest.mark.full, pytest.mark.timeout(900)]
LAUNCHES = [
    *(pytest.param((size, FAST[size]), id=f"{size} ranks") for size in FAST),
    *(
        pytest.param((size, dict.fromkeys(MODELS, EVERY[size])), id=f"{size} ranks, everything", marks=FULL)
        for size in EVERY
    ),
]

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@dataclass(frozen=True)
class Run:
    """Per rank, a report for each model and pair of meshes."""

    reports: list[dict[str, dict[str, Any]]]

    def each(self) -> list[tuple[str, dict[str, Any]]]:
        return [
            (f"{name}, rank {rank}", report)
            for rank, reports in enumerate(self.reports)
            for name, report in reports.items()
        ]

    def first(self, name: str) -> dict[str, Any]:
        """Rank 0's report of the same case."""
        return self.reports[0][name.rpartition(", rank ")[0]]


@pytest.fixture(scope="module", params=LAUNCHES)
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    num_ranks, meshes = request.param
    directory = tmp_path_factory.mktemp("hybrid")
    for name, make in MODELS.items():
        torch.manual_seed(7)
        make().save_pretrained(directory / name)
    plan = {directory / name: meshes[name] for name in meshes}
    deadline_s = DEADLINE_S * num_ranks / 4
    return Run(launch("integration.hybrid_main", num_ranks, plan, deadline_s=deadline_s))


def test_every_rank_gathers_the_parts_that_it_generates_with(launched: Run):
    assert {name: report["wrong"] for name, report in launched.each() if report["wrong"]} == {}


def test_a_rank_receives_what_it_lacks_and_nothing_else(launched: Run):
    received = {name: report for name, report in launched.each() if " hybridflow," in name}
    assert any(report["received"] for report in received.values())
    for name, report in received.items():
        assert report["received"] == report["generation_bytes"] - report["trained"], name


def test_log_probs_of_generation_are_those_of_training_after_every_update(launched: Run):
    far = {name: report["parity"] for name, report in launched.each() if not report["parity"] <= PARITY}
    assert far == {}


def test_all_ranks_train_the_same_whole_model(launched: Run):
    for name, report in launched.each():
        assert report["whole"] == launched.first(name)["whole"], name
        assert len(set(report["whole"])) == NUM_TURNS, "updates must change weights"


def test_texts_are_those_of_one_process_after_every_update(launched: Run):
    assert {report["plain_turn"] for _, report in launched.each()} == set(range(NUM_TURNS))
    for name, report in launched.each():
        assert report["texts"] == launched.first(name)["texts"], name
        assert report["texts"][report["plain_turn"]] == report["plain_texts"], name
        assert len({json.dumps(texts) for texts in report["texts"]}) > 1, "updates must change texts"


def test_weights_of_training_serve_generation_where_they_are(launched: Run):
    for name, report in launched.each():
        assert report["contained"] == (1.0 if name.split()[-3] == "hybridflow," else 0.0), name


def test_a_rank_that_sleeps_keeps_nothing_of_what_it_gathered(launched: Run):
    for name, report in launched.each():
        if not report["keeps_weights"]:
            assert report["freed"] == pytest.approx(report["gathered_bytes"], rel=0.01), name
            assert report["left"] == 0, name


def test_weights_that_training_has_too_stay_through_sleep(launched: Run):
    for name, report in launched.each():
        if report["keeps_weights"]:
            assert " hybridflow," in name
            assert report["freed"] == 0
            assert report["left"] > 0


def test_a_cancel_of_one_rank_stops_its_replica(launched: Run):
    for name, report in launched.each():
        mesh = name.split(" / ")[-1].split(",")[0].split()[0] if " / " in name else ""
        pipeline, tensor = (int(size) for size in mesh.split("-")[:2]) if mesh else (2, 2)
        rank = int(name.rpartition(" ")[2])
        assert bool(report["stopped"]) == (rank < pipeline * tensor), name
