"""Fits the constants of a kind of device to calls that were timed on it: the model of costs stays as it is, and a
handful of its constants are chosen so that it predicts the calls best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from controller.mapping.configured import described_times
from controller.mapping.devices import DeviceGroup, DeviceTable
from controller.mapping.mapper import on
from controller.mapping.problem import Model
from controller.mapping.simulate import Site
from controller.mapping.workload import Workload

START = {
    "efficiency": 0.5,
    "memory_efficiency": 0.5,
    "link_gb": 1.0,
    "launch_us": 5.0,
    "collective_us": 10.0,
    "call_us": 5000.0,
}
"""The fitted constants, with a scale for those that are 0 in the table."""
RATES = ("efficiency", "memory_efficiency", "link_gb")
"""The constants that are rates: times are inversely proportional to them, and proportional to the others."""
WEIGHT_OF_TABLE = 0.005
"""Weight of the relative deviation of a constant from its value in the table; a call's deviation has weight 1."""
ROUNDS, SWEEPS, LEAST = 40, 100, 1e-3
"""Number of linearizations, descent sweeps per linearization, and the smallest ratio of a constant's part to that of
the table."""
STARTS = (0.1, 1.0, 10.0)
"""Starting points of the descents: ratios of the time of matrix products to that of the table."""
MIN_EFFECT = 0.05
"""Smallest change of the predictions for which the timed calls determine a constant."""


@dataclass(frozen=True)
class ProbedCall:
    """A call that was timed.

    Attributes:
        name: Name for people.
        model: The model, in the layout of its service, with this call alone.
        workload: Its rows.
        seconds: Seconds that it took.
    """

    name: str
    model: Model
    workload: Workload
    seconds: float

    def predicted_s(self, group: DeviceGroup) -> float:
        """Returns the seconds that the model of costs gives it, on a pool of as many devices as it has ranks."""
        site = Site(group, group.alignment(self.model.use.ranks))
        return described_times(on(self.model, group), site, self.workload)[0]


@dataclass(frozen=True)
class Calibration:
    """Constants that were fitted.

    Attributes:
        table: The table with them.
        fitted: Names of those that the calls determine; the others are as before.
    """

    table: DeviceTable
    fitted: tuple[str, ...]


def calibrate(group: DeviceGroup, calls: Sequence[ProbedCall]) -> Calibration:
    """Fits the constants of `START` to timed calls: by least squares of predicted over measured seconds less 1, with a
    weak pull towards the table. Predictions are sums, and maxima of two, of parts that are proportional to the
    constants or to the inverse of rates, so each linearization is a convex problem of a few variables. An efficiency
    above 1 raises the peak that it is a share of.

    Args:
        group: The devices; its table is the start.
        calls: The calls.
    """
    names = list(START)
    pull = np.array([1.0 if getattr(group.table, name) else 0.0 for name in names])

    def ratios(parts: np.ndarray) -> np.ndarray:
        tried = replace(group, table=_scaled(group.table, names, parts))
        return np.array([call.predicted_s(tried) / call.seconds for call in calls])

    # The maximum of two terms makes the loss non-convex, so a descent may end in a local minimum.
    ends = [
        _descended(ratios, np.where(np.array(names) == "efficiency", start, pull), pull) for start in STARTS
    ]
    parts = min(ends, key=lambda each: _loss(ratios(each), each, pull))
    have_effect = [_has_effect(ratios, parts, number) for number in range(len(names))]
    table = _scaled(group.table, names, np.where(have_effect, parts, pull))
    return Calibration(
        _within_peaks(table), tuple(name for name, is_fit in zip(names, have_effect, strict=True) if is_fit)
    )


def _loss(ratios: np.ndarray, parts: np.ndarray, pull: np.ndarray) -> float:
    return float(np.square(ratios - 1).sum() + WEIGHT_OF_TABLE**2 * np.square(parts - pull).sum())


