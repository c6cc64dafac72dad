"""Settings common to services of every role."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from rlhf import addresses
from settings.engines import Spec
from settings.strict import Positive, Seconds, Strict

ENDING_S = 25.0
"""Longest time, in seconds, that a launcher waits for a service that is about to end to free its address."""


class ServiceTable(Strict):
    """Settings common to services of every role."""

    role: str
    """Role of the service: actor, critic, reference, reward, rollout, values, or one that an installed package brings,
    by its name or as module:object (docs/roles.md)."""
    address: str
    """host:port of rank 0. The other ranks choose free ports, and the controller finds them through rank 0."""
    bind_host: str = ""
    """Address that ranks listen on: one of their host, IPv6 in brackets, or 0.0.0.0 or [::] for all addresses. Empty:
    the address that others connect to, see `address` and `advertise_host`."""
    advertise_host: str = ""
    """Host name or address that others use to connect to the ranks of this host; for a service over several hosts,
    set it on each with `--set`. Empty: on rank 0's host the host of `address`, on another host the local address of
    its connection to rank 0."""
    external: bool = False
    """true: the launcher does not start the service, for example because it is written in another language."""
    ranks: Positive = 1
    """Number of ranks: processes of the service, one per device."""
    pool: str = ""
    """Name of the resource pool that the service runs on; calls of services on pools that share a device run one
    after another. Empty: devices of its own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that ranks compute on. auto: a GPU for each rank on a host that has any, else the CPU; cuda: a GPU, and it
    is an error where the host has none; cpu: the CPU, with the GPUs hidden from the service. A host with GPUs, but
    fewer than ranks, is an error for auto and cuda. A service without a model of its own, such as a Python function,
    computes on the CPU and refuses cuda."""
    threads: Positive = 1
    """Number of threads that each rank computes with. The bits of results depend on it."""
    matmul: Literal["auto", "mkl", "onednn"] = "auto"
    """Library that multiplies float32 matrices on a CPU. auto: the faster one, measured for 0.1 s at start. The bits
    of results depend on it; the Describe RPC returns which one is in use."""
    kernels: Literal["auto", "eager", "compiled"] = "auto"
    """How models of the Llama, Mistral, Qwen2 and Qwen3 families compute norms, gated activations and rotary
    embeddings. eager: operation by operation; compiled: by kernels that torch.compile makes, in fewer passes over
    memory, which needs a C compiler on a GPU and a C++ compiler on a CPU; auto: compiled on a GPU where that works, and
    eager on a CPU. The bits of results depend on it; the Describe RPC returns which are in use."""
    arena_mb: Positive = 64
    """Size of each rank's arena in MiB: the memory in which it keeps the rows of its results until the step ends."""
    arena_device_mb: int = Field(default=256, ge=0)
    """Size of each rank's arena on its GPU in MiB, allocated at start: what a rank computes there stays there until the
    step ends, and other ranks read it from there. Rows that do not fit go to the host. 0: rows go to the host. A rank
    without a GPU has none."""
    checksums: bool = False
    """Adds xxh3 checksums to the references to this service's rows, which readers verify, over any transport, and to
    weights that it sends in place (docs/weights.md). Costs one pass over the bytes on each side. Rows with checksums
    are kept in host memory, also where there is a GPU."""
    transports: tuple[str, ...] = ()
    """Names of the transports that this service reads rows of other ranks with, in order of preference; one of another
    package may be given as `module:object`. Empty: all that are available."""
    startup_timeout_s: Seconds = 120.0
    """Timeout, in seconds, from the launch of the service until it is healthy."""
    stuck_timeout_s: Seconds = 60.0
    """Longest time, in seconds, that a call past its deadline may go on without progress (micro-batches, tokens,
    rows, files). After it the call counts as stuck and the rank exits, which ends the service."""
    output_roots: tuple[Path, ...] = ()
    """Directories on the ranks' hosts; checkpoints, models and traces are written, and checkpoints read, only below
    them. Symbolic links are resolved first. Empty: `directory` of `[run]` in the same file."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if addresses.is_wildcard(addresses.address_host(address)):
            raise ValueError(
                f"{address!r}: the address is also where other ranks connect to; name one of this host, and listen on "
                "all with bind_host"
            )
        addresses.check_address(address)
        return address

    @field_validator("bind_host", "advertise_host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        if host:
            addresses.check_host(host)
        return host

    @field_validator("advertise_host")
    @classmethod
    def _check_advertise_host(cls, host: str) -> str:
        if addresses.is_wildcard(host):
            raise ValueError(f"{host!r} is no address that others can connect to")
        return host

    @property
    def bind_address(self) -> str:
        """host:port that rank 0 listens on."""
        host, _, port = self.address.rpartition(":")
        return f"{self.bind_host or host}:{port}"

    @property
    def bind_key(self) -> str:
        """Name of the key that sets the host of `bind_address`: bind_host where given, else address."""
        return "bind_host" if self.bind_host else "address"

    @property
    def device_arena_bytes(self) -> int:
        """Size of a rank's arena on its GPU, in bytes; 0 for none: rows with checksums are kept in host memory."""
        return 0 if self.checksums else self.arena_device_mb << 20

    @property
    def model_directory(self) -> Path | None:
        """Directory of the model that the service loads; here None: no model."""
        return None

    @property
    def needs_torch(self) -> bool:
        """Whether the ranks use torch; here where there are several, which form a process group."""
        return self.ranks > 1

    @property
    def has_adapters(self) -> bool:
        """Whether the model learns in adapters, so that it serves as reference policy without them; here False."""
        return False

    @property
    def keeps_state(self) -> bool:
        """Whether training changes the service's state, so that checkpoints of a run save it (SaveCheckpoint); here
        whether the table has an optimizer."""
        return getattr(self, "optimizer", None) is not None

    @property
    def allowed_restarts(self) -> int:
        """Number of times that a call of a run may be sent again after the service was lost with it and was started
        again; here 0: the service may hold state of the run."""
        return 0

    @property
    def engine_specs(self) -> dict[str, Spec]:
        """Specs of the engines that the service needs, by the key that names each; here none."""
        return {}

    @property
    def mini_batch_parts(self) -> int:
        """Number of data-parallel ranks that the rows of a mini-batch are divided over; here 1, for a service without
        mini-batches."""
        return 1

    @property
    def row_limits(self) -> dict[str, int]:
        """Limits on the tokens of a prompt and its response together, by the key of this table that sets each; here
        none."""
        return {}

    @property
    def temperatures(self) -> tuple[float, float]:
        """Lowest and highest sampling temperature that the service allows; here 0 and infinity, so any."""
        return 0.0, math.inf
