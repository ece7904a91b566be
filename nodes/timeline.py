"""The picture of a prompt: resident weights over time, one colour a component."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from ..host.snapshot import fate
from ..memory.account import Account, Level, accounts
from ..memory.ledger import Page
from ..memory.units import shown_bytes

WIDTH, PLOT_HEIGHT = 1280, 400
LEFT, RIGHT, TOP, BOTTOM = 110, 24, 56, 44  # margins around the plot
ROW = 26  # of the legend
STRIPE = 6  # pixels between the stripes of what is being read
INK, FAINT, PAPER = "#202124", "#d5d8dc", "#ffffff"
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c00", "#7a5ba8")  # for colour-blind eyes, too
MIN_SECONDS, EMPTY_BYTES = 0.01, 1 << 30  # axes of a prompt in which nothing happened
HALO = 3  # pixels of paper around a label that does not lie in its own band
STEPS = (1.0, 2.0, 5.0, 10.0)
Box = tuple[float, float, float, float]  # left, top, right, bottom


def timeline(page: Page) -> torch.Tensor:
    """[1, H, W, 3] in [0, 1], fp32: stacked levels, the measured peak, and a legend with a row for each component."""
    picture = np.asarray(draw(page), dtype=np.float32) / 255
    return torch.from_numpy(picture)[None]


def draw(page: Page) -> Image.Image:
    """The same as a picture of PIL."""
    known = accounts(page)
    stack = list(bands(known, page))
    image = Image.new("RGB", (WIDTH, TOP + PLOT_HEIGHT + BOTTOM + ROW * (len(known) + 1)), PAPER)
    chart = _Chart(ImageDraw.Draw(image), _Scale.of(page, stack))
    all_bytes = sum(account.bytes for account in known)
    chart.title(f"Weights in memory: peak {shown_bytes(page.peak_bytes)}, all components {shown_bytes(all_bytes)}")
    chart.grid()
    for band in stack:
        chart.band(band)
    if page.peak_bytes:
        chart.peak(page.peak_bytes)
    chart.labels(known, stack)
    chart.legend(known)
    return image


@dataclass(frozen=True)
class Band:
    """Between two moments, one component's place in the stack: bytes ``low`` to ``high``."""

    index: int  # of the component
    begin: float
    end: float
    low: int
    high: int
    is_loading: bool


def bands(known: Sequence[Account], page: Page) -> Iterator[Band]:
    """The whole stack, moment by moment. What is being read already takes its room."""
    moments = sorted({page.began, page.ended, *(level.t for account in known for level in account.levels)})
    positions = [0] * len(known)
    for begin, end in pairwise(moments):
        low = 0
        for index, account in enumerate(known):
            positions[index] = _last_until(account.levels, begin, positions[index])
            level = account.levels[positions[index]]
            for nbytes, is_loading in ((level.resident, False), (level.loading, True)):
                if nbytes:
                    yield Band(index, begin, end, low, low + nbytes, is_loading)
                    low += nbytes


def _last_until(levels: Sequence[Level], moment: float, position: int) -> int:
    while position + 1 < len(levels) and levels[position + 1].t <= moment:
        position += 1
    return position


