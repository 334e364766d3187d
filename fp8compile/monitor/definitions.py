"""Statistics of an operand, each computed from sums and maxima over its elements.

x is an element as it was cast, c its code, s its scale (times the outer scale), F the largest value of the format, u
the step below F, n the number of elements of the whole tensor.

    amax            max |x|; NaN if an element is NaN
    underflow       the fraction of all elements with c = 0 and x != 0
    saturation      the fraction with |x| > (F + u / 2) s and s > 0: a wider format would have rounded to more than F
    subnormal       the fraction with 0 < |c| < the smallest normal number
    nonfinite       the number of NaN and infinities
    scale_min       smallest and largest scale
    scale_max
    scale_std       standard deviation of the scales, weighted by their numbers of elements
    square_error    sum of (x - c s)^2; mse is square_error / n
    sqnr            10 log10(sum of x^2 / square_error), in dB
    range           log2 amax - log2 of the smallest |x| that is not 0
    exponents       how many codes have each exponent field, a list of 32; elements that are NaN are left out

A total is a sum or a maximum of one number for each element. A graph computes it for this rank's elements, a layer's
buffers combine several backwards, and a reading combines ranks. A statistic is computed from one or more totals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8compile.formats import limit_of
from fp8compile.monitor.add_pieces import FIRST_SUMS, NUMEL, PASSES, VALUED
from fp8compile.monitor.elements import Elements
from fp8compile.quantizers.constant import salt_with

__all__ = [
    "FIRST_SUMS",
    "NUMEL",
    "PASSES",
    "STATISTICS",
    "VALUED",
    "Statistic",
    "Total",
    "columns_of",
    "counts_role",
    "is_sum",
    "names_of_columns",
    "register_statistic",
    "totals_of",
]

EXPONENTS = 32  # of e5m2; other formats have fewer


@dataclass(frozen=True)
class Total:
    """A sum or maximum over an operand, of a number that is computed from each element.

    Attributes:
        name: Name of the total.
        compute: Takes the operand's `Elements`; returns a number for each value, in the shape of the values: bool or
            int32 to be counted, or float32 or float64.
        combine: ``"sum"`` or ``"max"``.
        of_codes: Whether codes suffice to compute the total, as for a weight that is kept only as codes.
        is_magnitude: Whether each number is the magnitude of a value.
    """

    name: str
    compute: Callable[[Elements], Tensor]
    combine: str
    of_codes: bool = False
    is_magnitude: bool = False


@dataclass(frozen=True)
class Statistic:
    """A statistic of an operand, with the totals and the function that it is computed from.

    Attributes:
        name: Name of the statistic in readings.
        totals: Names of the totals.
        finish: Computes the statistic from a dict of these totals and ``"numel"``.
    """

    name: str
    totals: tuple[str, ...]
    finish: Callable[[Mapping[str, float]], Any]

    def of_codes(self) -> bool:
        """Whether the codes of an operand suffice to compute the statistic, without the values."""
        return all(TOTALS[name].of_codes for name in self.totals)


def _beyond(seen: Elements) -> Tensor:
    return (seen.magnitude() > seen.scale * limit_of(seen.format)) & (seen.scale > 0)


def _is_subnormal(seen: Elements) -> Tensor:
    found = seen.decoded().abs()
    return (found > 0) & (found < 2.0**seen.format.min_exponent)


def _field(seen: Elements) -> Tensor:
    sign = 1 << (seen.format.bits - 1)
    found = (seen.codes.to(torch.int32) & (sign - 1)) >> seen.format.mantissa_bits
    return torch.where(_is_nan(seen), -1, found)


def _has_exponent(field: int) -> Callable[[Elements], Tensor]:
    return lambda seen: seen.once(_field) == field


def _is_nan(seen: Elements) -> Tensor:
    decoded = seen.decoded()
    return (decoded != decoded) | (seen.values != seen.values)


def _scales(seen: Elements) -> Tensor:
    return seen.scale.expand(seen.values.shape)


def _smallest(seen: Elements) -> Tensor:
    """Return minus each magnitude, or -inf for 0; the maximum is then minus the smallest magnitude above 0."""
    magnitude = seen.magnitude()
    return -torch.where(magnitude == 0, torch.inf, magnitude)


# codes of the exponent field 0 are the rest
EACH_EXPONENT = tuple(f"exponent_{field}" for field in range(1, EXPONENTS))
TOTALS: dict[str, Total] = {
    total.name: total
    for total in (
        Total("amax", lambda seen: seen.magnitude(), "max", is_magnitude=True),
        Total("underflow", lambda seen: (seen.decoded() == 0) & (seen.magnitude() > 0), "sum"),
        Total("saturation", _beyond, "sum"),
        Total("subnormal", _is_subnormal, "sum", of_codes=True),
        Total("nonfinite", lambda seen: ~(seen.magnitude() < torch.inf), "sum"),
        Total("nan", _is_nan, "sum", of_codes=True),
        Total("scale_min", lambda seen: -_scales(seen), "max", of_codes=True),
        Total("scale_max", _scales, "max", of_codes=True),
        Total("scale", lambda seen: _scales(seen).double(), "sum", of_codes=True),
        Total("scale_square", lambda seen: _scales(seen).double().square(), "sum", of_codes=True),
        Total("scaled", lambda seen: torch.ones_like(seen.values, dtype=torch.bool), "sum", of_codes=True),
        Total("square", lambda seen: seen.values * seen.values, "sum"),
        Total("square_error", lambda seen: (seen.values - seen.dequantized()).square(), "sum"),
        Total("smallest", _smallest, "max"),
        *(Total(name, _has_exponent(field), "sum", of_codes=True) for field, name in enumerate(EACH_EXPONENT, 1)),
    )
}


def _part_of_all(name: str) -> Statistic:
    return Statistic(name, (name,), lambda totals: totals[name] / totals[NUMEL] if totals[NUMEL] else math.nan)


def _as_it_is(name: str) -> Statistic:
    return Statistic(name, (name,), lambda totals: totals[name])


def _sqnr(totals: Mapping[str, float]) -> float:
    square, error = totals["square"], totals["square_error"]
    if error == 0:
        return math.inf if square else math.nan
    return 10 * math.log10(square / error) if square > 0 and math.isfinite(square / error) else math.nan


def _scale_std(totals: Mapping[str, float]) -> float:
    if not (count := totals["scaled"]):
        return math.nan
    variance = totals["scale_square"] / count - (totals["scale"] / count) ** 2
    return math.sqrt(max(variance, 0.0)) if math.isfinite(variance) else math.nan


def _exponents(totals: Mapping[str, float]) -> list[float]:
    others = [totals[name] for name in EACH_EXPONENT]
    return [totals[NUMEL] - totals["nan"] - sum(others), *others]


def _range(totals: Mapping[str, float]) -> float:
    amax, smallest = totals["amax"], -totals["smallest"]
    return math.log2(amax / smallest) if 0 < smallest < math.inf and amax < math.inf else math.nan


STATISTICS: dict[str, Statistic] = {
    each.name: each
    for each in (
        _as_it_is("amax"),
        _part_of_all("underflow"),
        _part_of_all("saturation"),
        _part_of_all("subnormal"),
        _as_it_is("nonfinite"),
        Statistic("scale_min", ("scale_min",), lambda totals: -totals["scale_min"]),
        _as_it_is("scale_max"),
        Statistic("scale_std", ("scale", "scale_square", "scaled"), _scale_std),
        _as_it_is("square_error"),
        Statistic("mse", ("square_error",), lambda t: t["square_error"] / t[NUMEL] if t[NUMEL] else math.nan),
        Statistic("sqnr", ("square", "square_error"), _sqnr),
        Statistic("range", ("amax", "smallest"), _range),
        Statistic("exponents", ("nan", *EACH_EXPONENT), _exponents),
    )
}


def register_statistic(
    name: str,
    compute: Callable[[Elements], Tensor],
    combine: str,
    finish: Callable[[Mapping[str, float]], float] | None = None,
) -> None:
    """Add a statistic that you can pass to `fp8compile.Monitor` by name.

    ``compute`` is traced into the compiled graph next to the cast, so it must be elementwise, plain PyTorch code that
    does not read values on the host. Its results are reduced by sum or maximum over ranks and micro-batches. To
    compute a mean, use a sum and divide it by ``totals["numel"]`` in ``finish``.
    ``fp8compile.testing.check_statistic`` checks these rules.

    Args:
        name: The name of the statistic, an identifier.
        compute: Takes the operand's elements: ``.values`` and ``.scale`` (float32), ``.codes`` (uint8, one a byte),
            ``.format``, ``.decoded()``, ``.dequantized()``. Returns a number for each element, in the shape of
            ``values``: bool or int32 to count, or float32.
        combine: ``"sum"`` or ``"max"``.
        finish: Computes the statistic from a dict with ``name`` and ``"numel"``; by default the total itself.

    Raises:
        ValueError: The name is taken or is not an identifier, or ``combine`` is neither of the two.
        TypeError: ``compute`` or ``finish`` is not a function.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"register_statistic: the name of a statistic must be an identifier, got {name!r}.")
    if name in TOTALS or name in STATISTICS or name in FIRST_SUMS:
        raise ValueError(f"register_statistic: {name} is already registered. Choose another name.")
    if combine not in ("sum", "max"):
        raise ValueError(f"register_statistic: {name}: `combine` is {combine!r}; it must be 'sum' or 'max'.")
    for what, given in (("compute", compute), ("finish", finish)):
        if not callable(given) and (what == "compute" or given is not None):
            raise TypeError(f"register_statistic: {name}: `{what}` is {given!r}; it must be a function.")
    TOTALS[name] = Total(name, compute, combine)
    STATISTICS[name] = _as_it_is(name) if finish is None else Statistic(name, (name,), finish)
    salt_with(compute.__module__, f"statistic {name}")  # a graph has only its name


