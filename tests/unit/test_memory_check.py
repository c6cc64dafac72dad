"""`rlhf-deploy check` tells what services need by stage, and refuses in one line what does not fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from click.testing import CliRunner, Result

from controller.config.config import load
from controller.config.memory import row_sizes, sharing_services
from controller.role_groups.residency import residency_of
from deploy import memory, preflight
from deploy.cli import main
from deploy.memory import GB, predict_memory
from nccl_transfer.refs import weight_plans
from services.weights import resharding
from settings.memory import generation
from settings.memory.generation import ROUND_BYTES, TOGETHER_BYTES
from settings.memory.predict import Footprint, StageName, predict
from settings.memory.services import service_use
from settings.memory.use import RowSizes

QUICKSTART = Path(__file__).parents[2] / "deploy/quickstart/engines.toml"
LLAMA_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}
MODELS = ("actor", "critic", "reference")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    return tmp_path


def settings(model: Path, *further: str) -> tuple[str, ...]:
    keys = [
        f"services.{name}.{key}='{value}'"
        for name in MODELS
        for key, value in (("model", model), ("device", "auto"))
    ]
    return (*keys, *further)


def check(model: Path, *arguments: str, further: tuple[str, ...] = ()) -> Result:
    flags = [part for setting in settings(model, *further) for part in ("--set", setting)]
    return CliRunner().invoke(main, ["check", str(QUICKSTART), *flags, *arguments])


def test_what_does_not_fit_is_told_in_one_line(model: Path) -> None:
    ran = check(model, "--only", "actor", "--device-memory-gb", "80")
    assert ran.exit_code == 1
    stages = predict(
        service_use(load(QUICKSTART, settings(model)).services["actor"], on_gpu=True),
        RowSizes(4092, 4, 512, mini_batches=4),
    )
    needed = max(each.device_bytes for each in stages.values()) / GB
    assert ran.stderr == (
        f"error: services.actor: stage update needs {needed:.2f} GB on a device of 80.00 GB, {needed - 80:.2f} GB too "
        "much\n"
    )
    for stage in stages:
        assert stage in ran.stdout
    assert "for rows of 4092 + 4 tokens" in ran.stdout


def test_what_fits_is_checked_further(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "check", lambda *_: None)
    ran = check(model, "--only", "reference", "--device-memory-gb", "80")
    assert (ran.exit_code, ran.stderr) == (0, "")
    assert ran.stdout.endswith("engines.toml: reference can be started\n")


def test_a_schedule_that_the_controller_ends_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`up` does not know the run, and its services end at once without the number."""
    monkeypatch.setattr(preflight, "check", lambda *_: None)
    schedule = ("--set", "services.actor.optimizer.schedule='cosine'")
    flags = ("--only", "actor", "--device-memory-gb", "250")
    ran = check(model, *flags, *schedule)
    assert (ran.exit_code, ran.stderr) == (
        0,
        "note: total_steps of the optimizer is not given for actor: rlhf-controller --launch computes it, and up "
        "needs it\n",
    )
    ran = check(model, *flags, *schedule, "--set", "services.actor.optimizer.total_steps=7")
    assert (ran.exit_code, ran.stderr) == (0, "")


def test_services_on_a_device_are_added_up(model: Path) -> None:
    pool = (
        "pools.shared=['gpu:0', 'gpu:1', 'gpu:2', 'gpu:3']",
        *(f"services.{name}.pool='shared'" for name in MODELS),
    )
    config = load(QUICKSTART, settings(model, *pool))
    report = predict_memory(config, list(MODELS), int(250 * GB))
    alone = predict_memory(load(QUICKSTART, settings(model)), list(MODELS), int(250 * GB))
    assert alone.misfits == []
    idle = sum(service.idle for service in report.services.values())
    more = max(service.largest[1] - service.idle for service in report.services.values())
    assert idle + more > 250 * GB
    assert len(report.misfits) == 1
    assert f"with actor, reference on the same device, needs {(idle + more) / GB:.2f} GB" in report.misfits[0]


