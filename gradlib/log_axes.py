"""Logarithmic axes, with plain numbers on them."""

# matplotlib's own annotations leave the keywords of its methods open.
# pyright: reportUnknownMemberType=false

import math

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
)

from gradlib.figure import inches_of

NUMBER = 0.6  # width of a number below an axis, in inches
DIGITS = {(2, 3, 5): 2.6, (2, 5): 1.5}  # inches per decade to label these digits in it


def make_logarithmic(ax: Axes) -> None:
    """Make the horizontal axis logarithmic, with plain numbers on it."""
    ax.set_xscale("log")
    room = min(max(int(inches_of(ax).width / NUMBER), 2), 9)
    ax.xaxis.set_major_locator(LogLocator(numticks=room))
    ax.tick_params(axis="x", which="both", length=3.5, pad=3.5)
    ax.xaxis.set_major_formatter(FuncFormatter(_plain))
    low, high = ax.get_xlim()
    decade = inches_of(ax).width / math.log10(high / low)
    digits = next((it for it, needed in DIGITS.items() if decade > needed), None)
    if digits and high < 100 * low:  # the axis shows hardly a power of ten
        ax.xaxis.set_minor_locator(LogLocator(subs=digits))
        ax.xaxis.set_minor_formatter(FuncFormatter(_plain))
    else:
        ax.xaxis.set_minor_formatter(NullFormatter())


def label_powers_of_ten(axis: Axis, low: float, high: float) -> None:
    """Label an axis of logarithms, from `low` to `high`, with the plain numbers."""
    if high - low > 2:
        axis.set_major_locator(MaxNLocator(6, integer=True))
    else:
        few, many = (
            _plain_powers(low, high, digits) for digits in ("125", "123456789")
        )
        shown = few if few[1:] else many
        axis.set_major_locator(FixedLocator(shown) if shown[1:] else MaxNLocator(4))
    axis.set_major_formatter(FuncFormatter(_power_of_ten))


def _plain_powers(low: float, high: float, digits: str) -> list[float]:
    """Return the logarithms, from `low` to `high`, of a digit times a power of ten."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    found = [power + math.log10(int(digit)) for power in decades for digit in digits]
    return [at for at in found if low <= at <= high]


def _plain(value: float, place: int) -> str:
    """Return the text that `_power_of_ten` gives for a number's logarithm."""
    return _power_of_ten(math.log10(value), place)


def _power_of_ten(exponent: float, _place: int) -> str:
    if abs(exponent) < 4:
        return f"{10.0**exponent:.3g}"
    power = math.floor(exponent + 1e-9)
    return f"{10.0 ** (exponent - power):.3g}e{power}"
