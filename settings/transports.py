"""Names of the transports, for checks where the data plane is not imported."""

from __future__ import annotations

from rlhf.plugins import nearest, plugin_names

TRANSPORT_GROUP = "rlhf_cluster.transports"
"""Entry-point group in which installed packages declare transports."""
TRANSPORTS = ("memfd", "cuda_ipc", "nccl", "tcp", "grpc")
"""Transports of this project (`nccl_transfer.registry`)."""


def check_transport(name: str) -> None:
    """Raises ValueError where no transport of this project or of an installed package has this name, unless it is
    "module:object"; the text lists the known names."""
    known = plugin_names(TRANSPORT_GROUP, TRANSPORTS)
    if ":" not in name and name not in known:
        raise ValueError(
            f"{name!r} is unknown{nearest(name, known)}; known: {', '.join(known)}, or module:object"
        )
