"""check: reads an exported folder as a server would, and compares names and values."""

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
from fp8compile.export.scheme import Format, Scheme
from fp8compile.export.servers import SERVERS, fused_problems, missing_parameters
from fp8compile.export.stream import positions
from fp8compile.nn.weights.share_outer_scale import FUSED

__all__ = ["CheckReport", "check"]

# A reader may divide by a reciprocal, and may multiply two scales first: three roundings of float32 of 2**-24 each.
TOLERANCE = 2.0**-22
QUANTIZED = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "U8", "I8")  # names of dtypes in headers of safetensors files
OUTER = {"nvfp4": 2, "tensor": 1, "static_tensor": 1}  # index of the outer scale among a scheme's suffixes


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The result of `check` for a folder without problems.

    Attributes:
        folder: The folder.
        format: Name of the format.
        layers: Number of quantized layers that were compared.
        notes: Differences between what a server computes and what training computes, as text.
    """

    folder: Path
    format: str
    layers: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.folder}: {self.format}, {self.layers} layers; a server reads the same values"]
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
    return f"a server reads {values[index].item():.6g}, but the trained model has {wanted[index].item():.6g}"


def _stored(files: StoredFiles, name: str, scheme: Scheme) -> dict[str, Tensor] | str:
    found = {suffix: files.get(name + suffix) for suffix in scheme.names()}
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
        f"{len(differ)} groups of layers that vLLM and SGLang fuse into one GEMM have different global scales, by "
        f"up to a factor of {ratio:.4g} ({above}: {', '.join(own)}). These servers use the largest scale for all "
        "layers of a group: they requantize FP8 weights, and read FP4 weights with a different scale than in "
        "training. Train with convert(..., share_outer_scale=True), which uses one scale for each group."
    ]


def _declared(config: Mapping[str, Any], folder: Path, names: Mapping[str, Any]) -> list[str]:
    """List problems of config.json: no ``quantization_config``, or a layer of ``names`` listed as not quantized."""
    own = config.get("quantization_config")
    if not isinstance(own, dict) or "quant_method" not in own:
        return [f"{folder / 'config.json'} has no quantization_config with a quant_method"]
    ignored: Any = own.get("modules_to_not_convert", own.get("ignore")) or []
    if not isinstance(ignored, list) or not all(isinstance(each, str) for each in ignored):
        return [f"{folder / 'config.json'} lists {ignored!r} as not quantized; expected a list of names"]
    boundary = r"(?:(?<=\.)|(?=\.|$))"  # transformers, should_convert_module
    wrong = [
        (name, key)
        for key in ignored
        for name in names
        if name == key or re.match(rf"(?:{re.escape(key)}){boundary}", name)
    ]
    return [f"config.json lists {name} as not quantized ({key}), but its weight is quantized" for name, key in wrong]


def _unrecorded(files: StoredFiles, form: Format, kinds: Mapping[str, str]) -> list[str]:
    """List quantized tensors and scales of layers that ``kinds`` does not have: nothing says what they hold."""
    scales = {suffix for scheme in form.schemes for suffix in scheme.names()} - {".weight"}
    names = [name.rpartition(".") for name in sorted(files.names())]
    return [
        f"{layer}.{own} has dtype {files.dtype(f'{layer}.{own}')}, and {RECORD} lists {layer} in high precision"
        for layer, _, own in names
        if layer not in kinds and (f".{own}" in scales or files.dtype(f"{layer}.{own}") in QUANTIZED)
    ]


def _record(path: Path) -> tuple[Format, dict[str, str], dict[str, list[float]]]:
    """Return what `save_pretrained` recorded: the format, and each layer's kind and values."""
    found = read_json("check", path)
    try:
        form, values = FORMATS[found["format"]], found["values"]
        kinds = {name: kind for kind, names in found["kinds"].items() for name in names}
        if all(form.scheme(kind) and values[name] for name, kind in kinds.items()):
            return form, kinds, values
    except (AttributeError, KeyError, TypeError):
        pass
    raise ValueError(f"check: {path} differs from what save_pretrained wrote. Save or download the model again.")


def _missing(
    form: Format, kinds: Mapping[str, str], architectures: object, server: str | None
) -> tuple[list[str], list[str]]:
    """Return problems and notes on the parameters that servers do not have.

    ``architectures`` is the entry of config.json. A problem is one of ``server`` or, if it is None, one that neither
    vLLM nor SGLang loads the folder.
    """
    first = architectures[0] if isinstance(architectures, list) and architectures else ""
    asked = [server] if server is not None else ["vllm", "sglang"]
    found = [missing_parameters(each, form, kinds, str(first)) for each in asked]
    texts = [text for each in found for text in each]
    if not all(found):
        return [], texts
    if server is None and not missing_parameters("transformers", form, kinds, str(first)):
        texts[-1] += f". {SERVERS['transformers']} loads all parameters: check(folder, server='transformers')"
    return texts, []


def check(folder: str | os.PathLike[str], *, server: str | None = None) -> CheckReport:
    """Read a folder written by `save_pretrained` as a server would, and compare names and values.

    Parameter names are compared with those of the servers, in the versions listed in docs/serving.md.

    For each layer, some weights are dequantized from the file with the arithmetic of the servers, and compared with
    the dequantized weights of training. This code is independent of the code that writes files. It therefore detects
    inverted scales, transposed matrices, four-bit values in the wrong order, missing scales, truncated files and wrong
    configurations.

    Args:
        folder: Path of the folder.
        server: The server that must support all parameters: ``"vllm"``, ``"sglang"`` or ``"transformers"``. By
            default, vLLM or SGLang must support them.

    Returns:
        A report to print, with notes on what a server computes differently from training, and on parameters that one
        of the two servers does not support.

    Raises:
        ValueError: The folder has problems, which the message lists, or ``server`` is unknown.
        FileNotFoundError: The folder has no config.json, or no fp8compile_export.json from `save_pretrained`.
    """
    if server is not None and server not in SERVERS:
        raise ValueError(f"check: `server` is {server!r}; it must be one of {', '.join(map(repr, SERVERS))}.")
    path = Path(folder)
    config, (form, kinds, recorded) = read_json("check", path / "config.json"), _record(path / RECORD)
    files = StoredFiles("check", path)
    problems, outer = [*files.problems, *_declared(config, path, kinds), *_unrecorded(files, form, kinds)], {}
    missing, notes = _missing(form, kinds, config.get("architectures"), server)
    problems += [*missing, *fused_problems(kinds, files.layers(), FUSED)]
    for name, kind in kinds.items() if not files.problems else ():
        scheme = form.scheme(kind)
        assert scheme is not None
        if isinstance(stored := _stored(files, name, scheme), str):
            problems.append(stored)
            continue
        if kind in OUTER:
            outer[name] = float(stored[scheme.suffixes[OUTER[kind]]].max())
        if (reason := _problem(stored, scheme, recorded[name])) is not None:
            problems.append(f"{name}: {reason}")
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ValueError(f"check: {path} has {count}:{listed(problems)}")
    return CheckReport(folder=path, format=form.name, layers=len(kinds), notes=(*notes, *_fused_notes(outer)))
