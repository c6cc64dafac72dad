"""Settings that services of every role share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from rlhf import addresses
from settings.strict import Positive, Strict


class ServiceTable(Strict):
    """Settings common to services of every role."""

    address: str
    """host:port of rank 0. The other ranks choose their ports and are found through rank 0."""
    bind_host: str = ""
    """Where ranks listen: an address of their host, IPv6 in brackets, or 0.0.0.0 or [::] for all of them. Empty:
    where they are reached."""
    advertise_host: str = ""
    """Where the ranks of one host are reached by others; for a service over several hosts, given on each by `--set`.
    Empty: on rank 0's host the host of `address`, on another the address that it reaches rank 0 from."""
    external: bool = False
    """True: the launcher does not start the service, for example one in another language."""
    ranks: Positive = 1
    """Processes of the service, one per device."""
    pool: str = ""
    """Resource pool the service runs on; services on pools that share a device take turns. Empty: devices
    of its own."""
    threads: Positive = 1
    """Threads each rank computes with. Bits depend on it."""
    matmul: Literal["auto", "mkl", "onednn"] = "auto"
    """Library that multiplies float32 matrices on a CPU. auto: the faster one, by a measurement of 0.1 s at start. Bits
    depend on it; Describe tells which one is in use."""
    arena_mb: Positive = 64
    """Size in MiB of the memory each rank keeps results in until the step ends."""
    checksums: bool = False
    """Puts xxh3 checksums into the references to this service's rows; readers verify them, over any
    transport. Costs a pass over the bytes at each end."""
    transports: tuple[str, ...] = ()
    """Transports this service fetches with, by name, in order of preference. Empty: all that are available."""
    startup_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time from launch to a healthy service."""
    stuck_timeout_s: float = Field(default=60.0, gt=0)
    """Longest time that a call may go on without progress (micro-batches, tokens, rows, files) after its deadline:
    then it is stuck, and the rank leaves, which ends the service."""
    output_roots: tuple[Path, ...] = ()
    """Directories on the ranks' hosts below which checkpoints, models and traces are written, and checkpoints read;
    symbolic links are resolved first. Empty: `directory` of `[run]` in the same file."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if addresses.is_wildcard(address.rpartition(":")[0]):
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
        """The key that names the host of `bind_address`."""
        return "bind_host" if self.bind_host else "address"

    @property
    def model_directory(self) -> Path | None:
        """Directory of the model that the service loads; None without one."""
        return None

    @property
    def needs_torch(self) -> bool:
        """Whether the ranks compute with torch, or meet through it."""
        return self.ranks > 1

    @property
    def has_adapters(self) -> bool:
        """Whether the model learns in adapters, so that it is its own reference without them."""
        return False

    @property
    def mini_batch_parts(self) -> int:
        """Number of parts that the rows of a mini-batch are dealt out to; 1 for a service that has no mini-batches."""
        return 1

    @property
    def row_limits(self) -> dict[str, int]:
        """By key of this table, the most tokens that a prompt and its response may have together."""
        return {}

    @property
    def temperatures(self) -> tuple[float, float]:
        """Lowest and highest temperature that the service samples at."""
        return 0.0, math.inf
