"""Rows of metrics.jsonl: what each kind of them holds, and reading them from a file that may come from anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from types import NoneType

from fp8compile.cli.train.gemms import GemmCount

__all__ = ["Row", "rows_of"]

Row = dict[str, object]

GEMMS = {field.name: (int,) for field in fields(GemmCount)}
EVERY = {"kind": (str,), "arm": (str,), "step": (int,)}
# The types of each value, or what an object in its place holds.
KINDS: dict[str, Mapping[str, object]] = {
    "train": {**EVERY, "loss": (float,), "lr": (float,)},
    "eval": {**EVERY, "loss": (float,)},
    "done": {
        **EVERY,
        "tokens_per_second": (float, NoneType),
        "peak_memory_bytes": (int,),
        "peak_memory_since": (str,),
        "expected_gemms": GEMMS,
        "profiled_gemms": GEMMS,
        "graphs": (dict, NoneType),
        "graph_breaks": (int,),
        "recompiles": (int,),
        "tp": (int,),
        "sp": (bool,),
        "replicas": (int,),
        "shards": (int,),
        "quantized_parameters": (bool,),
        "weights_gathered_as": (str, NoneType),
    },
}


def _check(value: object, wanted: object, name: str) -> None:
    if isinstance(wanted, tuple):
        if type(value) not in wanted:
            names = " or ".join("null" if each is NoneType else each.__name__ for each in wanted)
            raise ValueError(f"{name} is a {type(value).__name__}; it is {names}")
        return
    missing = [key for key in wanted if not isinstance(value, dict) or key not in value]
    if missing:
        raise ValueError(f"{name} has no {', '.join(missing)}")
    for key, each in wanted.items():
        _check(value[key], each, f"{name}.{key}")


def _row(line: bytes) -> Row:
    row = json.loads(line)
    kind = row.get("kind") if isinstance(row, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"it is no object with a kind of {', '.join(KINDS)}")
    _check(row, KINDS[kind], kind)
    if row["step"] < 0:
        raise ValueError(f"step is {row['step']}")
    return row


def rows_of(content: bytes) -> list[Row]:
    """Read the rows.

    Args:
        content: Of metrics.jsonl.

    Returns:
        All rows, without a last line that a kill cut short.

    Raises:
        ValueError: A line is no row; the message has its number.
    """
    rows = []
    *whole, last = content.split(b"\n")
    for number, line in enumerate(whole, start=1):
        try:
            rows.append(_row(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number}: {error}") from error
    with suppress(ValueError):  # each line is written with its end, so this one was cut short, or there is none
        rows.append(_row(last))
    return rows