def _has_effect(ratios: Callable[[np.ndarray], np.ndarray], parts: np.ndarray, number: int) -> bool:
    """Returns whether the predictions change by more than `MIN_EFFECT` if a constant's part grows by half."""
    more = parts.copy()
    more[number] = 1.5 * max(parts[number], 1.0)
    return float(np.square(ratios(more) - ratios(parts)).sum()) > MIN_EFFECT**2


def _descended(ratios: Callable[[np.ndarray], np.ndarray], start: np.ndarray, pull: np.ndarray) -> np.ndarray:
    """Returns the parts of a local minimum of the loss."""
    parts = np.maximum(start, LEAST)
    for _ in range(ROUNDS):
        at = ratios(parts)
        slopes = _slopes(ratios, parts)
        bounds = np.maximum(parts / 2, LEAST), np.maximum(parts * 2, 1.0)
        found, loss = _least_squares(slopes, 1 - at + slopes @ parts, pull, bounds), _loss(at, parts, pull)
        # A factor of two at a time, and halved until it helps, since the larger of two terms may change.
        while _loss(ratios(found), found, pull) > loss and np.abs(found - parts).max() > LEAST:
            found = (found + parts) / 2
        has_moved = np.abs(found - parts).max() > LEAST
        parts = found
        if not has_moved:
            break
    return parts


def _slopes(ratios: Callable[[np.ndarray], np.ndarray], parts: np.ndarray) -> np.ndarray:
    """Returns the derivatives [calls, constants] of predicted over measured seconds."""
    steps, at = LEAST * np.eye(len(parts)), ratios(parts)
    return np.stack([(ratios(parts + step) - at) / LEAST for step in steps], axis=1)


def _least_squares(
    slopes: np.ndarray, target: np.ndarray, pull: np.ndarray, bounds: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Returns the parts x within bounds that minimize |slopes x - target|^2 + w^2 |x - pull|^2, by descent along one
    coordinate after another."""
    normal = slopes.T @ slopes + WEIGHT_OF_TABLE**2 * np.eye(len(pull))
    wanted = slopes.T @ target + WEIGHT_OF_TABLE**2 * pull
    x = np.clip(np.linalg.solve(normal, wanted), *bounds)
    for _ in range(SWEEPS):
        for i in range(len(x)):
            x[i] = np.clip(x[i] + (wanted[i] - normal[i] @ x) / normal[i, i], bounds[0][i], bounds[1][i])
    return x


def _scaled(table: DeviceTable, names: Sequence[str], parts: np.ndarray) -> DeviceTable:
    """Returns a table whose constants take `parts` times as many seconds; those that are 0, of `START`."""
    values = {}
    for name, part in zip(names, parts.tolist(), strict=True):
        value = getattr(table, name) or (START[name] if part > LEAST else 0.0)
        values[name] = value / max(part, LEAST) if name in RATES else value * part
    return table.model_copy(update=values)


def _within_peaks(table: DeviceTable) -> DeviceTable:
    """Returns a table of the same rates whose efficiencies are at most 1."""
    compute, memory = max(table.efficiency, 1.0), max(table.memory_efficiency, 1.0)
    return table.model_copy(
        update={
            "tflops": {dtype: rate * compute for dtype, rate in table.tflops.items()},
            "efficiency": table.efficiency / compute,
            "memory_bandwidth_gb": table.memory_bandwidth_gb * memory,
            "memory_efficiency": table.memory_efficiency / memory,
        }
    )


def table_text(name: str, table: DeviceTable, fitted: Sequence[str], source: str) -> str:
    """Returns a kind of devices as TOML, for `rlhf-map --table`, with a comment on where each figure is from.

    Args:
        name: Name of the kind.
        table: Its figures.
        fitted: Names of those that were fitted.
        source: Where and when they were measured, one line.
    """
    lines = [f"# {source}", f'["{name}"]']
    for key, value in table.model_dump().items():
        text = (
            "{ " + ", ".join(f"{dtype} = {rate:.6g}" for dtype, rate in value.items()) + " }"
            if isinstance(value, dict)
            else f"{float(f'{value:.4g}')}"
        )
        lines.append(f"{key} = {text}  # {'fitted to the timed calls' if key in fitted else 'not measured'}")
    return "\n".join(lines) + "\n"
