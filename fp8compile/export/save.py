"""save_pretrained: writes a folder that a server loads, from a stream of tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8compile._compat import is_dtensor
from fp8compile.export.checkpoint_names import is_of_transformers
from fp8compile.export.format_table import format_named
from fp8compile.export.plan import Plan, plan_of
from fp8compile.export.servers import missing_parameters
from fp8compile.export.stream import Piece, pieces
from fp8compile.export.write_folder import Shards, bytes_of, check_target, new_folder, write_json

__all__ = ["RECORD", "ExportReport", "save_pretrained"]

RECORD = "fp8compile_export.json"  # what `check` compares a folder with


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """The result of `save_pretrained`.

    Attributes:
        folder: The folder.
        format: Name of the format.
        quantized: Names of the checkpoint's quantized layers, keyed by the format's name for their quantization.
        ignored: Names of the layers that a server computes in high precision.
        notes: Differences between serving and training, with reasons.
        bytes: Total bytes of all tensors.
    """

    folder: Path
    format: str
    quantized: dict[str, tuple[str, ...]]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]
    bytes: int

    def __str__(self) -> str:
        kinds = ", ".join(f"{len(names)} as {kind}" for kind, names in self.quantized.items())
        lines = [f"{self.folder}: {self.format}, {kinds}; {len(self.ignored)} in high precision; {self.bytes} bytes"]
        return "\n".join([*lines, *(f"    {note}" for note in self.notes)])


def _architectures(model: nn.Module) -> list[str]:
    """Return the entry of config.json: the name of the model's class in transformers."""
    # graph_fsdp makes a class of its own, which pretends to lie where the model's class lies
    own_classes = (each for each in type(model).__mro__ if each.__module__.startswith("transformers."))
    return [each.__name__ for each in own_classes if not each.__name__.startswith("GraphFSDP")][:1]


def _config(plan: Plan) -> dict[str, Any]:
    quantization = plan.format.config(plan.groups, plan.ignored)
    if not is_of_transformers(plan.model):
        return {"quantization_config": quantization}
    config: Any = plan.model.config
    own = json.loads(config.to_json_string())
    first = next(each for each in plan.weights if each.scheme is not None)  # what the forward multiplies
    dtype = str(first.dtype or first.tensor.dtype).removeprefix("torch.")
    return {**own, "architectures": _architectures(plan.model), "dtype": dtype, "quantization_config": quantization}


def _server_notes(plan: Plan) -> list[str]:
    """Return notes on the parameters that vLLM and SGLang do not have."""
    kinds = {name: scheme.kind for scheme, names in plan.groups.items() for name in names}
    architecture = next(iter(_architectures(plan.model)), "")
    return [text for each in ("vllm", "sglang") for text in missing_parameters(each, plan.format, kinds, architecture)]


def _write(folder: Path, plan: Plan, stream: Iterator[Piece], limit: int) -> int:
    probes: dict[str, list[float]] = {}
    with new_folder(folder) as target:
        shards = Shards(target, limit)
        for piece in stream:
            shards.add(piece.tensors)
            probes.update(piece.probes)
        shards.finish()
        write_json(target / "config.json", _config(plan))
        for name, content in plan.format.files(plan.groups, plan.ignored).items():
            write_json(target / name, content)
        schemes = {scheme.kind: list(names) for scheme, names in plan.groups.items()}
        write_json(target / RECORD, {"format": plan.format.name, "kinds": schemes, "values": probes})
        if (generation := getattr(plan.model, "generation_config", None)) is not None:
            generation.save_pretrained(target)
    return shards.total


def _groups(plan: Plan) -> dict[str, Any]:
    """Return the process groups over which the model is sharded, by name; groups of a mesh's last dim come first."""
    meshes = [(each.tensor.device_mesh, each.tensor) for each in plan.weights if is_dtensor(each.tensor)]
    found = [mesh.get_group(index) for mesh, _ in meshes for index in reversed(range(mesh.ndim))]
    return {group.group_name: group for group in found}


