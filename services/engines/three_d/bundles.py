"""Groups the tensors of a model into bundles that one collective gathers, and the bundles into buckets, layer by
layer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.storage.layout import Layout

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Bundle:
    """Tensors of equal shape that one collective gathers: the same weight of one layer of each stage, or a weight of
    a single stage.

    Attributes:
        names: Names of the tensors.
        layout: Layout of the first tensor on the training mesh; the others differ in stage alone.
        stages: Training stage of each tensor.
    """

    names: tuple[str, ...]
    layout: Layout
    stages: tuple[int, ...]

    def buffer_shape(self, num_parts: int) -> tuple[int, ...]:
        """Returns the shape [tensors of the bundle, rows, ...] of a buffer for `num_parts` tensor-parallel shards of
        each tensor; of a tensor that is not cut, for the whole tensor once."""
        rows, *rest = self.layout.kept_shape
        return (len(self.names), rows * (num_parts if self.layout.is_cut else 1), *rest)


def bundle_layers(
    layouts: Mapping[str, Layout], stages: Sequence[int], stages_of_tied: Sequence[int], last_stage: int
) -> list[list[Bundle]]:
    """Groups all tensors of the gathered stages into buckets of bundles: the first bucket has the tensors outside of
    layers, and each further one those of one layer of each stage.

    Args:
        layouts: Layouts of all tensors on the training mesh, by name.
        stages: Training stages whose weights this rank's gather group gathers.
        stages_of_tied: Training stages from which its gather group of tied tensors gathers those.
        last_stage: Number of the last stage, which has a replica of tied tensors.
    """

    def stage_of(name: str) -> int | None:
        """Returns the first gathered stage that has a tensor; None if none has it."""
        layout = layouts[name]
        has = [layout.stage, *([last_stage] if layout.tied else [])]
        return next((stage for stage in has if stage in (stages_of_tied if layout.tied else stages)), None)

    def bundle(names: list[str]) -> Bundle:
        staged = sorted((stage, name) for name in names if (stage := stage_of(name)) is not None)
        return Bundle(
            tuple(name for _, name in staged), layouts[names[0]], tuple(stage for stage, _ in staged)
        )

    per_stage = 1 + max(
        int(found[1]) for name, x in layouts.items() if x.stage == 0 and (found := _LAYER.search(name))
    )
    buckets: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, layout in layouts.items():
        if (found := _LAYER.search(name)) is not None:
            if layout.stage in stages:
                number = int(found[1]) % per_stage
                buckets[number][_LAYER.sub(f".layers.{number}.", name)].append(name)
        elif stage_of(name) is not None:
            buckets[-1][name].append(name)
    return [[bundle(names) for names in bucket.values()] for _, bucket in sorted(buckets.items())]
