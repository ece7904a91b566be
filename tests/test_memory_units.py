from __future__ import annotations

import pytest
from lazy_h3.memory.units import parsed_bytes, shown_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("24GiB", 24 << 30),
        (" 1.5 gib ", 3 << 29),
        ("1.5 GB", 1_500_000_000),
        ("2TiB", 2 << 40),
        ("24G", 24 << 30),
        ("512m", 512 << 20),
        ("7 B", 7),
    ],
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert parsed_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1,5GiB", "24 giga", "1e9", "0x10", "24GiB!"])
def test_what_is_no_size_is_refused_with_the_rule(text):
    with pytest.raises(ValueError, match="is not a size; write bytes, or a number with MiB or GiB"):
        parsed_bytes(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 << 19, "1.50 MiB"), (40 << 30, "40.00 GiB"), (5 << 40, "5120.00 GiB")],
)
def test_sizes_are_shown_in_the_unit_that_fits(nbytes, text):
    assert shown_bytes(nbytes) == text
