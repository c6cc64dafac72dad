"""Rows that a rank refuses to train on are kept in files that load; weights that change by themselves are found, also
between two sessions; and when a run looks."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from unit.test_model_worker import COUNT, make_critic, make_rows, same, update

from controller.training.parity import DriftCheck
from controller.training.verification import WeightVerifier
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.rows import FetchedRows
from rlhf.errors import CorruptWeights, Refused, RlhfError, UpdateRejected
from rlhf.v1 import actor_pb2, common_pb2
from services.actor.parity import drifting_rows
from services.actor.worker import ActorWorker
from services.engines.base import EngineOffloaded, HeldTensor
from services.reference.worker import ReferenceWorker
from services.roles.weight_check import WeightCheck, _odd_ones
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallRows
from services.storage.rejected_rows import read_rejected_rows, write_rejected_rows
from settings.actor import ActorTable
from settings.reference import ReferenceTable

pytestmark = pytest.mark.usefixtures("process_group")


def make_call(step: int = 4) -> CallContext:
    return CallContext(common_pb2.Call(call_id="c", seed=1, step=step), time.monotonic() + 60)


def verify(worker: Any) -> int:
    none = CallRows(FetchedRows(0, {}, {}, 0), np.empty(0, np.int64))
    return worker.around(lambda: worker.verify_weights(none, None, make_call())).fields["verified_bytes"]


def flip(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1).view(torch.int16)[-1] ^= 1


def keeps_rows(worker: Any, directory: Path) -> None:
    worker.output_roots, worker.row_keeper.directory = (directory,), str(directory / "rejected")


class TestRejectedRows:
    def test_columns_of_every_kind_come_back(self, tmp_path: Path) -> None:
        columns: dict[str, Any] = {
            "text": ["a", "ä", ""],
            "ids": Jagged(np.arange(6, dtype=np.int32), np.array([3, 0, 3])),
            "scores": np.array([[1.0, 2.0], [3.0, np.nan], [5.0, 6.0]], np.float32),
            "log_probs": Jagged(np.array([0, 1, 2, 3, 4, -np.inf]), np.array([3, 0, 3])),
        }
        path = tmp_path / "rejected" / "step-7" / "actor-rank-0.json"
        write_rejected_rows(path, columns, np.array([2, 1]), np.array([10, 20, 30]), {"step": 7})
        kept = read_rejected_rows(path)
        assert kept.facts == {"step": 7, "rows": [30, 20], "not_finite": [30, 20]}
        assert kept.columns["text"] == ["", "ä"]
        ids, log_probs, scores = (kept.columns[name] for name in ("ids", "log_probs", "scores"))
        assert isinstance(ids, Jagged)
        assert isinstance(log_probs, Jagged)
        assert (ids.values.tolist(), ids.lengths.tolist()) == ([3, 4, 5], [3, 0])
        assert log_probs.values.tolist() == [3, 4, -math.inf]
        np.testing.assert_array_equal(scores, np.array([[5, 6], [3, np.nan]], np.float32))
        assert {each.name for each in path.parent.iterdir()} == {path.name, "actor-rank-0.safetensors"}

    def test_a_rank_without_rows_keeps_none(self, tmp_path: Path) -> None:
        columns = {"advantages": np.zeros(3, np.float32), "scores": np.zeros((3, 2), np.float32)}
        path = tmp_path / "actor-rank-1.json"
        write_rejected_rows(path, columns, np.empty(0, np.int64), np.array([10, 20, 30]), {"step": 7})
        kept = read_rejected_rows(path)
        assert kept.facts == {"step": 7, "rows": [], "not_finite": []}
        for name, shape in (("advantages", (0,)), ("scores", (0, 2))):
            values = kept.columns[name]
            assert isinstance(values, np.ndarray)
            assert values.shape == shape

    def test_the_error_of_the_update_says_where_they_cannot_be_written(
        self, tiny_llama_dir: Path, tmp_path: Path
    ) -> None:
        critic, rows = make_critic(tiny_llama_dir, "fsdp"), make_rows()
        keeps_rows(critic, tmp_path)
        returns = rows["returns"]
        assert isinstance(returns, Jagged)
        returns.values[0] = np.nan
        blocked = tmp_path / "rejected" / "step-0" / "critic-rank-0.partial"
        blocked.mkdir(parents=True)
        with pytest.raises(
            UpdateRejected,
            match=rf"policy version 0; its rows could not be kept: {blocked} could not be written",
        ):
            update(critic, rows, 1)

    @pytest.mark.parametrize("mini_batches", [1, 2])
    def test_those_of_a_gradient_that_is_not_finite_are_kept(
        self, tiny_llama_dir: Path, tmp_path: Path, mini_batches: int
    ) -> None:
        critic, rows = make_critic(tiny_llama_dir, "fsdp"), make_rows()
        keeps_rows(critic, tmp_path)
        returns = rows["returns"]
        assert isinstance(returns, Jagged)
        returns.values[returns.offsets[3]] = np.nan
        before = critic.engine.snapshot().tensors
        with pytest.raises(
            UpdateRejected,
            match=r"^gradient norm is nan at optimizer step \d: not finite are those of \S+ and \d+ more on rank 0; "
            rf"every rank is back on policy version 0; its rows are in {tmp_path}/rejected/step-0$",
        ):
            update(critic, rows, mini_batches)
        assert same(critic.engine.snapshot().tensors, before)
        (path,) = (tmp_path / "rejected" / "step-0").glob("critic-rank-0.json")
        kept = read_rejected_rows(path)
        assert kept.facts["not_finite"] == [3]
        assert len(kept.facts["rows"]) == COUNT // mini_batches
        assert kept.facts["why"].startswith("gradient norm is nan")
        assert kept.columns.keys() == {"prompt_ids", "response_ids", "values", "returns"}

    def test_those_of_a_gradient_that_is_too_large_are_kept(
        self, tiny_llama_dir: Path, tmp_path: Path
    ) -> None:
        critic = make_critic(tiny_llama_dir, "fsdp", reject_grad_norm=1e-6)
        keeps_rows(critic, tmp_path)
        before = critic.engine.snapshot().tensors
        with pytest.raises(
            UpdateRejected, match=r"^gradient norm is \S+ .*, above reject_grad_norm, 1e-06; every rank"
        ):
            update(critic, make_rows())
        assert same(critic.engine.snapshot().tensors, before)
        kept = read_rejected_rows(tmp_path / "rejected" / "step-0" / "critic-rank-0.json")
        assert sorted(kept.facts["rows"]) == list(range(COUNT))

    def test_an_error_says_why_rows_could_not_be_kept(self, tiny_llama_dir: Path, tmp_path: Path) -> None:
        critic = make_critic(tiny_llama_dir, "fsdp", reject_grad_norm=1e-6)
        with pytest.raises(UpdateRejected, match=r"policy version 0$"):
            update(critic, make_rows())
        keeps_rows(critic, tmp_path)
        critic.output_roots = (tmp_path / "other",)
        with pytest.raises(
            UpdateRejected, match=r"; its rows could not be kept: directory: .* is not below one of"
        ):
            update(critic, make_rows())
        assert not list(tmp_path.iterdir())

    def test_those_that_drift_are_kept(self, tiny_llama_dir: Path, tmp_path: Path) -> None:
        table = {"role": "actor", "address": "127.0.0.1:1", "model": tiny_llama_dir}
        actor = ActorWorker(ActorTable.model_validate(table), Ranks(0, 1, 0))
        keeps_rows(actor, tmp_path)
        ids = Jagged(np.arange(3, 9, dtype=np.int32), np.array([2, 4]))
        plain: dict[str, Any] = {"prompt_ids": ids, "response_ids": ids}
        request = actor_pb2.ComputeLogProbRequest(temperature=1.0, max_drift=0.5)

        def compute(values: dict[str, Any]) -> Any:
            dtypes = {name: str(x.values.dtype) for name, x in values.items()}
            rows = CallRows(FetchedRows(2, values, dtypes, 0), np.arange(5, 7))
            return actor.compute_log_prob(rows, request, make_call())

        right = compute(plain).columns["log_probs"].values.numpy()
        far = right.copy()
        far[-1] += 1
        near, drifting = (
            compute({**plain, "rollout_log_probs": Jagged(x, ids.lengths)}) for x in (right, far)
        )
        assert near.fields["parity"].kept == ""
        assert drifting.fields["parity"].kept == f"; its rows are in {tmp_path}/rejected/step-4"
        kept = read_rejected_rows(tmp_path / "rejected" / "step-4" / "actor-rank-0.json")
        assert kept.facts["rows"] == [6]
        with pytest.raises(RlhfError, match=r"max_log_prob_drift, 0.5; its rows are in .*/rejected/step-4$"):
            DriftCheck(step=4, limit=0.5)(record_of(drifting.fields["parity"]))

    def test_a_drift_of_nan_is_one(self) -> None:
        lengths = np.array([1, 2, 0, 1])
        rollout = Jagged(torch.tensor([0.0, 0.0, math.nan, 0.0]), lengths)
        training = Jagged(torch.tensor([0.0, 0.3, 0.0, -0.2]), lengths)
        assert drifting_rows(rollout, training, 0.25).tolist() == [1]
        assert drifting_rows(rollout, training, 0.1).tolist() == [1, 3]
        assert drifting_rows(rollout, training, 0.0).tolist() == []


def record_of(parity: actor_pb2.RolloutParity) -> Any:
    from unit.test_parity import record

    return record(parity)


class TestVerifyWeights:
    def test_a_bit_that_flips_before_an_update_ends_it(self, tiny_llama_dir: Path) -> None:
        critic = make_critic(tiny_llama_dir, "fsdp")
        assert verify(critic) > 3 * 2 * critic.engine.num_parameters
        update(critic, make_rows())
        verify(critic)
        each = next(iter(critic.engine.held()))
        flip(each.tensor)
        with pytest.raises(
            CorruptWeights, match=rf"^weights in memory are corrupt: {each.name} on rank 0 has changed"
        ):
            update(critic, make_rows())
        flip(each.tensor)
        update(critic, make_rows())
        assert critic.policy_version == 2

    def test_an_engine_that_is_offloaded_is_not_compared(
        self, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse() -> None:
            raise EngineOffloaded("the engine is offloaded")

        critic = make_critic(tiny_llama_dir, "fsdp")
        verify(critic)
        monkeypatch.setattr(critic.engine, "check_onloaded", refuse)
        with pytest.raises(Refused, match="offloaded"):
            verify(critic)
        with pytest.raises(Refused, match="offloaded"):
            update(critic, make_rows())

    def test_new_weights_are_no_corruption(self, tiny_llama_dir: Path, tmp_path: Path) -> None:
        critic = make_critic(tiny_llama_dir, "fsdp")
        critic.engine.save(tmp_path / "saved", {"policy_version": 3})
        for change in (
            lambda: update(critic, make_rows()),
            lambda: critic.load(tmp_path / "saved"),
            critic.start_over,
        ):
            verify(critic)
            change()
        verify(critic)

    def test_a_reference_is_compared_with_its_start_also_in_a_later_session(
        self, tiny_llama_dir: Path, tmp_path: Path
    ) -> None:
        table = {"role": "reference", "address": "127.0.0.1:1", "model": tiny_llama_dir}
        reference = ReferenceWorker(ReferenceTable.model_validate(table), Ranks(0, 1, 0))
        reference.engine.save(tmp_path / "saved", {"policy_version": 0})
        verify(reference)
        each = next(each for each in reference.engine.held() if each.tensor.ndim > 1)
        flip(each.tensor)
        reference.start_over()
        with pytest.raises(
            CorruptWeights, match=f"{each.name} on rank 0 has changed since it was last verified"
        ):
            verify(reference)
        reference.load(tmp_path / "saved")
        verify(reference)
        reference.start_over()
        verify(reference)

    def test_the_weights_that_an_actor_generates_with_are_those_it_trains(self, tiny_llama_dir: Path) -> None:
        table = {"role": "actor", "address": "127.0.0.1:1", "model": tiny_llama_dir}
        actor = ActorWorker(ActorTable.model_validate(table), Ranks(0, 1, 0))
        verify(actor)
        actor.colocated.refresh(make_call())
        verify(actor)
        each = next(iter(actor.rollout.held()))
        flip(each.tensor)
        with pytest.raises(CorruptWeights, match=f"{each.name} on rank 0 differs from the training engine's"):
            verify(actor)

    def test_every_single_bit_counts(self) -> None:
        x = torch.zeros(3, dtype=torch.bfloat16)
        for bit in range(15):
            check = WeightCheck()
            check.verify([HeldTensor("x", "whole", x, learns=False)])
            x.view(torch.int16)[1] ^= 1 << bit
            with pytest.raises(CorruptWeights, match="x on rank 0"):
                check.verify([HeldTensor("x", "whole", x, learns=False)])
            x.zero_()

    def test_the_odd_replica_is_named_where_most_are_equal(self) -> None:
        assert _odd_ones([[0], [1]]) == "differs between ranks 0, 1"
        assert _odd_ones([[2], [0, 1, 3]]) == "on rank 2 differs from that of ranks 0, 1, 3"
        assert _odd_ones([[0, 3], [1, 2]]) == "differs between ranks 0, 1, 2, 3"


class TestWhen:
    @pytest.mark.parametrize(("every", "expected"), [(0, []), (3, [3, 5, 6, 7])])
    def test_weights_are_verified_when_due_before_checkpoints_and_last(
        self, every: int, expected: list[int]
    ) -> None:
        calls: list[int] = []

        class Cluster:
            def verify_weights(self) -> None:
                calls.append(step)

        class Saver:
            def is_due(self, step: int, *, is_last: bool) -> bool:
                return step % 5 == 0

        cluster: Any = Cluster()
        saver: Any = Saver()
        for step in range(1, 8):
            WeightVerifier(every, cluster, saver).after_step(step, is_last=step == 7)
        assert calls == expected


def test_the_facts_are_json_that_any_reader_takes(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_rejected_rows(path, {"x": np.array([np.nan])}, np.arange(1), np.arange(1), {})
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["not_finite"] == [0]
