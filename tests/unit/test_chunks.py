"""Rows in chunks: calls on the first rows start while later ones are generated, and all numbers are those of one
call."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from unit.simulated_run import QUICKSTARTS, ROLLOUT, VALUES, Simulation, Weather, simulate

from client.session import Session, StepContext
from controller.config.config import load
from controller.role_groups.chunked_call import batch_of, is_row_wise
from controller.role_groups.chunks import ChunkedColumn, chunk_sizes
from controller.role_groups.dataflow import CallRecord, FutureBatch
from controller.role_groups.futures import Promise, resolved
from controller.role_groups.group import CallingGroup
from controller.role_groups.verdicts import RewardCodec
from controller.training.deferral import future_columns
from controller.training.run import Run
from controller.training.step import Step
from nccl_transfer.refs.batch import Batch, Column, LocalColumn
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from rlhf.contract import group_methods
from rlhf.errors import ConfigError, InvalidRequest, RewardFailed, RlhfError
from rlhf.v1 import actor_pb2, common_pb2

pytestmark = pytest.mark.timeout(60)

TIMEOUT_S = 5


def values(column: Future[Column]) -> list[Any]:
    found = column.result(TIMEOUT_S)
    assert isinstance(found, LocalColumn)
    return list(found.values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("group", "chunks", "sizes"),
    [
        ([0, 0, 1, 1, 2, 2, 3, 3], 2, [4, 4]),
        ([0, 0, 1, 1, 2, 2, 3, 3], 3, [2, 4, 2]),
        ([0, 0, 0, 0, 0, 1], 3, [5, 1]),
        ([0, 1, 0, 2, 3, 2], 2, [3, 3]),
        ([0, 1, 2, 0], 4, [4]),
        ([7], 3, [1]),
        ([], 3, [0]),
    ],
)
def test_chunks_are_of_about_equal_size_and_hold_whole_groups(
    group: list[int], chunks: int, sizes: list[int]
) -> None:
    assert chunk_sizes(np.asarray(group, np.int64), chunks) == sizes


def test_groups_of_equal_size_make_as_many_chunks_as_are_asked_for() -> None:
    for prompts in range(1, 20):
        for samples in (1, 2, 5):
            group = np.repeat(np.arange(prompts), samples)
            for chunks in range(1, prompts + 1):
                sizes = np.asarray(chunk_sizes(group, chunks))
                assert len(sizes) == chunks
                assert sizes.sum() == len(group)
                assert not (sizes % samples).any()
                assert sizes.max() - sizes.min() <= 2 * samples


def test_random_groups_are_never_divided() -> None:
    chosen = random.Random(1)
    for _ in range(300):
        group = np.asarray([chosen.randint(0, 5) for _ in range(chosen.randint(1, 12))])
        sizes = chunk_sizes(group, chosen.randint(1, 6))
        parts = np.split(group, np.cumsum(sizes)[:-1])
        assert sum(sizes) == len(group)
        assert all(len(part) for part in parts)
        assert Counter(number for part in parts for number in set(part.tolist())).most_common(1)[0][1] == 1


def chunked() -> tuple[FutureBatch, list[Promise[Any]]]:
    """A batch with column x of 5 rows in chunks of 2 and 3 rows that are not there yet, and the futures of these."""
    chunks = [Promise(), Promise()]
    whole: Promise[Any] = Promise()
    return FutureBatch(5, {"x": ChunkedColumn(whole, chunks, [2, 3])}) | FutureBatch.of(
        y=np.arange(5)
    ), chunks


def test_a_chunk_is_there_before_the_whole() -> None:
    batch, chunks = chunked()
    first, second = batch.rename(x="z").drop("nothing").chunks()
    chunks[0].set_result(LocalColumn(np.array([10, 11])))
    assert (first.rows, second.rows) == (2, 3)
    assert values(first["z"]) == [10, 11]
    assert values(second["y"]) == [2, 3, 4]
    assert not second["z"].done()
    assert not batch["x"].done()


def test_rows_that_ascend_stay_in_their_chunks() -> None:
    batch, chunks = chunked()
    taken = batch.take(np.array([1, 2, 2, 4])).chunks()
    chunks[0].set_result(LocalColumn(np.array([10, 11])))
    assert [each.rows for each in taken] == [1, 3]
    assert values(taken[0]["x"]) == [11]
    chunks[1].set_result(LocalColumn(np.array([12, 13, 14])))
    assert values(taken[1]["x"]) == [12, 12, 14]
    assert values(taken[1]["y"]) == [2, 2, 4]
    assert [each.rows for each in batch.repeat(2).chunks()] == [4, 6]
    for rows in ([2, 1], [3, 4], [0], []):
        assert len(batch.take(np.asarray(rows, np.int64)).chunks()) == 1


def test_columns_in_different_chunks_are_one_chunk() -> None:
    batch, _ = chunked()
    other = FutureBatch.of(z=np.arange(5)).in_chunks([1, 4])
    assert len((batch | other).chunks()) == 1
    assert len((batch | other.in_chunks([2, 3])).chunks()) == 2


def test_chunks_of_a_call_that_is_kept_are_kept_as_long() -> None:
    late: Promise[Any] = Promise(7)
    column = ChunkedColumn.cut(late, [1, 1])
    assert (column.lateness, [chunk.lateness for chunk in column.chunks]) == (7, [7, 7])  # type: ignore[attr-defined]


def test_the_calls_of_chunks_have_one_ordinal() -> None:
    session, step = Session(), StepContext(3)
    first, second = session.headers(step, "actor", "generate_sequences", 2)
    (third,) = session.headers(step, "actor", "generate_sequences", 1)
    assert [(each.ordinal, each.chunk, each.chunks) for each in (first, second, third)] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 0),
    ]
    assert len({each.call_id for each in (first, second, third)}) == 3


def test_only_methods_that_make_columns_of_rows_are_called_by_chunks() -> None:
    found = {name for role in ("actor", "critic", "reference", "reward") for name in _row_wise(role)}
    assert {
        "generate_sequences",
        "compute_log_prob",
        "compute_values",
        "compute_ref_log_prob",
        "compute_reward",
    } <= found
    assert not {name for name in found if name.startswith(("update", "begin", "save", "load", "sync"))}


def _row_wise(role: str) -> list[str]:
    return [name for name, method in group_methods(role).items() if is_row_wise(method)]


def test_metrics_of_chunks_are_those_of_one_call() -> None:
    def record(start: float, total: float, count: float) -> CallRecord:
        outcome = common_pb2.Outcome(metrics={"entropy": common_pb2.Mean(sum=total, count=count)})
        response = actor_pb2.ComputeLogProbResponse(outcome=outcome)
        return CallRecord("actor", "compute_log_prob", start, start + 1, {}, 4, (response,))

    callee: Any = SimpleNamespace(name="actor", mesh=Mesh(1, 1, 1))
    made = [resolved((Batch(0, {}), record(1.0, 6.0, 3.0))), resolved((Batch(0, {}), record(5.0, 2.0, 1.0)))]
    chunks = [FutureBatch(3, {}), FutureBatch(1, {})]
    joined = batch_of(callee, group_methods("actor")["compute_log_prob"], chunks, made, ())
    (whole,) = joined.records(TIMEOUT_S)
    assert joined.rows == 4
    assert whole.metrics == {"entropy": 2.0}
    assert (whole.started_s, whole.ended_s, whole.seconds) == (1.0, 6.0, 2.0)
    assert (len(whole.responses), len(whole.sent)) == (2, 2)


def test_a_chunk_of_which_no_row_was_scored_has_the_scores_of_the_others() -> None:
    codec = RewardCodec("reward", (), wants_text=True)
    tokens = LocalColumn(Jagged(np.array([0.5, 1.0]), np.array([2, 0])))
    failed, scored = LocalColumn(np.array([np.nan])), LocalColumn(np.array([1.0]))
    joined = codec.joined("rewards", [failed, tokens])
    assert isinstance(joined, LocalColumn)
    assert isinstance(joined.values, Jagged)
    assert joined.values.lengths.tolist() == [0, 2, 0]
    assert values(resolved(codec.joined("rewards", [scored, scored]))) == [1.0, 1.0]
    with pytest.raises(RewardFailed, match="some rows have one score and others a score per token"):
        codec.joined("rewards", [scored, tokens])


def results(run: Simulation) -> Any:
    """Metrics and states at the end. Advantages are sent twice where gradients of a chunk are computed before the
    update."""
    metrics = {
        step: {name: value for name, value in found.items() if name != "transfer/controller_bytes"}
        for step, found in run.notes.metrics.items()
    }
    return metrics, run.states()


def generated(run: Simulation) -> Counter[int]:
    """Number of calls that generated the rows of each step, evaluations among them."""
    return Counter(entry.step for entry in run.log if entry.method == "generate_sequences")


BY_ROWS = "algorithm.aggregation='seq-mean-token-mean'"
"""Setting with which an update may begin with the first rows."""
ADAPTIVE = ("algorithm.kl_target=0.1", "algorithm.kl_horizon=100")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("ppo", ()),
        ("dapo", ()),
        ("remax", ()),
        ("grpo", ()),
        ("dr_grpo", ()),
        ("gspo", ("algorithm.mini_batch_size=2",)),
        ("cispo", (BY_ROWS,)),
        ("rloo", (BY_ROWS, *ADAPTIVE)),
        ("remax", (BY_ROWS, *ADAPTIVE)),
        ("distill", (BY_ROWS, "algorithm.options={discount=0.5,reward_coefficient=0.5}")),
    ],
)
def test_chunks_change_no_number(name: str, given: tuple[str, ...], tmp_path: Path) -> None:
    for ahead, segments, chunks in ((0, 1, 2), (1, 1, 4), (2, 2, 3)):
        table = (*given, f"run.ahead={ahead}", f"rollout.segments={segments}", "run.steps=3")
        whole = simulate(tmp_path, name, *table)
        stormy = Weather(seed=ahead, longest_s=0.003)
        found = simulate(tmp_path, name, *table, f"rollout.chunks={chunks}", weather=stormy)
        assert results(found) == results(whole)
        more = generated(found) - generated(whole)
        rounds = int(found.notes.metrics[1].get("groups/rounds", 1))
        assert more[1] == rounds * segments * (chunks - 1)


def test_a_reward_scores_a_chunk_while_the_next_is_generated(tmp_path: Path) -> None:
    generate, score = "actor.generate_sequences", "reward.compute_reward"
    weather = Weather(after={(generate, step, 2): (score, step) for step in range(1, 4)})
    settings = ("rollout.chunks=2", "run.steps=3", "run.evaluate_every=0")
    run = simulate(tmp_path, "grpo", *settings, weather=weather)
    assert generated(run)[1] == 2


@pytest.mark.parametrize("call", ["actor.compute_log_prob", "values.compute_values"])
def test_forward_passes_on_other_devices_begin_while_the_next_chunk_is_generated(
    call: str, tmp_path: Path
) -> None:
    weather = Weather(after={("rollout.generate_sequences", 2, 3): (call, 2)})
    settings = ("rollout.chunks=3", "run.steps=2", "run.evaluate_every=0", ROLLOUT, VALUES)
    simulate(tmp_path, "ppo", *settings, weather=weather)


def test_the_update_of_ppo_is_one_call_with_all_rows(tmp_path: Path) -> None:
    run = simulate(tmp_path, "ppo", "rollout.chunks=4", "run.steps=2", "run.evaluate_every=0")
    rows = [len(entry.rows) for entry in run.log if entry.method.startswith("update_")]
    assert rows == [8] * 4
    calls = Counter(entry.method for entry in run.log if entry.step == 1)
    assert (calls["compute_ref_log_prob"], calls["compute_reward"]) == (4, 4)


@pytest.mark.parametrize(
    ("name", "given"), [("grpo", ()), ("dr_grpo", ()), ("gspo", ()), ("rloo", (BY_ROWS,))]
)
@pytest.mark.parametrize("ahead", [0, 1])
def test_gradients_of_a_chunk_begin_before_the_last_is_scored(
    name: str, given: tuple[str, ...], ahead: int, tmp_path: Path
) -> None:
    # The last chunk of each step is scored only when gradients of the first have begun.
    after = {("reward.compute_reward", step, 3): ("actor.prepare_update", step) for step in range(1, 3)}
    settings = (*given, f"run.ahead={ahead}", "rollout.chunks=3", "run.steps=2", "run.evaluate_every=0")
    run = simulate(tmp_path, name, *settings, weather=Weather(after=after))
    for step in (1, 2):
        calls = [entry for entry in run.log if entry.step == step]
        prepared, (update,) = (
            [entry for entry in calls if entry.method == name] for name in ("prepare_update", "update_actor")
        )
        assert len(prepared) == 2
        assert {row for entry in prepared for row in entry.rows} < set(update.rows)
        assert calls.index(update) > calls.index(prepared[-1])
    shown = [record for step, record in run.notes.records if step == 1]
    (early,) = (record for record in shown if record.method == "prepare_update")
    (whole,) = (record for record in shown if record.method == "update_actor")
    assert (len(early.sent), len(whole.sent)) == (2, 1)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("ppo", (BY_ROWS,)),
        ("reinforce_pp", (BY_ROWS,)),
        ("cispo", ()),
        ("remax", (BY_ROWS,)),
        ("grpo", ("algorithm.aggregation='token-mean'",)),
    ],
)
def test_an_update_that_needs_all_rows_is_one_call(name: str, given: tuple[str, ...], tmp_path: Path) -> None:
    run = simulate(tmp_path, name, *given, "rollout.chunks=4", "run.steps=2", "run.evaluate_every=0")
    assert not [entry for entry in run.log if entry.method == "prepare_update"]
    assert len([entry for entry in run.log if entry.method == "update_actor"]) == 2


def test_a_service_that_does_not_prepare_updates_gets_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CallingGroup, "serves", lambda group, name: False)
    run = simulate(tmp_path, "grpo", "rollout.chunks=4", "run.steps=2", "run.evaluate_every=0")
    assert not [entry for entry in run.log if entry.method == "prepare_update"]


def with_advantages(**options: Any) -> Any:
    """GRPO with advantages by group that `made` computes from a batch, and the chunks that it was called with."""

    def algorithm(run: Run) -> None:
        actor, reward = run.actor(), run.reward()
        count = run.keep("count", Count())
        for step in run.steps():
            batch = step.prompts | step.groups | actor.generate_sequences(step.prompts)
            batch |= actor.compute_log_prob(batch)
            batch = reward.score(batch)
            batch |= future_columns("advantages", by_group=True)(advantages)(
                run, step, batch, count, **options
            )
            step.finish(batch, actor.update_actor(batch))

    return algorithm


@dataclass
class Count:
    calls: int = 0


def advantages(run: Run, step: Step, batch: FutureBatch, count: Count, whitens: bool = False) -> FutureBatch:
    rewards = run.fetch(batch, "rewards")["rewards"]
    count.calls += 1
    step.metrics |= {"counted": float(count.calls), f"rows/{len(rewards)}": 1.0}
    return FutureBatch.of(advantages=(rewards - (rewards.mean() if whitens else 0)).astype(np.float32))


def test_metrics_and_state_are_of_the_whole_batch(tmp_path: Path) -> None:
    settings = ("rollout.chunks=4", "run.steps=3", "run.evaluate_every=0")
    run = simulate(tmp_path, "grpo", *settings, algorithm=with_advantages())
    assert len([entry for entry in run.log if entry.method == "prepare_update"]) == 9
    assert [run.notes.metrics[step]["counted"] for step in (1, 2, 3)] == [1, 2, 3]
    assert {name for name in run.notes.metrics[3] if name.startswith("rows/")} == {"rows/8"}


def test_advantages_that_need_the_whole_batch_are_not_taken_by_group(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidRequest, match=r"columns \['advantages'\] of a chunk .* cannot be computed by_group"
    ):
        simulate(tmp_path, "grpo", "rollout.chunks=4", algorithm=with_advantages(whitens=True))


def test_a_run_with_chunks_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    settings = ("run.ahead=1", "run.steps=6", "rollout.chunks=2", "rollout.segments=2")
    whole = simulate(tmp_path, "ppo", *settings, every=2)
    rest = simulate(tmp_path, "ppo", *settings, every=2, resumed=whole.saver.saved[4])
    assert rest.states() == whole.states()
    assert rest.notes.metrics == {step: found for step, found in whole.notes.metrics.items() if step > 4}


def test_a_chunk_that_fails_ends_the_run_by_its_error(tmp_path: Path) -> None:
    for number in (2, 3, 5, 6, 11, 12):
        with pytest.raises(RlhfError, match="struck by lightning"):
            simulate(tmp_path, "grpo", "rollout.chunks=3", weather=Weather(fails=number))


def test_more_chunks_than_prompts_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"rollout.chunks: 5 is more than data.prompts_per_step, 4: the resp"
    ):
        load(
            QUICKSTARTS / "quickstart.toml",
            ("data.prompts_per_step=4", "algorithm.mini_batch_size=4", "rollout.chunks=5"),
        )
