"""Roles are declared in one place, and one of another package is refused where it could not work."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import socket
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from client.session import Session
from controller.config.config import Config, load
from controller.role_groups.cluster import Cluster
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.group import RoleGroup
from controller.role_groups.roles import group_type
from controller.training.algorithm import Algorithm
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.registry import create_readers
from nccl_transfer.transports import host_id
from rlhf.access import Access
from rlhf.contract import group_methods, role_methods
from rlhf.errors import ConfigError, InvalidRequest
from rlhf.plugins import PluginError, load_object
from rlhf.roles import BUILT_IN, RoleSpec, find_role, role_names
from rlhf.v1 import common_pb2
from services.runtime.ranks import Ranks
from services.runtime.server import RankServer
from services.runtime.worker import CallContext, CallResult, CallRows, Worker, register, registered_methods
from settings.service import ServiceTable
from settings.services import table_type

QUICKSTART = Path(__file__).parents[2] / "deploy" / "quickstart" / "quickstart.toml"
TIMEOUT_S = 30.0
NUMBERS = itertools.count()
SPEC = common_pb2.MethodSpec(transfer_protocol="DP_PROTO", inputs=["response_ids"], outputs=["length"])


@pytest.mark.parametrize("role", BUILT_IN)
def test_every_part_of_a_role_of_this_project_is_there(role: str) -> None:
    assert issubclass(table_type(role), ServiceTable)
    assert issubclass(group_type(role), RoleGroup)
    assert callable(load_object(BUILT_IN[role].worker, object))
    assert set(BUILT_IN[role].load_tested) <= role_methods(role).keys()


@pytest.mark.parametrize(
    ("receiver", "source", "name"),
    [("rollout", "actor", "GenerateSequences"), ("values", "critic", "ComputeValues")],
)
def test_a_service_declares_what_it_computes_as_the_one_whose_weights_it_has(
    receiver: str, source: str, name: str
) -> None:
    assert role_methods(receiver)[name].spec == role_methods(source)[name].spec


def test_an_unknown_role_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PluginError, match=r"'acter' is unknown; did you mean 'actor'\?; known: .*critic"):
        find_role("acter")
    assert set(BUILT_IN) <= set(role_names())


def module(monkeypatch: pytest.MonkeyPatch, **contents: Any) -> str:
    """Name of a new module with these contents."""
    made = ModuleType(f"role_of_a_test_{next(NUMBERS)}")
    vars(made).update(contents)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made.__name__


def role(monkeypatch: pytest.MonkeyPatch, **parts: str) -> str:
    """A role as module:object, whose parts are those of the critic unless given."""
    critic = BUILT_IN["critic"]
    defaults = {name: getattr(critic, name) for name in ("service", "table", "worker", "group")}
    return f"{module(monkeypatch, spec=RoleSpec('mine', **{**defaults, **parts}))}:spec"


def test_a_role_is_found_as_module_and_object(monkeypatch: pytest.MonkeyPatch) -> None:
    name = role(monkeypatch)
    assert find_role(name).name == "mine"
    assert group_methods(name) == group_methods("critic")
    assert table_type(name) is table_type("critic")


def test_an_object_that_declares_no_role_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError, match="is of type int, not RoleSpec"):
        find_role(f"{module(monkeypatch, spec=3)}:spec")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"table": "settings.strict:Strict"}, "is no subclass of settings.service.ServiceTable"),
        ({"table": "settings.critic:Nothing"}, "'settings.critic:Nothing' cannot be imported"),
    ],
)
def test_a_table_that_is_none_is_refused(
    parts: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PluginError, match=expected):
        table_type(role(monkeypatch, **parts))


def service(
    monkeypatch: pytest.MonkeyPatch, name: str = "ComputeLength", spec: Any = SPEC, **changes: Any
) -> str:
    """A gRPC service of one method as "module:Service".

    Args:
        name: Name of the method.
        spec: The method's transfer protocol and columns; None: not declared.
        changes: `server_streaming`; `request`, type of the request's field call.
    """
    number = next(NUMBERS)
    file = descriptor_pb2.FileDescriptorProto(
        name=f"test_{number}.proto",
        package=f"test_{number}",
        syntax="proto3",
        dependency=["rlhf/v1/common.proto"],
    )
    fields = {"Request": ("call", changes.pop("request", "Call")), "Response": ("outcome", "Outcome")}
    for message, (field, kind) in fields.items():
        made = file.message_type.add(name=message)
        made.field.add(name=field, number=1, type=11, label=1, type_name=f".rlhf.v1.{kind}")
        made.field.add(name="batch", number=2, type=11, label=1, type_name=".rlhf.v1.Batch")
    method = file.service.add(name="LengthService").method.add(
        name=name, input_type=f".{file.package}.Request", output_type=f".{file.package}.Response", **changes
    )
    if spec is not None:
        options: Any = method.options
        options.Extensions[common_pb2.method].CopyFrom(spec)
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return f"{module(monkeypatch, DESCRIPTOR=pool.FindFileByName(file.name))}:LengthService"


def test_the_methods_of_a_service_of_another_package_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = group_methods(role(monkeypatch, service=service(monkeypatch)))
    assert methods["compute_length"].inputs == ("response_ids",)
    assert methods["compute_length"].outputs == ("length",)
    assert methods["compute_length"].access is Access.CALL
    assert "synchronize" in methods


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"spec": None}, "ComputeLength does not declare its transfer protocol"),
        ({"server_streaming": True}, "ComputeLength streams"),
        ({"request": "Batch"}, "ComputeLength needs a field call of type rlhf.v1.Call in Request"),
        ({"name": "Offload"}, "Offload has the name of a method of WorkerService"),
    ],
)
def test_a_method_that_ranks_could_not_be_called_by_is_refused(
    changes: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PluginError, match=expected):
        role_methods(role(monkeypatch, service=service(monkeypatch, **changes)))


def test_a_service_that_its_module_lacks_is_refused_with_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = re.escape("rlhf/v1/critic.proto has no service 'Critic'; it has: CriticService")
    with pytest.raises(PluginError, match=expected):
        role_methods(role(monkeypatch, service="rlhf.v1.critic_pb2:Critic"))


@pytest.mark.parametrize(
    ("part", "text", "expected"),
    [
        ("group", "controller.role_groups.group:Nothing", "cannot be imported"),
        ("group", "settings.strict:Strict", "is no subclass of controller.role_groups.group.RoleGroup"),
        ("service", "rlhf.v1.nothing_pb2:Service", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_run_is_refused_before_it_starts_where_a_part_of_a_role_is_broken(
    part: str, text: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_a_package = role(monkeypatch, table="settings.service:ServiceTable", **{part: text})
    table = f'services.mine={{role="{of_a_package}", address="127.0.0.1:7109"}}'
    config = load(QUICKSTART, (table,))
    with pytest.raises(ConfigError, match=rf"^services\.mine\.role: .*{expected}"):
        Algorithm(lambda run: None).configure(config)


class LengthWorker(Worker):
    """Tells the length of each response."""

    @register("DP_PROTO", collective=False)
    def compute_length(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        responses = rows["response_ids"]
        assert isinstance(responses, Jagged)
        return CallResult({"length": responses.lengths.astype(np.float32)})


class Silent(Worker):
    """Has none of the methods of its role."""


class ToAll(LengthWorker):
    @register("ONE_TO_ALL")
    def compute_length(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        return CallResult()


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        (Silent, "Silent has no registered method compute_length for /test_"),
        (ToAll, r"ToAll.compute_length is registered with ONE_TO_ALL, but /test_.* declares DP_PROTO"),
    ],
)
def test_a_worker_that_does_not_fit_its_proto_is_refused(
    worker: type[Worker], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "role", role(monkeypatch, service=service(monkeypatch)), raising=False)
    with pytest.raises(ConfigError, match=said):
        registered_methods(worker)


def test_a_role_of_another_package_is_served_found_and_called(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"table": "settings.service:ServiceTable", "group": "controller.role_groups.group:RoleGroup"}
    name = role(monkeypatch, service=service(monkeypatch), **parts)
    monkeypatch.setattr(LengthWorker, "role", name, raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    tables = {"lengths": {"role": name, "address": address}}
    config = Config.model_validate({"services": tables, "data": {"train": "t.jsonl", "heldout": "h.jsonl"}})
    responses = Jagged(np.arange(6, dtype=np.int32), np.asarray([2, 0, 4], np.int64))

    def use() -> np.ndarray:
        with (
            contextlib.closing(Cluster(config, Session(timeout_s=TIMEOUT_S))) as cluster,
            contextlib.closing(Fetcher(host_id(), create_readers())) as fetcher,
        ):
            cluster.connect()
            assert cluster.descriptions["lengths"].role == name
            with pytest.raises(InvalidRequest, match=r"lengths has no method 'compute_lenth'; did you mean"):
                cluster.group("lengths").call("compute_lenth")
            made = cluster.group("lengths").call("compute_length", FutureBatch.of(response_ids=responses))
            result = made.result(["length"], TIMEOUT_S)
            return np.array(fetcher.fetch(result, time.monotonic() + TIMEOUT_S)["length"])

    async def serve() -> np.ndarray:
        worker = LengthWorker(config.services["lengths"], Ranks(0, 1, 1))
        worker.service = "lengths"
        server = RankServer(worker)
        run = asyncio.ensure_future(server.serve())
        try:
            return await asyncio.wait_for(asyncio.to_thread(use), TIMEOUT_S)
        finally:
            server._stop.set()
            await asyncio.wait_for(run, TIMEOUT_S)

    np.testing.assert_array_equal(asyncio.run(serve()), [2.0, 0.0, 4.0])