def totals_of(statistics: Sequence[str], roles: Sequence[str] | None = None) -> str:
    """Return the names of the totals that these statistics need, as one string, which ops take as a constant.

    The string is ``"amax,underflow"``, or ``"amax,underflow@input,weight"`` if only these ``roles`` of a recipe count.
    """
    names = ",".join(dict.fromkeys(total for name in statistics for total in STATISTICS[name].totals))
    return names if roles is None else f"{names}@{','.join(roles)}"


def counts_role(totals: str, role: str) -> bool:
    """Whether ``totals``, such as ``"amax,underflow@input,weight"``, counts the recipe's field ``role``."""
    _, restricted, roles = totals.partition("@")
    return not restricted or role in roles.split(",")


@cache
def columns_of(totals: str) -> tuple[tuple[Total, ...], tuple[Total, ...]]:
    """Return the totals of a string such as ``"amax,underflow"``, in the order of columns: sums, then maxima."""
    found = [TOTALS[name] for name in totals.partition("@")[0].split(",") if name]
    return tuple(t for t in found if t.combine == "sum"), tuple(t for t in found if t.combine == "max")


def names_of_columns(totals: str) -> list[str]:
    """Return the column names of an `Observer`'s ``sums``, then ``maxima``, for ``totals`` like ``"amax,scale"``."""
    return [*FIRST_SUMS, *(total.name for each in columns_of(totals) for total in each)]


def is_sum(name: str) -> bool:
    """Whether the total with this name is a sum, and not a maximum."""
    return name in FIRST_SUMS or TOTALS[name].combine == "sum"
