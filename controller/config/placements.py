"""Placements by name: which devices each service runs on. Pure functions; pools by hand are in `[pools]`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

from controller.config.devices import check_names
from settings.rollout import RolloutServiceTable
from settings.service import ServiceTable

Placement = Literal["colocate", "standalone", "split", "interleaved", "disaggregated"]
"""Names of the placements; see docs/placement.md."""
Services = Mapping[str, ServiceTable]
"""Tables of the services of a run, by name."""

OF_THE_POLICY = ("actor", "reference", "rollout")
"""Roles that are on the first of the two sets of devices of `split`."""


def devices_of(
    placement: Placement, devices: Sequence[str], services: Services
) -> dict[str, tuple[str, ...]]:
    """Returns the names of the devices of each service that is placed. External services are not: they run elsewhere.

    Args:
        placement: Name of the placement.
        devices: Names of the devices. Empty: as many as the placement needs, named "gpu:0" and so on, or "cpu:0" where
            all services compute on the CPU.
        services: Tables of the services.

    Raises:
        ValueError: There are too few devices, one is named twice, or the placement does not go with the services.
    """
    placed = {name: table for name, table in services.items() if not table.external}
    places = _PLACES[placement](placed)
    needed = max((place.stop for place in places.values()), default=0)
    kind = (
        "cpu" if all(table.device == "cpu" or not table.needs_torch for table in placed.values()) else "gpu"
    )
    names = list(devices) or [f"{kind}:{number}" for number in range(needed)]
    check_names("devices", names)
    if len(names) < needed:
        each = ", ".join(f"{name} {_numbers(place)}" for name, place in places.items())
        raise ValueError(
            f"devices: placement {placement} needs {needed} for these services ({each}), and there are {len(names)}"
        )
    return {name: tuple(names[place.start : place.stop]) for name, place in places.items()}


def check(
    placement: Placement | None,
    devices: Sequence[str],
    pools: Mapping[str, Sequence[str]],
    services: Services,
) -> None:
    """Raises ValueError where a placement cannot be had, or a configuration has both a placement and pools, or devices
    without a placement."""
    if placement is None:
        if devices:
            known = ", ".join(get_args(Placement))
            raise ValueError(f"devices: they need a placement: {known}; or name them in [pools]")
        return
    by_hand = (
        ["pools"] if pools else [f"services.{name}.pool" for name, table in services.items() if table.pool]
    )
    if by_hand:
        raise ValueError(f"placement: {placement} places all services, so {by_hand[0]} has to be left out")
    devices_of(placement, devices, services)


def _colocate(services: Services) -> dict[str, range]:
    return _sets([services])


def _standalone(services: Services) -> dict[str, range]:
    return _sets({name: table} for name, table in services.items())


def _split(services: Services) -> dict[str, range]:
    return _sets(_parted(services, lambda table: table.role in OF_THE_POLICY))


def _interleaved(services: Services) -> dict[str, range]:
    """Trained and generating services get all devices, each other service a part of them."""
    whole, parts = _parted(services, lambda table: table.keeps_state or _generates(table))
    places = _sets({name: table} for name, table in parts.items())
    needed = max(
        [*(table.ranks for table in whole.values()), *(place.stop for place in places.values())], default=0
    )
    return {name: places.get(name, range(needed)) for name in services}


def _disaggregated(services: Services) -> dict[str, range]:
    if not any(_generates(table) for table in services.values()):
        raise ValueError(
            "placement: disaggregated needs a service of role rollout, [services.rollout], which generates on devices "
            "of its own"
        )
    return _sets(_parted(services, lambda table: table.keeps_state))


_PLACES: Mapping[Placement, Callable[[Services], dict[str, range]]] = {
    "colocate": _colocate,
    "standalone": _standalone,
    "split": _split,
    "interleaved": _interleaved,
    "disaggregated": _disaggregated,
}


def _parted(services: Services, is_first: Callable[[ServiceTable], bool]) -> tuple[Services, Services]:
    first = {name: table for name, table in services.items() if is_first(table)}
    return first, {name: table for name, table in services.items() if name not in first}


def _sets(sets: Iterable[Services]) -> dict[str, range]:
    """Returns the numbers of the devices of each service where each set of them shares as many devices as its largest
    service has ranks."""
    sets = list(sets)
    sizes = [max((table.ranks for table in each.values()), default=0) for each in sets]
    ends = list(itertools.accumulate(sizes))
    return {
        name: range(end - size, end)
        for each, size, end in zip(sets, sizes, ends, strict=True)
        for name in each
    }


def _generates(table: ServiceTable) -> bool:
    return isinstance(table, RolloutServiceTable)


def _numbers(place: range) -> str:
    return f"{place.start}-{place.stop - 1}" if len(place) > 1 else str(place.start)
