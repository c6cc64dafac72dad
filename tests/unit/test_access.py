"""Each method that a service serves belongs to a class: read, call or administer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import rlhf
from nccl_transfer.transports.gpu.cuda_ipc import CudaIpcTransport
from nccl_transfer.transports.gpu.cuda_ipc_source import CudaIpcSource
from nccl_transfer.transports.gpu.nccl import NcclTransport
from nccl_transfer.transports.gpu.nccl_source import NcclSource
from nccl_transfer.transports.grpc_stream import GrpcSource
from rlhf.access import LIBRARY_METHODS, Access
from rlhf.contract import SERVICES, Method, role_methods, service_methods
from rlhf.roles import BUILT_IN
from rlhf.v1 import common_pb2

TRANSPORTS = {name: service_methods(f"rlhf.v1.{name}_pb2:{service}") for name, service in
              (("nccl", "NcclService"), ("cuda_ipc", "CudaIpcService"))}  # fmt: skip
"""Methods of the services that transports bring, by name of the transport."""
READ = {"worker/Describe", "worker/Watch", "transfer/Stat"}
ADMINISTER = {"worker/AwaitCheckpoint", "worker/Profile", "worker/SaveCheckpoint", "worker/LoadCheckpoint"}
CALL = {
    *(f"actor/{name}" for name in ("GenerateSequences", "ComputeLogProb", "ComputeLoss", "Tokenize", "PrepareUpdate",
                                   "UpdateActor", "UpdateSupervised")),
    *(f"critic/{name}" for name in ("ComputeValues", "UpdateCritic")),
    "reference/ComputeRefLogProb",
    *(f"reward/{name}" for name in ("ComparePairs", "ComputeReward", "UpdateReward")),
    *(f"rollout/{name}" for name in ("CommitWeights", "GenerateSequences", "LoadWeights")),
    *(f"values/{name}" for name in ("CommitWeights", "ComputeValues", "LoadWeights")),
    *(f"worker/{name}" for name in ("BeginSession", "Cancel", "DescribeWeights", "Dispatch", "EndSession", "Introduce",
                                    "Offload", "Onload", "Release", "SendWeights", "Synchronize", "VerifyWeights")),
    *(f"transfer/{name}" for name in ("Fetch", "MarkCorrupt", "Put", "Spill", "TakeBucket", "TakeRelayed")),
    *(f"nccl/{name}" for name in ("Abort", "Attach", "Commit", "Prepare")),
    *(f"cuda_ipc/{name}" for name in ("OpenArena", "OpenStaging", "Stage")),
}  # fmt: skip


def names(services: Mapping[str, Mapping[str, Method]], access: Access) -> set[str]:
    return {
        f"{service}/{name}"
        for service, methods in services.items()
        for name, method in methods.items()
        if method.access is access
    }


def test_every_method_of_every_role_is_of_the_class_that_it_is_known_for() -> None:
    """A new method has to be added here, and with it the decision who may call it."""
    services = {**SERVICES, **TRANSPORTS, **{role: role_methods(role) for role in BUILT_IN}}
    assert names(services, Access.READ) == READ
    assert names(services, Access.CALL) == CALL
    assert names(services, Access.ADMINISTER) == ADMINISTER


def test_the_services_of_transports_are_those_of_their_sources() -> None:
    """All messages and services of this project are in the tests of this file."""
    sources = {NcclTransport.name: NcclSource, CudaIpcTransport.name: CudaIpcSource, "transfer": GrpcSource}
    known = {**TRANSPORTS, "transfer": SERVICES["transfer"]}
    assert {name: service_methods(source.service) for name, source in sources.items()} == known
    protos = Path(rlhf.__file__).parent / "v1"
    assert {path.stem for path in protos.glob("*.proto")} == {"common", "weights", *SERVICES, *TRANSPORTS}


@pytest.mark.parametrize("service", ["worker", "transfer", *TRANSPORTS])
def test_a_method_that_every_rank_serves_says_its_class(service: str) -> None:
    for method in {**SERVICES, **TRANSPORTS}[service].values():
        assert declared(method), f"{method.path} lacks the option (rlhf.v1.access)"


def declared(method: Method) -> int:
    descriptor: Any = method.request.DESCRIPTOR  # type: ignore[attr-defined]
    service = descriptor.file.services_by_name[method.service.rpartition(".")[2]]
    return service.methods_by_name[method.name].GetOptions().Extensions[common_pb2.access]


def test_the_methods_of_libraries_are_known_by_their_paths() -> None:
    served = {
        f"/{service.full_name}/{method.name}"
        for module in (health_pb2, reflection_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert served == set(LIBRARY_METHODS)


def test_the_classes_are_those_of_the_proto() -> None:
    assert {f"ACCESS_{access.name}": access.value for access in Access} == {
        name: value for name, value in common_pb2.Access.items() if value
    }
