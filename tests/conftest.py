"""Settings of all tests."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from deploy.certificates import TABLE, write_certificates

# No test is about its own time. The same examples every time; the profile "new" draws others.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None)
settings.load_profile("same")

# With `--dist loadfile` one worker runs a whole file, and one that begins a long file last leaves the others idle.
LONGEST_FILES = (
    "test_runtime_failures",
    "test_replaced_rewards",
    "test_config_errors",
    "test_run",
    "test_deploy",
    "test_conformance",
    "test_plugin_engines",
    "test_python",
    "test_resume_launched",
    "test_abuse",
    "test_loadtest",
    "test_two_hosts",
    "test_rollout_vllm",
    "test_warm_resume",
    "test_plugin_role",
    "test_launched_services",
    "test_plugin_reward",
    "test_distill",
    "test_operations",
    "test_zero",
    "test_shared",
    "test_probe",
    "test_chunks",
    "test_three_d",
    "test_ahead",
    "test_episodes_run",
    "test_hybrid",
    "test_placements",
    "test_resharding",
    "test_residency",
    "test_transfers_between_services",
    "test_algorithms",
    "test_sandbox",
    "test_hybrid_offload",
    "test_fsdp",
    "test_fused",
    "test_predicted_memory",
    "test_resume",
    "test_lone_failures",
    "test_sandbox_attacks",
    "test_transfers",
    "test_rollouts",
    "test_lora_run",
    "test_secure_run",
    "test_lora_ranks",
    "test_meetings",
    "test_plugin_loss",
    "test_transports",
    "test_engines",
    "test_integrity_run",
    "test_weight_deaths",
    "test_fuzz_sample",
    "test_gpu_code",
    "test_three_d_run",
    "test_sft_and_reward_model",
    "test_shipped_configs",
    "test_sharded_loading",
    "test_sessions",
    "test_weights",
    "test_mapping",
    "test_reward_node",
    "test_engine_zero",
    "test_server",
    "test_update",
    "test_memory_activations",
    "test_ranks",
    "test_weight_sync",
    "test_model_types",
    "test_engine_ranks",
    "test_quickstart_task",
    "test_fused_engines",
    "test_reward_processes",
    "test_host_plans",
    "test_relays",
    "test_architecture",
    "test_divided_rows",
    "test_data_loader",
    "test_dispatch",
    "test_surrogates",
    "test_two_gpu_check",
    "test_three_d_memory",
    "test_hub",
    "test_benchmark_transfer",
    "test_columns_on_a_device",
    "test_weight_check",
    "test_sandbox_run",
    "test_deadlines",
    "test_loopback",
)


def pytest_configure(config: pytest.Config) -> None:
    """A shell starts background jobs with SIGINT ignored, and children inherit that: the processes that tests
    interrupt are to get it. Workers of pytest-xdist end without taking down all that they have imported, which takes
    seconds. Elsewhere the exemption of `pytest_collection` ends: extension modules warn of objects that are left."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)
    else:
        atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports the tests while garbage collection is disabled, and exempts what they have imported from it: the
    collector's walks over all of that take a third of the time that the imports take."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Moves the longest files to the front, in the order of LONGEST_FILES, with `--no-loadscope-reorder`. Without it,
    pytest-xdist begins with the files that have the most tests."""
    if getattr(config.option, "loadscopereorder", True):
        return
    places = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file security.toml of a CA for all tests, beside its certificates and tokens."""
    directory = tmp_path_factory.mktemp("certificates")
    write_certificates(directory, (), days=1)
    return directory / TABLE


@pytest.fixture(scope="session")
def other_certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of another CA."""
    directory = tmp_path_factory.mktemp("other_certificates")
    write_certificates(directory, (), days=1)
    return directory / TABLE
