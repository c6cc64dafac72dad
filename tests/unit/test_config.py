"""A configuration is right, or one line says what is wrong with it."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import tomli_w
from pydantic import BaseModel

from controller.config.config import Config, load
from controller.config.data import SourceTable
from controller.config.rollout import EnvironmentTable
from rlhf.errors import ConfigError
from rlhf.roles import BUILT_IN
from rlhf.v1 import common_pb2
from settings.actor import ActorTable, LoraTable
from settings.engines import ZeroTable
from settings.services import service_of, table_type
from settings.strict import read_tables, validate

ROOT = Path(__file__).parent.parent.parent
SHIPPED = sorted((ROOT / "deploy").rglob("*.toml"))
GENERATOR = ROOT / "docs" / "generate_configuration.py"
QUICKSTART = ROOT / "deploy" / "quickstart" / "quickstart.toml"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_are_valid(path: Path) -> None:
    config = load(path)
    for name in config.services:
        assert service_of(read_tables(path), name, path) == config.services[name]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_start_on_a_host_with_fewer_gpus_than_ranks_too(path: Path) -> None:
    services = load(path).services
    assert {services[name].device for name in services if services[name].needs_torch} == {"cpu"}


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("run.step=3", r"run\.step: unknown key; did you mean 'steps'\?.*Known keys: .*seed"),
        ("services.actor.modle='x'", r"services\.actor\.modle: unknown key; did you mean 'model'\?"),
        ("services.actor.optimizer.lr=1", r"services\.actor\.optimizer\.lr: unknown key.*learning_rate"),
        ("run.steps=0", r"run\.steps: must be at least 1 \(given: 0\)"),
        ("run.steps='many'", r"run\.steps: must be a whole number \(given: 'many'\)"),
        ("run.epochs=true", r"run\.epochs: must be a whole number \(given: True\)"),
        ("run.ahead=true", r"run\.ahead: must be a whole number \(given: True\)"),
        (
            "algorithm.kl_loss_coefficient=true",
            r"algorithm\.kl_loss_coefficient: must be a number \(given: True\)",
        ),
        ("device_memory_gb=true", r"device_memory_gb: must be a number \(given: True\)"),
        ("run.balance='maybe'", r"run\.balance: must be true or false"),
        (
            "services.actor.optimizer.betas=[0.9]",
            r"services\.actor\.optimizer\.betas\.1: required, and not given",
        ),
        ("data.train=3", r"data\.train: must be a path \(given: 3\)"),
        ("rollout=3", r"rollout: must be a table \(given: 3\)"),
        ("rollout.stop='END'", r"rollout\.stop: must be a list \(given: 'END'\)"),
        ("rollout.temperature=inf", r"rollout\.temperature: must be finite"),
        (
            "rollout.environment.options={limits=[1,inf]}",
            r"rollout\.environment\.options: must be finite \(given: \{'limits': \[1, inf\]\}\)",
        ),
        (
            "rollout.environment.options={a={day=2026-01-01}}",
            r"rollout\.environment\.options: a date or time has to be a text, in quotes \(given: 2026-01-01\)",
        ),
        (
            "services.actr.ranks=2",
            r"services\.actr: unknown service; did you mean 'actor'\? There are: actor, critic, reference, reward$",
        ),
        (
            "services.judge.ranks=2",
            r"services\.judge\.role: required, and not given: actor, critic, reference, reward, rollout, values, or mo",
        ),
        (
            "services.actor.engine='fdsp'",
            r"services\.actor\.engine: 'fdsp' is unknown; did you mean 'fsdp'\?; known: 3d, fsdp, .*zero, or module:",
        ),
        (
            "services.actor.rollout_engine='vlm'",
            r"services\.actor\.rollout_engine: 'vlm' is unknown; did you mean 'vllm'\?; known: hf, .*vllm, or module:",
        ),
        (
            "services.actor.engine='nowhere:spec'",
            r"services\.actor\.engine: 'nowhere:spec' cannot be imported: ModuleNotFoundError",
        ),
        (
            "services.actor.engine='settings.engines:VllmTable'",
            r"services\.actor\.engine: 'settings\.engines:VllmTable' is of type ModelMetaclass, not EngineSpec",
        ),
        (
            "services.actor.engine_options.alpha=1",
            r"services\.actor\.engine_options: alpha: unknown key",
        ),
        (
            "services.actor.rollout_engine='vllm'\nservices.actor.rollout_options.kv_cache_gb=1",
            r"services\.actor\.rollout_options: the options of this engine are in the table vllm",
        ),
        (
            "services.actor.role='worker'",
            r"actor\.role: 'worker' is unknown; known: actor, critic, .*reward,",
        ),
        ("services.actor.role=3", r"services\.actor\.role: must be a string \(given: 3\)"),
        ("services.actor=3", r"services\.actor: must be a table \(given: 3\)"),
        ("services.actor.role='nowhere:role'", r"services\.actor\.role: 'nowhere:role' cannot be imported"),
        ("services.actor.role='acter'", r"services\.actor\.role: .*; did you mean 'actor'\?"),
        ("services.actor.address='nowhere'", r"services\.actor\.address: 'nowhere' is not host:port"),
        (
            "services.critic.address='127.0.0.1:7101'",
            r"services\.critic\.address: .* taken by services\.actor",
        ),
        ("algorithm.mini_batch_size=100", r"mini_batch_size: 100 does not divide the 512 rows"),
        (
            "services.actor.ranks=3",
            r"mini_batch_size: .* do not divide over the 3 data ranks of services\.actor",
        ),
        (
            "services.actor.ranks=3\nservices.actor.engine='3d'\nservices.actor.mesh='1-1-3'",
            r"mini_batch_size: .* do not divide over the 3 data ranks of services\.actor",
        ),
        ("services.actor.pool='gpus'", r"services\.actor\.pool: no pool 'gpus'; known: none"),
        ("services.actor.mesh='1-2-1'", r"services\.actor: mesh is for engine 3d, and engine is fsdp"),
        (
            "services.actor.ranks=4\nservices.actor.sequence_parallel=3",
            r"services\.actor: sequence_parallel 3 does not divide ranks, which is 4; allowed: 1, 2, 4",
        ),
        (
            "services.actor.sequence_parallel=2\nservices.actor.packing=false",
            r"services\.actor: sequence_parallel divides packed micro-batches, and packing is false",
        ),
        (
            "services.critic.ranks=2\nservices.critic.engine='zero'\nservices.critic.sequence_parallel=2",
            r"services\.critic: sequence_parallel is for engine fsdp, and engine is zero",
        ),
        (
            "services.actor.shards_over_data=true",
            r"services\.actor: shards_over_data is for engine 3d, and engine is fsdp",
        ),
        (
            "services.actor.engine='3d'\nservices.actor.mesh='1-2-1'\nservices.actor.shards_over_data=true",
            r"services\.actor: shards_over_data needs more than one data rank, and mesh is 1-2-1",
        ),
        ("services.actor.zero.stage=3", r"services\.actor: zero is for engine zero, and engine is fsdp"),
        (
            "services.actor.zero.offload_optimizer=true",
            r"services\.actor: zero is for engine zero, and engine is fsdp",
        ),
        (
            "services.reference.engine='zero'\nservices.reference.zero.offload_optimizer=true",
            r"services\.reference: zero\.offload_optimizer is for services that learn",
        ),
        (
            "services.reference.activation_checkpointing=true",
            r"services\.reference: activation_checkpointing is for services that learn",
        ),
        (
            "services.actor.engine='zero'\nservices.actor.zero.stage=4",
            r"services\.actor\.zero\.stage: .*1, 2 or 3",
        ),
        ("services.actor.zero.stages=3", r"services\.actor\.zero\.stages: .*did you mean 'stage'"),
        ("services.actor.engine='3d'", r"services\.actor: mesh '' is not p-t-d: .*for example 1-2-2"),
        (
            "services.actor.generation_mesh='1-1-2-1'",
            r"services\.actor: generation_mesh '1-1-2-1' is not p-t-d: .*for example 1-2-2",
        ),
        (
            "services.actor.generation_mesh='1-3-1'",
            r"services\.actor: generation_mesh 1-3-1 has 3 ranks, and ranks is 2; the nearest that fit: 1-2-1",
        ),
        (
            "services.actor.rollout_engine='vllm'\nservices.actor.generation_mesh='2-1-1'",
            r"without pipeline stages, and generation_mesh 2-1-1 has 2; for example generation_mesh 1-1-2",
        ),
        ("services.actor.vllm.kv_cache=1", r"services\.actor\.vllm\.kv_cache: .*did you mean 'kv_cache_gb'"),
        (
            "services.actor.vllm.max_num_seqs=8",
            r"services\.actor: vllm is for rollout engine vllm, and rollout_engine is hf",
        ),
        (
            "services.actor.rollout_engine='vllm'\nservices.actor.rollout_tokens=4096",
            r"services\.actor: rollout_tokens is for rollout engine hf, and rollout_engine is vllm",
        ),
        (
            "services.actor.lora.rank=8\nservices.actor.engine='3d'\nservices.actor.mesh='1-1-2'",
            r"services\.actor: lora is for engine fsdp, and engine is 3d",
        ),
        (
            "services.actor.rollout_engine='vllm'\nrollout.temperature=3.0",
            r"rollout\.temperature: .* services\.actor samples .* from 0\.01 to 2 \(given: 3\)",
        ),
        (
            "services.actor.rollout_engine='vllm'\nservices.actor.vllm.max_model_len=4",
            r"services\.actor\.vllm\.max_model_len: 4 leaves no room .* rollout\.max_response_tokens, 4",
        ),
        (
            "services.actor.rollout_tokens=4",
            r"services\.actor\.rollout_tokens: 4 leaves no room for a prompt",
        ),
        (
            "services.critic.micro_batch_tokens=2\nservices.critic.sequence_parallel=2\nservices.critic.ranks=2",
            r"services\.critic\.micro_batch_tokens \* sequence_parallel: 4 leaves no room",
        ),
        (
            "services.reward.function='gsm8k'\nservices.reward.options.mode='flexibel'",
            r"services\.reward: options\.mode: must be 'strict' or 'flexible' \(given: 'flexibel'\); did you mean",
        ),
        (
            "services.reward.function='gsm8k'\nservices.reward.options.modus='strict'",
            r"services\.reward: options\.modus: unknown key; did you mean 'mode'\? Known keys: mode",
        ),
        (
            "services.reward.function='format'\nservices.reward.options.pattern='(<think>'",
            r"services\.reward: options\.pattern: no regular expression: .*unterminated",
        ),
        (
            "services.reward.function='length'\nservices.reward.options.limit='200'",
            r"services\.reward: options\.limit: must be a number \(given: '200'\)",
        ),
        (
            "services.reward.function='length'\nservices.reward.options.fade=-1",
            r"services\.reward: options\.fade: must be at least 0 \(given: -1\)",
        ),
        ("services.critic.micro_batch_tokens=3", r"services\.critic\.micro_batch_tokens: 3 leaves no room"),
        ("services.actor.lora.r=8", r"services\.actor\.lora\.r: unknown key.*Known keys: rank, alpha"),
        ("services.actor.lora.dropout=0.1", r"services\.actor\.lora\.dropout: 0\.1 is not allowed, only 0"),
        ("services.actor.lora.target_modules=[]", r"lora\.target_modules.*: .* at least one layer"),
        ("services.critic.lora.rank=8", r"services\.critic\.lora: unknown key"),
        ("algorithm.dual_clip=0.5", r"algorithm\.dual_clip: must be above 1"),
        ("algorithm.clip_low=1.5", r"clip_low: must be at most 1 \(given: 1\.5\)"),
        (
            "algorithm.kl_target=1\nalgorithm.kl_reward_coefficient=0",
            r"kl_reward_coefficient: .* start above 0",
        ),
        ("algorithm.kl_target=1\nalgorithm.kl_horizon=100", r"kl_horizon: 100 is too short for 512 rows"),
        ("rollout.top_k=5\nalgorithm.recompute_log_probs=false", r"recompute_log_probs: must be true with"),
        ("services.actor.address='0.0.0.0:7101'", r"services\.actor\.address: .*name one of this host"),
        ("services.actor.address='::1:7101'", r"services\.actor\.address: .*IPv6 address is in brackets"),
        ("services.actor.address='*:7101'", r"services\.actor\.address: '\*' is no host"),
        ("services.actor.address='[::1%]:7101'", r"services\.actor\.address: .* is no IPv6 address"),
        ("services.actor.bind_host='*'", r"services\.actor\.bind_host: '\*' is no host"),
        ("services.actor.bind_host='::'", r"services\.actor\.bind_host: .*IPv6 address is in brackets"),
        ("services.actor.bind_host='0.0.0.0:1'", r"services\.actor\.bind_host: .*host alone; it has no port"),
        ("services.actor.advertise_host='[::]'", r"services\.actor\.advertise_host: .* can connect to"),
        ("services.actor.advertise_host='n:1'", r"services\.actor\.advertise_host: .*host alone"),
        ("services.actor.advertise_host='0.0.0.0'", r"services\.actor\.advertise_host: .* can connect to"),
        ("pools.one=['cpu:0']\nservices.actor.pool='one'", r"'one' has 1 device for 2 ranks"),
        (
            "algorithm.rollout_correction='mask'\nalgorithm.recompute_log_probs=false",
            r"rollout_correction: needs recompute_log_probs",
        ),
        (
            "algorithm.rollout_correction='mask'\nrollout.top_k=50",
            r"rollout_correction: does not go with rollout\.top_k, rollout\.top_p or rollout\.min_p",
        ),
        (
            "algorithm.rollout_correction='truncate'\nrollout.top_p=0.9",
            r"rollout_correction: does not go with rollout\.top_k, rollout\.top_p or rollout\.min_p",
        ),
        (
            "algorithm.rollout_correction='mask'\nalgorithm.rollout_correction_low=3",
            r"algorithm\.rollout_correction_high: must be above rollout_correction_low, 3 \(given: 2\)",
        ),
        (
            "algorithm.max_log_prob_drift=0.1\nalgorithm.recompute_log_probs=false",
            r"max_log_prob_drift: needs recompute_log_probs",
        ),
        (
            "algorithm.max_log_prob_drift=0.1\nrollout.top_p=0.9",
            r"max_log_prob_drift: does not go with rollout\.top_k, rollout\.top_p or rollout\.min_p",
        ),
        (
            "algorithm.rollout_correction='mask'\nrollout.min_p=0.05",
            r"rollout_correction: does not go with .*rollout\.min_p",
        ),
        ("rollout.min_p=0.1\nalgorithm.recompute_log_probs=false", r"recompute_log_probs: must be true with"),
        ("rollout.min_p=1.5", r"rollout\.min_p: must be at most 1"),
        ("rollout.stop_token_ids=[3, -1]", r"rollout\.stop_token_ids\.1: must be at least 0"),
        ("rollout.repetition_penalty=1.1", r"rollout\.repetition_penalty: unknown key"),
        (
            "rollout.evaluation.repetition_penalty=0",
            r"evaluation\.repetition_penalty: must be at least 1e-06",
        ),
        ("rollout.stop=['END', '']", r"rollout: stop: a text is empty in \['END', ''\]"),
        (
            "algorithm.surrogate='gpso'",
            r"algorithm\.surrogate: 'gpso' is unknown; did you mean 'gspo'\?; known: cispo, .*gspo, ppo, or module:obj",
        ),
        (
            "algorithm.value_loss='no:loss'",
            r"algorithm\.value_loss: 'no:loss' cannot be imported: ModuleNotFound",
        ),
        ("algorithm.aggregation='mean'", r"algorithm\.aggregation: .*'token-mean'.*given: 'mean'"),
        (
            "services.actor.optimizer.betas=[0.9, 1.0]",
            r"optimizer\.betas\.1: must be below 1 \(given: 1\.0\)",
        ),
        (
            "services.actor.optimizer.betas=[-0.1, 0.9]",
            r"optimizer\.betas\.0: must be at least 0 \(given: -0\.1\)",
        ),
        (
            "services.critic.address='localhost:7101'",
            r"critic\.address: localhost:7101 is taken by services\.actor, whose address is 127\.0\.0\.1:7101",
        ),
        (
            "services.actor.address='[::1]:7101'\nservices.critic.address='[0:0:0:0:0:0:0:1]:07101'",
            r"services\.critic\.address: .* taken by services\.actor",
        ),
        (
            "services.actor.address='Node:7101'\nservices.critic.address='node.:7101'",
            r"services\.critic\.address: .* taken by services\.actor",
        ),
        (
            "services.a/b={role='reward',address='127.0.0.1:7999'}",
            r"services: 'a/b' cannot be part of a file's name",
        ),
        ("run.name='a/b'", r"run\.name: 'a/b' cannot be part of a file's name: .* without / and NUL"),
        ("run.name=''", r"run\.name: '' cannot be part of a file's name: it needs 1 to 200 bytes"),
        ("run.name='..'", r"run\.name: '\.\.' cannot be part of a file's name"),
        ('run.name="a\\u0000"', r"run\.name: 'a\\x00' cannot be part of a file's name"),
        (f"run.name='{'é' * 101}'", r"run\.name: .* cannot be part of a file's name"),
        (
            f"run.seed={2**64}",
            r"run\.seed: must be below 18446744073709551616 \(given: 18446744073709551616\)",
        ),
        ("run.seed=-1", r"run\.seed: must be at least 0 \(given: -1\)"),
        (
            "services.actor.rollout_engine='none'",
            r"services\.actor\.rollout_engine: none requires a service named rollout.*has no such service",
        ),
    ],
)
def test_an_impossible_setting_is_refused_in_one_line(setting: str, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(QUICKSTART, tuple(setting.split("\n")))
    assert re.search(expected, str(raised.value)), str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "key",
    [
        *("run.call_timeout_s", "run.save_timeout_s", "run.connect_timeout_s", "checkpoint.grace_s"),
        *(
            "services.actor.startup_timeout_s",
            "services.actor.stuck_timeout_s",
            "services.reward.row_timeout_s",
        ),
        *("services.reward.sandbox.wall_time_s", "services.reward.judge.request_timeout_s"),
        "services.reward.judge.backoff_s",
    ],
)
def test_a_time_limit_is_at_most_30_days(key: str) -> None:
    load(QUICKSTART, (f"{key}={30 * 86_400}",))
    with pytest.raises(
        ConfigError, match=rf"{re.escape(key)}: must be at most 2592000 \(given: 10000000000\.0\)"
    ):
        load(QUICKSTART, (f"{key}=1e10",))


def test_the_largest_seed_is_one_that_calls_can_carry() -> None:
    seed = load(QUICKSTART, (f"run.seed={2**64 - 1}",)).run.seed
    assert common_pb2.Call.FromString(common_pb2.Call(seed=seed).SerializeToString()).seed == seed


def test_the_same_port_of_other_hosts_is_no_conflict() -> None:
    addresses = ("[::1]:7101", "127.0.0.1:7101", "node-1:7101", "node-2:7101")
    services = load(QUICKSTART).services
    settings = (f"services.{name}.address='{each}'" for name, each in zip(services, addresses, strict=True))
    load(QUICKSTART, tuple(settings))


def test_a_mini_batch_divides_over_the_data_ranks_of_a_mesh_and_not_over_all_its_ranks() -> None:
    actor = ("engine='3d'", "mesh='3-1-2'", "ranks=6", "model='nowhere'")
    config = load(QUICKSTART, ("algorithm.mini_batch_size=128", *(f"services.actor.{key}" for key in actor)))
    assert config.algorithm.mini_batch_size % config.services["actor"].ranks
    assert config.services["actor"].data_ranks == 2  # type: ignore[union-attr]


def test_an_option_of_a_python_program_without_a_value_is_refused() -> None:
    tables = {"factory": "mine:Own", "options": {"limits": [1, None]}}
    with pytest.raises(ConfigError, match="options: None cannot be written to a config: leave the key out"):
        validate(EnvironmentTable, tables, "given as tables")


def test_a_path_may_be_a_text() -> None:
    assert load(str(QUICKSTART), ("run.steps=7",)) == load(QUICKSTART, ("run.steps=7",))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml: No such file"):
        load(tmp_path / "nothing.toml")


def test_what_is_not_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not TOML: .*line 1"):
        load(write(tmp_path / "c.toml", "run = = 3"))


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b'run.name = "caf\xe9"')
    with pytest.raises(ConfigError, match=r"c\.toml: not TOML: 'utf-8' codec can't decode"):
        load(path)


def test_a_byte_order_mark_before_toml_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "marked.toml"
    path.write_bytes(b"\xef\xbb\xbf" + QUICKSTART.read_bytes())
    assert load(path, ()) == load(QUICKSTART, ())


def test_settings_are_toml_values_or_text() -> None:
    config = load(QUICKSTART, ("run.steps=7", "run.name=mine", "algorithm.whiten_advantages=false"))
    assert (config.run.steps, config.run.name, config.algorithm.whiten_advantages) == (7, "mine", False)


def test_a_service_reads_its_own_table_only(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.toml", '[services.reward]\nrole = "reward"\naddress = "localhost:1"\n[other]\nx = 1\n'
    )
    assert service_of(read_tables(path), "reward", path).role == "reward"
    with pytest.raises(ConfigError, match=r"no table \[services\.actor\]; there are: reward"):
        service_of(read_tables(path), "actor", path)


def test_the_resolved_config_reads_back_as_itself(tmp_path: Path) -> None:
    config = load(QUICKSTART, ("run.steps=7",))
    path = write(tmp_path / "c.toml", tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
    assert load(path) == config
    assert tomllib.loads(path.read_text())["run"]["steps"] == 7


def test_a_path_of_data_that_is_not_given_is_resolved_as_an_empty_text() -> None:
    """And not as the working directory."""
    config = load(QUICKSTART, ("data.heldout_rows=5",))
    tables = config.model_dump(mode="json", exclude_none=True)
    assert (tables["data"]["heldout"], tables["data"]["train"]) == ("", "runs/arithmetic/train.jsonl")
    assert Config.model_validate(tables) == config


def tables_of(annotation: Any) -> set[type[BaseModel]]:
    """The tables that a type is made of, and theirs."""
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return {table for argument in get_args(annotation) for table in tables_of(argument)}
    inner = (tables_of(field.annotation) for field in annotation.model_fields.values())
    return {annotation}.union(*inner)


def all_tables() -> set[type[BaseModel]]:
    return tables_of(Config).union(*(tables_of(table_type(role)) for role in BUILT_IN))


def test_every_field_has_a_sentence() -> None:
    tables = all_tables()
    assert {ActorTable, LoraTable, ZeroTable, SourceTable} <= tables
    fields = {f"{table.__name__}.{key}": f for table in tables for key, f in table.model_fields.items()}
    assert {name for name, field in fields.items() if not field.description} == set()


def test_every_table_is_on_the_configuration_page() -> None:
    shown = {table for _, table in runpy.run_path(str(GENERATOR))["TABLES"]}
    assert all_tables() - shown == {Config}


def test_the_configuration_page_is_that_of_the_types() -> None:
    page = runpy.run_path(str(GENERATOR))["render"]()
    assert (ROOT / "docs" / "configuration.md").read_text() == page, "run docs/generate_configuration.py"


@pytest.mark.parametrize(("rows", "expected"), [(512, 4), (500, 3), (128, 1), (127, 1), (640, 5)])
def test_a_batch_is_cut_into_as_many_mini_batches_as_it_fills(rows: int, expected: int) -> None:
    assert load(QUICKSTART).mini_batches(rows) == expected
