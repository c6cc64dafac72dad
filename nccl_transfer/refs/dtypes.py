"""Element types of columns, by name."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Size of an element in bytes, by dtype name; torch and numpy use the same names."""

FLOATING = frozenset({"float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"})
"""Names of the floating-point types, between which weights may be cast."""

TEXT = "utf8"
"""Name of the element type of a jagged column whose rows are texts: an element is one byte of UTF-8."""

ELEMENT_BYTES: Mapping[str, int] = {**ITEM_BYTES, TEXT: 1}
"""Size of an element in bytes, by name of the element type of a column by reference: ITEM_BYTES and TEXT."""

CARRIERS: Mapping[str, np.dtype] = {
    name: np.dtype({"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}.get(name, name))
    for name in ITEM_BYTES
}
"""Numpy dtype that carries each element type: the same one, or an unsigned integer of equal size where numpy has
none."""
