"""The picture: what is drawn where, and that it is drawn for anything that can happen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lazy_h3.memory.account import accounts
from lazy_h3.memory.ledger import Event, Page
from lazy_h3.nodes.timeline import COLOURS, LEFT, PLOT_HEIGHT, RIGHT, TOP, WIDTH, Band, bands, draw, ticks, timeline

GIB = 1 << 30


def event(t: float, kind: str, name: str, gib: float) -> Event:
    return Event(t, 0, kind, name, "1", int(gib * GIB), 0, "")


TWO = Page(
    "p",
    100.0,
    110.0,
    {"first (file)": 4 * GIB},
    8 * GIB,
    (
        event(102, "load_begin", "second (file)", 4),
        event(104, "load_end", "second (file)", 4),
        event(108, "release", "first (file)", 4),
    ),
)


def pixels(page: Page) -> np.ndarray:
    return np.asarray(draw(page))


def is_colour(index: int, pixel: np.ndarray) -> bool:
    return tuple(pixel) == tuple(int(COLOURS[index][at : at + 2], 16) for at in (1, 3, 5))


def at(page: Page, t: float, gib: float) -> np.ndarray:
    """The pixel of a moment and an amount."""
    top = page.peak_bytes * 1.1 / GIB
    x = LEFT + (t - page.began) / (page.ended - page.began) * (WIDTH - LEFT - RIGHT)
    return pixels(page)[round(TOP + PLOT_HEIGHT * (1 - gib / top)), round(x)]


def test_components_are_stacked_and_what_is_being_read_already_takes_its_room():
    assert list(bands(accounts(TWO), TWO)) == [
        Band(0, 100.0, 102, 0, 4 * GIB, False),
        Band(0, 102, 104, 0, 4 * GIB, False),
        Band(1, 102, 104, 4 * GIB, 8 * GIB, True),
        Band(0, 104, 108, 0, 4 * GIB, False),
        Band(1, 104, 108, 4 * GIB, 8 * GIB, False),
        Band(1, 108, 110.0, 0, 4 * GIB, False),
    ]


def test_the_picture_has_the_colour_of_who_is_resident_at_each_moment():
    assert is_colour(0, at(TWO, 101, 2.5))
    assert is_colour(0, at(TWO, 105, 1))
    assert is_colour(1, at(TWO, 105, 7))
    assert is_colour(1, at(TWO, 109, 1))
    assert not any(is_colour(index, at(TWO, 101, 6)) for index in range(len(COLOURS)))


def test_what_is_being_read_is_striped():
    row = [at(TWO, 102.5 + step / 50, 6) for step in range(50)]
    assert 0 < sum(is_colour(1, pixel) for pixel in row) < len(row)


def test_a_node_gets_one_picture_with_values_from_0_to_1():
    image = timeline(TWO)
    assert image.shape == (1, *pixels(TWO).shape)
    assert image.dtype == torch.float32
    assert (float(image.min()), float(image.max())) == (0, 1)


@pytest.mark.parametrize(
    "page",
    [
        Page(),
        Page("p", 1.0, 1.0, {"x": 1}, 1),
        Page("p", 0.0, 1e6, {f"component {n}": n * GIB for n in range(1, 12)}, 66 * GIB),
        Page("p", 0.0, 5.0, {"имя (файл)": 10}, 10),
        Page("p", 0.0, 5.0, {}, 0, (event(1, "load_begin", "x", 1), event(2, "load_end", "x", 0))),
        Page("p", 0.0, 5.0, {}, GIB, tuple(event(n / 500, ("pin", "unpin")[n % 2], "x", 1) for n in range(2000))),
    ],
    ids=["nothing", "no time", "more than colours", "another script", "a load that failed", "thousands of events"],
)
def test_a_picture_is_drawn_whatever_happened(page):
    image = draw(page)
    assert image.size == (WIDTH, image.height)
    assert image.height > PLOT_HEIGHT


@pytest.mark.parametrize(
    ("top", "count", "expected"),
    [(10, 5, [0, 2, 4, 6, 8, 10]), (0.9, 4, [0, 0.5]), (47.9, 6, [0, 10, 20, 30, 40]), (1, 1, [0, 1])],
)
def test_ticks_are_round_numbers_from_zero(top, count, expected):
    assert ticks(top, count) == expected
