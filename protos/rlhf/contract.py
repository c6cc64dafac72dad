"""The RPC methods of all services, read from the descriptors of the protos."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError

from rlhf.errors import InvalidRequest
from rlhf.v1 import common_pb2

MODULES = ("actor", "critic", "reference", "reward", "transfer", "worker")

PLAIN_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 1 << 30),
    ("grpc.max_send_message_length", 1 << 30),
    ("grpc.absolute_max_metadata_size", 64 << 10),
    ("grpc.enable_http_proxy", 0),
)
"""gRPC options of a channel to any server: messages of up to 1 GiB instead of 4 MiB, metadata of up to 64 KiB for
tracebacks, and no keepalive pings, for which a server with default options would close the connection."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *PLAIN_OPTIONS,
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)
"""gRPC options of clients and servers of the cluster: PLAIN_OPTIONS with keepalive pings. A stopped peer is detected
within 10 s; a busy peer stays connected, since gRPC's own threads answer pings."""


@dataclass(frozen=True)
class Method:
    """One RPC method of a service.

    Attributes:
        service: Full name of the service, "rlhf.v1.ActorService".
        name: Name of the method, "GenerateSequences".
        request, response: Message classes.
        streams: Whether the method streams responses.
        takes_stream: Whether the method takes a stream of requests.
        spec: Its MethodSpec, the transfer protocol and batch columns; None if the .proto declares none.
    """

    service: str
    name: str
    request: type
    response: type
    streams: bool
    takes_stream: bool
    spec: Any | None

    @functools.cached_property
    def path(self) -> str:
        """gRPC path of the method, "/package.Service/Method"."""
        return f"/{self.service}/{self.name}"

    @functools.cached_property
    def snake_name(self) -> str:
        """Name of the method in Python: "generate_sequences" for GenerateSequences."""
        return "".join(f"_{c.lower()}" if c.isupper() else c for c in self.name).lstrip("_")

    def parse(self, request: bytes) -> Any:
        """Parses a serialized request of this method.

        Raises:
            InvalidRequest: The bytes cannot be parsed.
        """
        try:
            return self.request.FromString(request)  # type: ignore[attr-defined]
        except DecodeError as error:
            raise InvalidRequest(f"{self.name}: the request is no {self.request.__name__}: {error}") from None

    @functools.cached_property
    def takes_rows(self) -> bool:
        """Whether requests of the method have a field `batch`."""
        return "batch" in self.request.DESCRIPTOR.fields_by_name  # type: ignore[attr-defined]

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        return tuple(self.spec.inputs) if self.spec else ()

    @functools.cached_property
    def optional_inputs(self) -> tuple[str, ...]:
        return tuple(self.spec.optional_inputs) if self.spec else ()

    @functools.cached_property
    def outputs(self) -> tuple[str, ...]:
        return tuple(self.spec.outputs) if self.spec else ()


def _methods(service: ServiceDescriptor) -> dict[str, Method]:
    found = {}
    for method in service.methods:
        options: Any = method.GetOptions()
        spec = options.Extensions[common_pb2.method] if options.HasExtension(common_pb2.method) else None
        found[method.name] = Method(
            service=service.full_name,
            name=method.name,
            request=message_factory.GetMessageClass(method.input_type),
            response=message_factory.GetMessageClass(method.output_type),
            streams=method.server_streaming,
            takes_stream=method.client_streaming,
            spec=spec,
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
"""Methods by short name of the service ("actor", "critic", "reference", "reward", "transfer", "worker"), then by name
of the method ("GenerateSequences")."""

ROLES = ("actor", "critic", "reference", "reward")


def group_methods(role: str) -> dict[str, Method]:
    """Returns the methods that a controller calls on all ranks of a service of this role, by name in Python: the
    methods of the role's service and of WorkerService that declare a transfer protocol."""
    both = [*SERVICES[role].values(), *SERVICES["worker"].values()]
    return {method.snake_name: method for method in both if method.spec is not None}
