"""Filters: which linears and experts `convert` converts.

A filter is a function ``(module, fqn) -> bool``, or name patterns of fnmatch (``*`` matches dots too). A pattern that
begins with ``!`` leaves out layers. If all patterns begin with ``!``, all other layers are converted.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from torch import nn

from fp8compile.nn.convertible.convertible_layers import device_of, matrices
from fp8compile.target import target_of

__all__ = [
    "Filter",
    "LEAST_GAINING",
    "SMALLEST_DIM",
    "check_pattern_matches",
    "default_filter_reason",
    "resolve_filter",
    "size_of_gain",
]

WILD = re.compile(r"[*?\[]")

Filter = Callable[[nn.Module, str], bool] | str | Iterable[str]
Reason = Callable[[nn.Module, str], str | None]

# A GEMM takes codes in rows of 16 bytes: below that, FP8 multiplies more padding than values.
SMALLEST_DIM = 16

# The least K N / (K + N) at which a layer of K inputs and N outputs is faster in FP8, by compute capability or AMD's
# name. A layer with less loses more by its casts than its GEMMs gain, even if the casts are fused into the kernels
# that produce the tensors. A capability has the least value of its GPUs. Source: published peaks, `python -m
# benchmarks.roofline`. This was not measured on the GPUs themselves, and it leaves out the cost of kernel launches.
LEAST_GAINING: dict[tuple[int, int] | str, int] = {
    (8, 9): 109, (9, 0): 137, (10, 0): 187, (10, 3): 187, (12, 0): 77, (12, 1): 305,
    "gfx942": 162, "gfx950": 208, "gfx1201": 203,
}  # fmt: skip


def size_of_gain(in_features: int, out_features: int) -> int:
    """Return K N / (K + N), for K in_features and N out_features, as a measure of how much time FP8 saves.

    The value is proportional to the time that FP8 GEMMs save, divided by the time of the casts.
    """
    return in_features * out_features // (in_features + out_features)


def default_filter_reason(module: nn.Module, fqn: str) -> str | None:
    """Return why FP8 can't speed up a layer on the device of its weights; None if it can. Ignores ``fqn``."""
    sizes = matrices(module)
    smallest = min(min(size) for size in sizes)
    if smallest < SMALLEST_DIM:
        return f"tiny: a dim of {smallest} is less than {SMALLEST_DIM}"
    kind = target_of(device_of(module)).architecture
    least, gain = LEAST_GAINING.get(kind, 0), min(size_of_gain(*size) for size in sizes)
    if gain < least:
        gpu = kind if isinstance(kind, str) else f"compute capability {'.'.join(map(str, kind))}"
        return f"small: K N / (K + N) is {gain}; on a GPU of {gpu}, FP8 is faster from {least} on"
    return None


def _pattern_reason(patterns: tuple[str, ...]) -> Reason:
    refused = [p.removeprefix("!") for p in patterns if p.startswith("!")]
    wanted = [p for p in patterns if not p.startswith("!")] or ["*"]

    def reason(module: nn.Module, fqn: str) -> str | None:
        is_wanted = any(fnmatchcase(fqn, p) for p in wanted) and not any(fnmatchcase(fqn, p) for p in refused)
        return None if is_wanted else f"excluded by the filter {', '.join(patterns)}"

    return reason


def _did_you_mean(pattern: str, fqns: list[str]) -> str:
    known = sorted({part for fqn in fqns for part in fqn.split(".")})
    parts = pattern.split(".")
    mended = [
        part if part in known or WILD.search(part) else next(iter(difflib.get_close_matches(part, known, n=1)), part)
        for part in parts
    ]
    close = [".".join(mended), *difflib.get_close_matches(pattern, fqns, n=1)]
    found = next((each for each in close if any(fnmatchcase(fqn, each) for fqn in fqns)), None)
    return f" Did you mean {found!r}?" if found else ""


def check_pattern_matches(pattern: str, fqns: list[str], *, given: str) -> None:
    """Raise a ValueError if a pattern matches none of ``fqns``, the names of the model's layers.

    ``given`` is the pattern as the caller wrote it, for the error's text.
    """
    if not any(fnmatchcase(fqn, pattern) for fqn in fqns):
        shown = ", ".join(fqns[:5]) + (", ..." if len(fqns) > 5 else "")
        raise ValueError(
            f"convert: the pattern {given!r} matches no linear layer: {shown}.{_did_you_mean(pattern, fqns)}"
        )


def resolve_filter(filter: Filter | None, fqns: list[str]) -> Reason:
    """Return a function (module, fqn) -> reason why the filter leaves the layer out; None if it is converted.

    Without a filter, layers that FP8 can't speed up are left out. ``fqns`` are the names of the model's layers; each
    pattern must match at least one of them.
    """
    if filter is None:
        return default_filter_reason
    if callable(filter) and not isinstance(filter, type):  # filter=nn.Linear would be called to make a layer
        return lambda module, fqn: None if filter(module, fqn) else "excluded by the filter"
    patterns = (filter,) if isinstance(filter, str) else tuple(filter) if isinstance(filter, Iterable) else None
    if not patterns or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            f"convert: `filter` is {filter!r}; it must be a function (module, fqn) -> bool, a name pattern such as "
            "'layers.*' or '!lm_head', or a list of patterns."
        )
    for pattern in patterns:
        check_pattern_matches(pattern.removeprefix("!"), fqns, given=pattern)
    return _pattern_reason(patterns)