def test_a_service_is_counted_on_the_devices_that_its_ranks_take_and_not_on_its_whole_pool(
    model: Path,
) -> None:
    """The critic has two ranks."""
    pools = (
        "pools.all=['gpu:0', 'gpu:1', 'gpu:2', 'gpu:3']",
        "services.actor.pool='all'",
        "services.critic.pool='others'",
    )
    spare = load(QUICKSTART, settings(model, *pools, "pools.others=['gpu:4', 'gpu:5', 'gpu:0']"))
    shared = load(QUICKSTART, settings(model, *pools, "pools.others=['gpu:4', 'gpu:0', 'gpu:5']"))
    names = ["actor", "critic"]
    assert sharing_services(spare, names) == [("actor",), ("critic",)]
    assert sharing_services(shared, names) == [("actor",), ("actor", "critic"), ("critic",)]
    services = predict_memory(spare, names, int(GB)).services
    size = int(max(each.largest[1] for each in services.values()) + GB)
    assert predict_memory(spare, names, size).misfits == []
    (line,) = predict_memory(shared, names, size).misfits
    assert "on the same device" in line
    for config, moving in ((spare, set()), (shared, {"actor", "critic"})):
        residency = residency_of(config.model_copy(update={"device_memory_gb": size / GB}))
        assert residency is not None
        assert residency.moving == moving


def test_services_that_take_turns_in_memory_need_it_for_one_stage(model: Path) -> None:
    pool = (
        "pools.shared=['gpu:0', 'gpu:1', 'gpu:2', 'gpu:3']",
        *(f"services.{name}.pool='shared'" for name in MODELS),
    )
    services = predict_memory(load(QUICKSTART, settings(model, *pool)), list(MODELS), int(GB)).services
    started = max(
        sum(each.idle for each in services.values())
        - service.idle
        + max(service.stages[stage].device_bytes for stage in ("loading", "idle"))
        for service in services.values()
    )
    alone = max(
        service.largest[1] + sum(other.stays for other in services.values() if other is not service)
        for service in services.values()
    )
    least = max(started, alone) / GB
    for size, fits in ((least + 0.001, True), (least - 0.001, False)):
        flags = [part for name in MODELS for part in ("--only", name)]
        ran = check(model, *flags, further=(*pool, f"device_memory_gb={size}"))
        assert ("too much" not in ran.stderr) == fits, ran.stderr


def test_on_a_cpu_all_ranks_share_the_memory_of_the_host(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "GPU_DRIVER", model / "none")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=int(100 * GB)))
    report = predict_memory(load(QUICKSTART, settings(model)), ["actor", "critic"], None)
    needed = sum(service.ranks * service.on_cpu for service in report.services.values()) / GB
    assert report.misfits == [
        f"services actor, critic: all ranks together need {needed:.2f} GB of host memory, of which 100.00 GB are "
        f"available, {needed - 100:.2f} GB too little; this host has no GPUs: for a check of a host with GPUs, on "
        "which actor, critic would compute, give the memory of one with --device-memory-gb"
    ]


def test_a_service_that_is_not_predicted_says_why(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**LLAMA_7B, "model_type": "gpt2"}))
    report = predict_memory(load(QUICKSTART, settings(model)), ["actor", "reward"], None)
    assert report.services == {}
    assert "model_type is 'gpt2'" in report.left_out["actor"]
    assert report.left_out["reward"] == "kind function has no model of its own"


@pytest.mark.parametrize(
    ("keys", "is_predicted"),
    [
        (("engine='fsdp'",), True),
        (("engine='zero'",), False),
        (("engine='3d'", "mesh='1-1-4'"), False),
        (("engine='fsdp'", "generation_mesh='1-2-2'"), False),
    ],
)
def test_a_mixture_of_experts_is_predicted_where_it_can_be_trained(
    keys: tuple[str, ...], is_predicted: bool, model: Path
) -> None:
    (model / "config.json").write_text(
        json.dumps({**LLAMA_7B, "model_type": "mixtral", "intermediate_size": 14336})
    )
    given = ("mesh=''", "shards_over_data=false", "ranks=4", *keys)
    config = load(QUICKSTART, settings(model, *(f"services.actor.{key}" for key in given)))
    report = predict_memory(config, ["actor"], int(GB))
    if is_predicted:
        idle = report.services["actor"].stages["idle"].device
        use = service_use(config.services["actor"], on_gpu=True)
        assert idle["generation weights"] == use.itemsize * use.shape.num_parameters
    else:
        assert report.left_out["actor"] == (
            "mixtures of experts are predicted in engine fsdp, each rank with the whole model to generate"
        )


