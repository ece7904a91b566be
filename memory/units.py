"""Sizes as people write them."""

from __future__ import annotations

import re

BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}  # as memory is counted, also without "iB"
UNITS = {"": 1, "B": 1, **BINARY, **{f"{unit}IB": size for unit, size in BINARY.items()}, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parsed_bytes(text: str) -> int:
    """``"512MiB"``, ``"24GiB"``, ``"1.5 GB"`` or plain bytes. Raises ValueError with the rule."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"{text!r} is not a size; write bytes, or a number with MiB or GiB, such as 24GiB.")
    return round(float(match[1]) * UNITS[match[2].upper()])


def shown_bytes(nbytes: int) -> str:
    """With the unit that fits: ``"1.50 GiB"``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"