@dataclass(frozen=True)
class _Scale:
    """Seconds and bytes to pixels."""

    began: float
    seconds: float
    top_bytes: int

    @classmethod
    def of(cls, page: Page, stack: Sequence[Band]) -> _Scale:
        highest = max((band.high for band in stack), default=0)
        top = max(highest, page.peak_bytes) or EMPTY_BYTES
        return cls(page.began, max(page.ended - page.began, MIN_SECONDS), top + top // 10 + 1)

    def x(self, t: float) -> float:
        return LEFT + (t - self.began) / self.seconds * (WIDTH - LEFT - RIGHT)

    def y(self, nbytes: float) -> float:
        return TOP + PLOT_HEIGHT * (1 - nbytes / self.top_bytes)

    def box(self, band: Band) -> Box:
        """First and last pixels, at least one each way."""
        left, right = round(self.x(band.begin)), round(self.x(band.end))
        top, bottom = round(self.y(band.high)), round(self.y(band.low))
        return left, top, max(left, right - 1), max(top, bottom - 1)


class _Chart:
    def __init__(self, pen: ImageDraw.ImageDraw, scale: _Scale) -> None:
        self._pen = pen
        self._scale = scale
        self._fonts = {size: ImageFont.load_default(size) for size in (14, 16, 20)}
        self._taken: list[Box] = []  # by labels

    def title(self, text: str) -> None:
        self._pen.text((LEFT, TOP // 2), text, INK, self._fonts[20], anchor="lm")

    def grid(self) -> None:
        """Round numbers of bytes and of seconds."""
        bottom = TOP + PLOT_HEIGHT
        unit = 1024 ** min(3, int(math.log(self._scale.top_bytes, 1024)))
        for value in ticks(self._scale.top_bytes / unit, 6):
            y = self._scale.y(value * unit)
            self._pen.line((LEFT, y, WIDTH - RIGHT, y), FAINT)
            self._pen.text((LEFT - 8, y), _byte_label(value, unit), INK, self._fonts[14], anchor="rm")
        for value in ticks(self._scale.seconds, 8):
            x = self._scale.x(self._scale.began + value)
            self._pen.line((x, bottom, x, bottom + 5), INK)
            self._pen.text((x, bottom + 9), f"{value:g} s", INK, self._fonts[14], anchor="mt")
        self._pen.line((LEFT, bottom, WIDTH - RIGHT, bottom), INK)

    def band(self, band: Band) -> None:
        """Filled where resident, striped while it is being read."""
        left, top, right, bottom = self._scale.box(band)
        colour = _colour(band.index)
        if not band.is_loading:
            self._pen.rectangle((left, top, right, bottom), colour)
            return
        self._pen.rectangle((left, top, right, bottom), PAPER, colour)
        for x in range(math.ceil(left / STRIPE) * STRIPE, right, STRIPE):
            self._pen.line((x, top, x, bottom), colour, 2)

    def peak(self, nbytes: int) -> None:
        """A dashed line at what was measured."""
        y = self._scale.y(nbytes)
        for x in range(LEFT, WIDTH - RIGHT, 12):
            self._pen.line((x, y, x + 6, y), INK)
        self._write((WIDTH - RIGHT, y - 3), f"peak {shown_bytes(nbytes)}", 14, "rb")

    def labels(self, known: Sequence[Account], stack: Sequence[Band]) -> None:
        """Each component's name once, on or above its longest band; where there is no room, the legend has it."""
        for index, account in enumerate(known):
            own = [band for band in stack if band.index == index and not band.is_loading]
            if own:
                self._label(account.name.partition(" (")[0], max(own, key=lambda band: band.end - band.begin))

    def _label(self, name: str, band: Band) -> None:
        left, top, right, bottom = self._scale.box(band)
        half = self._pen.textlength(name, self._fonts[16]) / 2
        x = min(max((left + right) / 2, LEFT + half), WIDTH - RIGHT - half)
        if bottom - top > 24 and right - left > 2 * half + 8:
            self._write((x, (top + bottom) / 2), name, 16, "mm", PAPER if _is_dark(_colour(band.index)) else INK, halo=0)
        else:
            self._write((x, top - 3), name, 16, "mb")

    def _write(self, where: tuple[float, float], text: str, size: int, anchor: str, colour: str = INK, halo: int = HALO) -> None:
        box = self._pen.textbbox(where, text, self._fonts[size], anchor=anchor)
        if not any(_overlap(box, other) for other in self._taken):
            self._taken.append(box)
            self._pen.text(where, text, colour, self._fonts[size], anchor=anchor, stroke_width=halo, stroke_fill=PAPER)

    def legend(self, known: Sequence[Account]) -> None:
        y = TOP + PLOT_HEIGHT + BOTTOM + ROW / 2
        for index, account in enumerate(known):
            self._pen.rectangle((LEFT, y - 8, LEFT + 16, y + 8), _colour(index), INK)
            text = f"{account.name}: {shown_bytes(account.bytes)}, loaded {account.loads}x, {fate(account)}"
            self._pen.text((LEFT + 26, y), text, INK, self._fonts[16], anchor="lm")
            y += ROW
        note = "Striped: being read from disk." if known else "No component was in memory in this prompt."
        self._pen.text((LEFT, y), note, INK, self._fonts[14], anchor="lm")


def ticks(top: float, count: int) -> list[float]:
    """Round numbers from 0 to ``top``, about ``count`` of them."""
    power = 10 ** math.floor(math.log10(top / count))
    step = next(step * power for step in STEPS if step * power >= top / count)
    return [round(step * number, 12) for number in range(int(top / step) + 1)]


def _byte_label(value: float, unit: int) -> str:
    return f"{value:g} {('B', 'KiB', 'MiB', 'GiB')[round(math.log(unit, 1024))]}"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140  # Rec. 601 luma


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