def test_neither_weights_nor_torch_are_needed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert [path.name for path in model.iterdir()] == ["config.json"]
    assert predict_memory(
        load(QUICKSTART, settings(model)), list(MODELS), int(80 * GB)
    ).services.keys() == set(MODELS)


@pytest.mark.parametrize(
    ("further", "expected"),
    [
        ((), (4092, 4)),
        (("data.max_prompt_tokens=1024", "rollout.max_response_tokens=512"), (1024, 512)),
        (("services.actor.micro_batch_tokens=2048",), (2044, 4)),
    ],
)
def test_rows_are_the_longest_that_the_config_allows(
    further: tuple[str, ...], expected: tuple[int, int], model: Path
) -> None:
    rows = row_sizes(load(QUICKSTART, settings(model, *further)), [4096, 4096])
    assert (rows.prompt_tokens, rows.response_tokens) == expected


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_ranks_that_share_a_model_to_generate_hold_a_part_of_it(model: Path, engine: str) -> None:
    def generation_bytes(mesh: str) -> tuple[int, int]:
        keys = ("ranks=8", "engine='fsdp'", f"rollout_engine='{engine}'", f"generation_mesh='{mesh}'")
        unset = ("mesh=''", "shards_over_data=false")
        config = load(QUICKSTART, settings(model, *(f"services.actor.{key}" for key in (*unset, *keys))))
        stages = predict(service_use(config.services["actor"], on_gpu=True), RowSizes(512, 512, 512))
        moved = stages["transition"].device["gathered tensors"]
        return stages["idle"].device["generation weights"], moved

    whole, largest = generation_bytes("")
    shard, buckets = generation_bytes("1-4-2")
    # Norms are whole on every tensor rank.
    assert whole / 4 < shard < 1.001 * whole / 4
    together = 2 * TOGETHER_BYTES if engine == "vllm" else 0
    assert buckets == 9 * (ROUND_BYTES // 8) + together < largest


@pytest.mark.parametrize(
    ("keys", "on_gpu", "freed"),
    [
        (("rollout_engine='hf'", "engine='fsdp'"), True, {"generation weights"}),
        (("rollout_engine='hf'", "engine='fsdp'"), False, {"generation weights"}),
        (("rollout_engine='vllm'", "engine='fsdp'"), True, {"generation weights", "KV cache"}),
        (("rollout_engine='vllm'", "engine='fsdp'"), False, {"KV cache"}),
        (("rollout_engine='vllm'", "engine='3d'", "mesh='1-8-1'"), True, {"generation weights", "KV cache"}),
        (("rollout_engine='hf'", "engine='3d'", "mesh='1-8-1'", "generation_mesh='1-2-4-1'"), True, set()),
    ],
)
def test_a_rollout_engine_that_sleeps_takes_no_memory_while_its_actor_computes(
    keys: tuple[str, ...], on_gpu: bool, freed: set[str], model: Path
) -> None:
    def stages(*further: str) -> dict[StageName, Footprint]:
        given = ("mesh=''", "shards_over_data=false", "ranks=8", *keys, *further)
        config = load(QUICKSTART, settings(model, *(f"services.actor.{key}" for key in given)))
        return predict(service_use(config.services["actor"], on_gpu=on_gpu), RowSizes(512, 512, 512))

    awake, asleep = stages(), stages("rollout_sleep=true")
    for stage in ("forward", "update"):
        expected = {name: nbytes for name, nbytes in awake[stage].device.items() if name not in freed}
        assert asleep[stage].device == expected
        assert freed <= awake[stage].device.keys()
    for stage in ("loading", "idle", "transition", "generation", "checkpoint"):
        assert asleep[stage] == awake[stage]


def test_vllm_has_logits_of_as_many_rows_as_a_step_may_have(model: Path) -> None:
    engine = ("services.actor.rollout_engine='vllm'", "services.actor.vllm.enforce_eager=true")

    def workspace(rows: int) -> int:
        config = load(QUICKSTART, settings(model, *engine, f"services.actor.vllm.max_num_seqs={rows}"))
        return generation.vllm_workspace(service_use(config.services["actor"], on_gpu=True))

    vocabulary, float32 = 32000, 4
    assert workspace(1024) - workspace(256) == 768 * vocabulary * 2 * float32


@pytest.mark.parametrize("role", ["actor", "rollout"])
def test_vllm_has_activations_of_as_many_tokens_as_a_step_may_have(role: str, model: Path) -> None:
    def workspace(*keys: str) -> int:
        given = [f"services.{role}.{key}" for key in ("rollout_engine='vllm'", *keys)]
        table = f'{{role="rollout",address="127.0.0.1:7199",model="{model}"}}'
        service = [f"services.rollout={table}"] if role == "rollout" else []
        config = load(QUICKSTART, settings(model, *service, *given))
        return generation.vllm_workspace(service_use(config.services[role], on_gpu=True))

    def batched(tokens: int) -> int:
        return workspace(f"vllm.engine_args={{max_num_batched_tokens={tokens}}}")

    assert workspace() == batched(16384)
    assert batched(8192) - batched(4096) == (batched(16384) - batched(8192)) // 2 > 0


def test_the_sizes_of_transitions_are_those_of_the_services() -> None:
    assert (ROUND_BYTES, TOGETHER_BYTES) == (resharding.ROUND_BYTES, resharding.TOGETHER_BYTES)
    assert generation.LEAST_BUCKET_BYTES == weight_plans.LEAST_BUCKET_BYTES


def test_a_service_on_the_cpu_takes_no_memory_of_a_device(model: Path) -> None:
    further = ("services.actor.device='cpu'",)
    report = predict_memory(load(QUICKSTART, settings(model, *further)), ["actor", "reference"], int(GB))
    assert not report.services["actor"].on_gpu
    assert len(report.misfits) == 1
    assert "services.reference" in report.misfits[0]


DISAGGREGATED = Path(__file__).parents[2] / "deploy/quickstart/disaggregated.toml"


def disaggregated(model: Path, *further: str) -> tuple[str, ...]:
    names = (*MODELS, "rollout", "values")
    values = "services.values={role='values',address='127.0.0.1:7106',model='x'}"
    keys = [
        f"services.{name}.{key}='{value}'"
        for name in names
        for key, value in (("model", model), ("device", "auto"))
    ]
    return (values, *keys, "data.max_prompt_tokens=8", *further)


def test_services_that_receive_weights_hold_them_twice(model: Path) -> None:
    config = load(DISAGGREGATED, disaggregated(model))
    report = predict_memory(config, ["actor", "critic", "rollout", "values"], None)
    assert not report.left_out
    rollout, values = report.services["rollout"].stages, report.services["values"].stages
    parts = rollout["idle"].device
    assert parts["generation weights"] == parts["received weights"]
    assert set(rollout) == {"loading", "idle", "generation"}
    assert rollout["generation"].device["KV cache"] > 0
    assert values["idle"].device["weights"] == values["idle"].device["received weights"]
    assert "update" not in values
    assert "generation" not in report.services["actor"].stages


def test_a_rollout_service_without_a_second_buffer_holds_its_weights_once(model: Path) -> None:
    config = load(DISAGGREGATED, disaggregated(model, "services.rollout.second_buffer=false"))
    parts = predict_memory(config, ["rollout"], None).services["rollout"].stages["idle"].device
    assert "received weights" not in parts


def test_ranks_that_share_the_model_of_a_rollout_service_hold_a_part_of_it(model: Path) -> None:
    weights = []
    for mesh in ("1-1-2", "1-2-1", "2-1-1"):
        config = load(DISAGGREGATED, disaggregated(model, f"services.rollout.mesh='{mesh}'"))
        stages = predict_memory(config, ["rollout"], None).services["rollout"].stages
        weights.append(stages["idle"].device["generation weights"])
    assert weights[0] / 2 < weights[1] < 0.52 * weights[0]
    assert weights[0] / 2 < weights[2] < 0.52 * weights[0]


def test_names_are_shown_as_they_are_given(model: Path) -> None:
    """Also those that rich would read as markup, or as an emoji."""
    for name in ("a[red]b", ":cat:"):
        table = f"services.{name}={{role='reference',address='127.0.0.1:7199',model='{model}'}}"
        ran = check(model, "--only", name, "--device-memory-gb", "1", further=(table,))
        assert f"services.{name}: stage" in ran.stderr
        assert f"\n{name} " in ran.stdout
