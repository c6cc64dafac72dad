"""The methods of the contract, read from the descriptors: no list of them is kept by hand."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor

from rlhf.v1 import common_pb2

MODULES = ("actor", "critic", "reference", "reward", "transfer", "worker")

PLAIN_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 1 << 30),
    ("grpc.max_send_message_length", 1 << 30),
    ("grpc.absolute_max_metadata_size", 64 << 10),
    ("grpc.enable_http_proxy", 0),
)
"""Options of a channel to any server: messages beyond the 4 MiB default, tracebacks beyond the 16 KiB of metadata,
and no pings, which a stock server takes for an attack."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *PLAIN_OPTIONS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)
"""Options both ends of a channel between our own processes use: also pings, which notice a stopped peer within
20 s while a busy one, whose transport answers by itself, stays connected."""


@dataclass(frozen=True, slots=True)
class Method:
    """One rpc: how it is called, and what it declares about its batch.

    Attributes:
        path: gRPC path, "/package.Service/Method".
        snake_name: The Python name: GenerateSequences is generate_sequences.
        streams, takes_stream: Whether its responses do, and its requests.
        takes_rows: Whether its request has a batch.
        inputs, optional_inputs, outputs: Columns it reads and makes.
    """

    service: str
    name: str
    path: str
    snake_name: str
    request: type
    response: type
    streams: bool = False
    takes_stream: bool = False
    takes_rows: bool = False
    spec: Any | None = None
    inputs: tuple[str, ...] = ()
    optional_inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


def _snake_case(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def _methods(service: ServiceDescriptor) -> dict[str, Method]:
    found = {}
    for method in service.methods:
        options: Any = method.GetOptions()
        spec = options.Extensions[common_pb2.method] if options.HasExtension(common_pb2.method) else None
        found[method.name] = Method(
            service=service.full_name,
            name=method.name,
            path=f"/{service.full_name}/{method.name}",
            snake_name=_snake_case(method.name),
            request=message_factory.GetMessageClass(method.input_type),
            response=message_factory.GetMessageClass(method.output_type),
            streams=method.server_streaming,
            takes_stream=method.client_streaming,
            takes_rows="batch" in method.input_type.fields_by_name,
            spec=spec,
            inputs=tuple(spec.inputs) if spec else (),
            optional_inputs=tuple(spec.optional_inputs) if spec else (),
            outputs=tuple(spec.outputs) if spec else (),
        )
    return found


def _services() -> dict[str, dict[str, Method]]:
    services = {}
    for name in MODULES:
        descriptor = importlib.import_module(f"rlhf.v1.{name}_pb2").DESCRIPTOR
        for service in descriptor.services_by_name.values():
            services[service.name.removesuffix("Service").lower()] = _methods(service)
    return services


SERVICES: Mapping[str, Mapping[str, Method]] = _services()
"""Methods by service ("actor", "critic", "reference", "reward", "transfer", "worker") and name."""

ROLES = ("actor", "critic", "reference", "reward")


def group_methods(role: str) -> dict[str, Method]:
    """The methods that a group of ranks of this role runs, by Python name: the role's own and the
    worker's that declare a transfer protocol."""
    both = [*SERVICES[role].values(), *SERVICES["worker"].values()]
    return {method.snake_name: method for method in both if method.spec is not None}
