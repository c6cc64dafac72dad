"""A rollout engine that sleeps while its actor trains: its memory is free then, and no number changes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from unit.one_rank import OneRank

from rlhf.errors import Refused, RlhfError
from rlhf.v1 import worker_pb2
from services.engines import offload
from settings.actor import ActorTable

ENGINES: dict[str, dict[str, Any]] = {
    "fsdp": {"engine": "fsdp"},
    "lora": {"engine": "fsdp", "lora": {"rank": 4}},
    "3d": {"engine": "3d", "mesh": "1-1-1"},
    "3d not in place": {"engine": "3d", "mesh": "1-1-1", "transition": "gather_all"},
    "zero": {"engine": "zero", "zero": {"stage": 2}},
}
FREES = {"fsdp": True, "lora": True, "3d": False, "3d not in place": True, "zero": True}
"""Whether generation weights are apart from those of training."""
GENERATED = ("response_ids", "rollout_log_probs")
NO_ROWS: Any = None


@pytest.fixture(autouse=True)
def group(process_group: None) -> None:
    """Every test has a process group of one rank."""


@contextmanager
def one_rank(directory: Path, **keys: Any) -> Iterator[OneRank]:
    made = OneRank(directory, actor=keys)
    try:
        yield made
    finally:
        made.close()


def generation_bytes(made: OneRank) -> int:
    """Bytes of memory that the rollout engine generates with."""
    storages = [each.tensor.untyped_storage() for each in made.actor.rollout.held()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def column(made: OneRank, name: str) -> list[float]:
    return made.read(name).values.tolist()


def iterations(made: OneRank) -> list[Any]:
    """Responses of two iterations of PPO, and the metrics of their updates."""
    found: list[Any] = []
    for _ in range(2):
        made.generate()
        found += [column(made, name) for name in GENERATED]
        # Once more with the same weights, as an evaluation would.
        made.log_probs()
        made.generate()
        found += [column(made, name) for name in GENERATED]
        made.log_probs()
        made.values()
        made.advantages()
        found.append(made.update_actor())
    return found


def while_computing(made: OneRank, look: Callable[[], Any], patch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list to which each pass of the training engine appends what `look` returns before it."""
    seen: list[Any] = []
    for name in ("infer", "step"):
        compute = getattr(made.actor.engine, name)

        def looking(*given: Any, compute: Any = compute, **named: Any) -> Any:
            seen.append(look())
            return compute(*given, **named)

        patch.setattr(made.actor.engine, name, looking)
    return seen


@pytest.mark.parametrize("engine", ENGINES)
def test_memory_of_generation_is_free_while_the_actor_computes_and_numbers_are_the_same(
    engine: str, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "zero" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    with one_rank(tiny_llama_dir, **ENGINES[engine]) as awake:
        expected = iterations(awake)
        assert not awake.actor.rollout.is_asleep
    with one_rank(tiny_llama_dir, rollout_sleep=True, **ENGINES[engine]) as made:
        made.generate()
        held = generation_bytes(made)
        seen = while_computing(
            made, lambda: (made.actor.rollout.is_asleep, generation_bytes(made)), monkeypatch
        )
        made.steps = 0
        assert iterations(made) == expected
        assert {asleep for asleep, _ in seen} == {True}
        assert held > 20_000
        # The placeholders of shards that are gathered anew have a few bytes.
        most = 100 if FREES[engine] else held
        assert all(nbytes <= most for _, nbytes in seen)


def test_a_rank_without_memory_to_wake_in_says_so_and_wakes_once_there_is(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_rank(tiny_llama_dir, rollout_sleep=True) as made:
        made.generate()
        expected = column(made, "response_ids")
        made.log_probs()

        def fail(*given: Any) -> None:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")

        with monkeypatch.context() as patch:
            patch.setattr(offload, "_grow", fail)
            for _ in range(2):
                with pytest.raises(
                    RlhfError,
                    match=r"the rollout engine sleeps .*finds no memory to wake in: tried to allocate",
                ):
                    made.generate()
                assert made.actor.rollout.is_asleep
                assert generation_bytes(made) == 0
            made.log_probs()
        made.steps = 0
        made.generate()
        assert column(made, "response_ids") == expected


def test_weights_that_could_not_be_loaded_after_a_sleep_are_loaded_by_the_next_call(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_rank(tiny_llama_dir, rollout_sleep=True) as made:
        made.generate()
        expected = column(made, "response_ids")
        made.log_probs()

        def fail() -> None:
            raise RlhfError("the call was cancelled")

        with monkeypatch.context() as patch:
            patch.setattr(made.actor.engine, "rollout_weights", fail)
            with pytest.raises(RlhfError, match="cancelled"):
                made.generate()
        made.steps = 0
        made.generate()
        assert column(made, "response_ids") == expected


def test_an_actor_that_was_offloaded_generates_after_onload_alone(tiny_llama_dir: Path) -> None:
    with one_rank(tiny_llama_dir, rollout_sleep=True) as made:
        made.generate()
        expected = column(made, "response_ids")
        for rests_before in (True, False):
            if rests_before:
                made.log_probs()
            made.call(made.actor, "offload", worker_pb2.OffloadRequest())
            with pytest.raises(Refused, match="the rollout engine is asleep; wake it first"):
                made.generate()
            made.call(made.actor, "onload", worker_pb2.OnloadRequest())
            assert generation_bytes(made) == 0
            made.steps = 0
            made.generate()
            assert column(made, "response_ids") == expected


def test_a_checkpoint_and_a_new_start_leave_an_actor_that_generates(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    with one_rank(tiny_llama_dir, rollout_sleep=True) as made:
        made.generate()
        expected = column(made, "response_ids")
        made.actor.engine.save(tmp_path / "saved", {"policy_version": 0})
        made.log_probs()
        for begin in (lambda: made.actor.load(tmp_path / "saved"), made.actor.start_over):
            begin()
            made.steps = 0
            made.generate()
            assert column(made, "response_ids") == expected


def test_weights_are_verified_while_the_engine_is_awake_alone(tiny_llama_dir: Path) -> None:
    with one_rank(tiny_llama_dir, rollout_sleep=True) as made:
        made.generate()
        made.call(made.actor, "verify_weights", worker_pb2.VerifyWeightsRequest())
        made.log_probs()
        made.call(made.actor, "verify_weights", worker_pb2.VerifyWeightsRequest())
        assert made.actor.rollout.is_asleep


def test_an_actor_that_does_not_generate_has_nothing_that_sleeps(tiny_llama_dir: Path) -> None:
    with pytest.raises(ValidationError, match="rollout_sleep: is for an actor that generates"):
        ActorTable(
            role="actor",
            address="127.0.0.1:1",
            model=tiny_llama_dir,
            rollout_engine="none",
            rollout_sleep=True,
        )
