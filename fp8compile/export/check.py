"""check: reads an exported folder as a server would, and compares the values with those of training."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8compile.export.format_table import FORMATS
from fp8compile.export.read_folder import StoredFiles, listed, read_json
from fp8compile.export.save import RECORD
from fp8compile.export.scheme import Scheme
from fp8compile.export.stream import positions
from fp8compile.nn.share_outer_scale import FUSED

__all__ = ["CheckReport", "check"]

# A reader may divide by a reciprocal, and may multiply two scales first: three roundings of float32 of 2**-24 each.
TOLERANCE = 2.0**-22
OUTER = {"nvfp4": 2, "tensor": 1, "static_tensor": 1}  # index of the outer scale among a scheme's suffixes


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Result of `check` for a folder without problems.

    Attributes:
        folder: The folder.
        format: Name of the format.
        layers: Number of quantized layers that were compared.
        notes: Differences between what a server computes and what training computes, in words.
    """

    folder: Path
    format: str
    layers: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.folder}: {self.format}, {self.layers} layers read as a server reads them: equal"]
        return "\n".join([*lines, *(f"    {note}" for note in self.notes)])


def _difference(values: Tensor, wanted: Tensor) -> str | None:
    """Describe the first of ``values`` that differs from ``wanted``; None if all are equal.

    Relative differences up to 2**-22 count as equal, because readers may round three times in float32.
    """
    equal = (values == wanted) | (values.isnan() & wanted.isnan())
    equal |= (values - wanted).abs() <= TOLERANCE * wanted.abs()
    if bool(equal.all()):
        return None
    index = int((~equal).nonzero()[0])
    return f"a server reads {values[index].item():.6g} where training has {wanted[index].item():.6g}"


def _stored(files: StoredFiles, name: str, scheme: Scheme) -> dict[str, Tensor] | str:
    wanted = [*scheme.suffixes, *([scheme.input_scale] if scheme.input_scale else [])]
    found = {suffix: files.get(name + suffix) for suffix in wanted}
    missing = [name + suffix for suffix, tensor in found.items() if tensor is None]
    if missing:
        return f"{', '.join(missing)} is missing"
    return {suffix: tensor for suffix, tensor in found.items() if tensor is not None}


def _problem(stored: Mapping[str, Tensor], scheme: Scheme, wanted: list[float]) -> str | None:
    """Describe what is wrong with a layer's tensors; None if nothing.

    ``stored`` has the tensors by suffix of their names, ``wanted`` the values of training at `positions`.
    """
    scales = [each.float() for suffix, each in stored.items() if suffix != scheme.suffixes[0]]
    if not all(bool((each >= 0).all()) for each in scales):
        return "has a scale that is negative or NaN"
    try:
        values = scheme.read(stored)
    except (ValueError, RuntimeError) as error:
        return str(error).splitlines()[0]
    rows, columns = positions(values.shape)
    return _difference(values[rows, columns], torch.tensor(wanted, dtype=torch.float32))


def _fused_notes(outer: Mapping[str, float]) -> list[str]:
    """Return notes on layers that a server multiplies as one GEMM although their outer scales differ."""
    found: dict[tuple[str, tuple[str, ...]], dict[str, float]] = {}
    for name, scale in outer.items():
        above, _, last = name.rpartition(".")
        for group in FUSED:
            if last in group:
                found.setdefault((above, group), {})[last] = scale
    differ = [(above, own) for (above, _), own in found.items() if len(set(own.values())) > 1]
    if not differ:
        return []
    above, own = max(differ, key=lambda each: max(each[1].values()) / max(min(each[1].values()), math.ulp(0.0)))
    ratio = max(own.values()) / min(own.values())
    return [
        f"{len(differ)} groups of layers that vLLM and SGLang multiply as one have different outer scales, by up to "
        f"{ratio:.4g} ({above}: {', '.join(own)}). They take the largest number for all: they quantize e4m3 weights "
        "anew, and read four-bit codes with another scale than training has. convert(..., share_outer_scale=True) "
        "trains with one scale for them."
    ]


def _declared(config: Mapping[str, Any], folder: Path, names: Mapping[str, Any]) -> list[str]:
    """List problems of config.json: no ``quantization_config``, or a layer of ``names`` listed as not quantized."""
    own = config.get("quantization_config")
    if not isinstance(own, dict) or "quant_method" not in own:
        return [f"{folder / 'config.json'} has no quantization_config with a quant_method"]
    ignored: list[str] = own.get("modules_to_not_convert", own.get("ignore")) or []
    boundary = r"(?:(?<=\.)|(?=\.|$))"  # transformers, should_convert_module
    wrong = [
        (name, key)
        for key in ignored
        for name in names
        if name == key or re.match(rf"(?:{re.escape(key)}){boundary}", name)
    ]
    return [f"config.json says that {name} is not quantized ({key}), and it has codes" for name, key in wrong]


def check(folder: str | os.PathLike[str]) -> CheckReport:
    """Read a folder written by `save_pretrained` as a server would, and compare values with training.

    For each layer, some values are computed from the file by the arithmetic of the format's readers, and compared with
    the values that the codes had in training. This arithmetic shares no code with the functions that write files. It
    therefore detects an inverted scale, a transposed matrix, four-bit codes in the wrong order, missing scales, a
    truncated file and a wrong configuration.

    Args:
        folder: Path of the folder.

    Returns:
        A report, with notes on what a server computes differently from training; print it.

    Raises:
        ValueError: Something is wrong; the text lists it.
        FileNotFoundError: The folder has no config.json, or no fp8compile_export.json of `save_pretrained`.
    """
    path = Path(folder)
    config, record = read_json("check", path / "config.json"), read_json("check", path / RECORD)
    kinds = {name: kind for kind, names in record["kinds"].items() for name in names}
    files, form = StoredFiles("check", path), FORMATS[record["format"]]
    problems, outer = [*files.problems, *_declared(config, path, kinds)], {}
    for name, kind in kinds.items() if not files.problems else ():
        scheme = form.scheme(kind)
        assert scheme is not None
        if isinstance(stored := _stored(files, name, scheme), str):
            problems.append(stored)
            continue
        if kind in OUTER:
            outer[name] = float(stored[scheme.suffixes[OUTER[kind]]].max())
        if (reason := _problem(stored, scheme, record["values"][name])) is not None:
            problems.append(f"{name}: {reason}")
    if problems:
        raise ValueError(f"check: {path} has {len(problems)} problems:{listed(problems)}")
    return CheckReport(folder=path, format=form.name, layers=len(kinds), notes=tuple(_fused_notes(outer)))
