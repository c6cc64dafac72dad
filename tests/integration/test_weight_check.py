"""A flipped bit in the memory of one of two ranks is found and named by all of them, in weights, moments and copies."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from integration.ranks import launch

DEADLINE_S = 120
WITH_ZERO = importlib.util.find_spec("deepspeed") is not None
REPLICAS = {
    "3d": ["weight", "exp_avg_sq"],
    "3d in bfloat16": ["weight", "copy"],
    "tensor parallel": ["weight.model.norm"],
    "pipeline": ["weight.model.embed_tokens"],
    "zero 2": ["copy"],
}
"""Kinds of tensors of which both ranks have replicas, by engine. The embedding is tied to the output layer."""
SHARDS = {
    "fsdp": ["weight", "exp_avg"],
    "3d, shards over data": ["weight"],
    "zero 2": ["weight"],
    "zero 3": ["weight", "partition"],
}
"""Kinds of tensors of which no other rank has one."""
needs_zero = pytest.mark.skipif(not WITH_ZERO, reason="DeepSpeed is not installed")

pytestmark = pytest.mark.timeout(DEADLINE_S + 30)


def cases(kinds: dict[str, list[str]]) -> list[Any]:
    return [
        pytest.param(engine, kind, marks=needs_zero if engine.startswith("zero") else ())
        for engine, all_kinds in kinds.items()
        for kind in all_kinds
    ]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    torch.manual_seed(7)
    directories = [tmp_path_factory.mktemp(name) for name in ("llama", "tied")]
    for directory in directories:
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=directory is directories[1],
        )
        LlamaForCausalLM(config).save_pretrained(directory)
    return launch("integration.weight_check_main", 2, *directories, WITH_ZERO, deadline_s=DEADLINE_S)


def of_both(reports: list[dict[str, Any]], *path: str) -> Any:
    """An entry of the reports, which is the same on both ranks."""
    one, two = reports
    for key in path:
        one, two = one[key], two[key]
    assert one == two
    return one


@pytest.mark.parametrize("engine", sorted({*REPLICAS, *SHARDS}))
def test_intact_weights_pass_before_and_after_steps(reports: list[dict[str, Any]], engine: str) -> None:
    if engine.startswith("zero") and not WITH_ZERO:
        pytest.skip("DeepSpeed is not installed")
    for when in ("intact", "stepped", "flipped back"):
        assert of_both(reports, engine, when) == ""


@pytest.mark.parametrize(("engine", "kind"), cases(REPLICAS))
def test_a_bit_that_differs_between_replicas_is_named_by_every_rank(
    reports: list[dict[str, Any]], engine: str, kind: str
) -> None:
    name = re.escape(of_both(reports, engine, kind, "name"))
    assert re.fullmatch(
        rf"weights in memory are corrupt: {name} differs between ranks 0, 1",
        of_both(reports, engine, kind, "replicas"),
    )


@pytest.mark.parametrize("when", ["over time", "before an update"])
@pytest.mark.parametrize(("engine", "kind"), [*cases(REPLICAS), *cases(SHARDS)])
def test_a_bit_that_has_changed_since_is_named_by_every_rank(
    reports: list[dict[str, Any]], engine: str, kind: str, when: str
) -> None:
    """Also in a shard that no other rank has."""
    name = re.escape(reports[1][engine][kind]["name"])
    assert re.match(
        rf"weights in memory are corrupt: (.*; )?{name} on rank 1 has changed since it was last verified",
        of_both(reports, engine, kind, when),
    )


@pytest.mark.parametrize("way", ["in place", "copied"])
def test_weights_that_an_actor_generates_with_are_compared_with_those_it_trains(
    reports: list[dict[str, Any]], way: str
) -> None:
    name = r"generation\.model\.layers\.0\.self_attn\.q_proj\.weight"
    assert re.fullmatch(
        rf"weights in memory are corrupt: {name} on rank 1 differs from the training engine's",
        of_both(reports, "hybrid", way),
    )
    assert of_both(reports, "hybrid", f"{way}, intact") == ""
    assert of_both(reports, "hybrid", f"{way}, loaded again") == ""


def test_gradients_that_are_not_finite_are_named_by_every_rank(reports: list[dict[str, Any]]) -> None:
    text = of_both(reports, "not finite")
    assert re.match(
        r"gradient norm is nan at optimizer step 3: not finite are those of \S+ and \d+ more on rank 0; ",
        text,
    )
