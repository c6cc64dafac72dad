"""Meshes, and protocols as users write them, that tests of rows draw from."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.protocols import DataParallel, ThreeD, get_protocol, protocol_names

SIZES = st.integers(1, 4)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Any mesh with sizes up to 4, and any generation mesh that is coarser."""
    pipeline, tensor, data = draw(SIZES), draw(SIZES), draw(SIZES)
    divisors = [[n for n in range(1, size + 1) if size % n == 0] for size in (pipeline, tensor)]
    return Mesh(pipeline, tensor, data, *(draw(st.sampled_from(sizes)) for sizes in divisors))


class Interleaved(DataParallel):
    """Rows dealt like cards."""

    name = "INTERLEAVED"

    def distribute(self, rows: int, mesh: Mesh) -> list[np.ndarray]:
        return [np.arange(rank, rows, mesh.size) for rank in range(mesh.size)]


class Padded(ThreeD):
    """Equal parts."""

    name, pads = "3D_PADDED", True


PROTOCOLS = [*(get_protocol(name) for name in protocol_names()), Interleaved(), Padded()]