def _on_first_rank(folder: Path, plan: Plan, limit: int, groups: Sequence[Any], *, overwrite: bool) -> int:
    """Write the folder on the first rank, while all ranks gather tensors; each rank returns the bytes of all tensors.

    ``limit`` is a file's maximum size in bytes. If writing fails, all ranks raise.
    """
    stream = pieces(plan)
    answer: int | str | None = None
    failed: Exception | None = None
    if all(group.rank() == 0 for group in groups):
        try:
            check_target(folder, overwrite=overwrite)
            answer = _write(folder, plan, stream, limit)
        except Exception as error:
            answer, failed = repr(error), error
    for _ in stream:  # on the first rank what is left after an error, because the others wait in gathers
        pass
    for group in groups:
        told = [answer]
        torch.distributed.broadcast_object_list(told, group=group, group_src=0)
        answer = answer if told[0] is None else told[0]
    if failed is not None:
        raise failed
    if not isinstance(answer, int):
        raise RuntimeError(f"save_pretrained: rank 0 could not write {folder}: {answer}")
    return answer


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    format: str,
    *,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    unfit: str = "raise",
    forward_dtype: torch.dtype | None = None,
) -> ExportReport:
    """Save a model in a checkpoint format for inference servers, with the quantized weights of training.

    The folder contains safetensors files, their index and config.json. The tokenizer is not saved. The folder is
    written under a temporary name and then renamed, so that it is never incomplete. An additional file records values
    that `check` compares.

    If the model is distributed, all ranks must call this function. Rank 0 writes the folder to its disk.

    Args:
        model: A model converted by `fp8compile.convert`, with or without FP8 parameters.
        folder: Path of the folder, or of a symbolic link to it.
        format: ``"fine_grained_fp8"``, ``"compressed-tensors"`` or ``"modelopt"``.
        max_shard_size: Maximum size of a file, in bytes or as a string such as ``"5GB"``.
        overwrite: Whether to replace a checkpoint in a folder that is not empty. Other files and symbolic links in it
            are kept.
        unfit: What to do if the format can't hold the weight of a converted layer: ``"raise"``, or ``"values"`` to
            write the weight in high precision.
        forward_dtype: Dtype to which the forward casts parameters before it quantizes them, such as the dtype of
            ``torch.autocast``. By default, each layer uses the dtype of its forward passes with gradients in this
            process, or else the dtype of FSDP2's ``MixedPrecisionPolicy`` or of its parameters.

    Returns:
        A report to print.

    Raises:
        ValueError: An argument has an unknown value, the model has no FP8 layer, the format does not support its
            weights, or the forward passes of a layer used several dtypes or a dtype other than ``forward_dtype``.
            Nothing is written.
        FileExistsError: The folder is not empty, and ``overwrite`` is False.
        OSError: The disk is full or read-only, or the folder is the root of a mounted file system. An earlier
            checkpoint in the folder is unchanged.
        RuntimeError: Rank 0 failed to write; raised on the other ranks.
    """
    path, limit = Path(folder), bytes_of(max_shard_size)
    target = path.resolve()  # what a link names is replaced, not the link
    plan = plan_of(model, format_named("save_pretrained", format), unfit=unfit, forward_dtype=forward_dtype)
    if groups := list(_groups(plan).values()):
        size = _on_first_rank(target, plan, limit, groups, overwrite=overwrite)
    else:
        check_target(target, overwrite=overwrite)
        size = _write(target, plan, pieces(plan), limit)
    return ExportReport(
        folder=path,
        format=plan.format.name,
        quantized={scheme.name: tuple(names) for scheme, names in plan.groups.items()},
        ignored=tuple(plan.ignored),
        notes=(*plan.notes, *_server_notes(plan)),
        bytes=size,
    )
