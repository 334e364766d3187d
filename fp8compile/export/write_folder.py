"""Write a checkpoint's files into a temporary folder, which then replaces the target by a rename.

    folder.writing-ID/    model-00001.safetensors, ...    until all is written
    folder/               model-00001-of-00003.safetensors, ..., model.safetensors.index.json, config.json

If writing fails at any point, the target is as it was before, and the unfinished folder is removed. A save that is
killed leaves the unfinished folder. ID is random, because a process in a container may have the PID of the killed one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["INDEX", "Shards", "bytes_of", "check_target", "new_folder", "write_json"]

INDEX = "model.safetensors.index.json"
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
# files of an earlier checkpoint that a new one replaces, whatever their number
OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|hf_quant_config\.json")


def bytes_of(size: int | str) -> int:
    """Convert a size in bytes, an int or a text such as ``"5GB"`` or ``"500MiB"``, to an int.

    Raises:
        ValueError: ``size`` is neither a positive int nor a text of this form.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    text = size if isinstance(size, str) else ""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B|)\s*", text, re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise ValueError(
            f"save_pretrained: `max_shard_size` is {size!r}; it must be a positive int, the number of bytes, or a "
            "string such as '5GB'."
        )
    return max(1, int(float(found[1]) * UNITS[found[2].upper()]))


def check_target(folder: Path, *, overwrite: bool) -> None:
    """Raise unless ``folder`` can be written.

    Raises:
        FileExistsError: The folder is not empty, and ``overwrite`` is False; or the path is not a folder.
        OSError: The folder is the root of a mounted file system, which can't be replaced.
        PermissionError: The folder or its parent can't be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"save_pretrained: {folder} is a file. Pass a folder.")
    if folder.exists() and any(folder.iterdir()) and not overwrite:
        raise FileExistsError(
            f"save_pretrained: {folder} is not empty. Pass overwrite=True to replace a checkpoint in it after the "
            "new one is written; other files, such as a tokenizer's, are kept."
        )
    if os.path.ismount(folder):
        raise OSError(
            f"save_pretrained: {folder} is the root of a file system, which can't be renamed. Pass a folder in it."
        )
    above = next(each for each in folder.absolute().parents if each.exists())
    for place in (above, folder) if folder.exists() else (above,):
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(
                f"save_pretrained: {place} is not writable, but the checkpoint is first written to a temporary folder "
                "in it. Pass a folder in a writable directory."
            )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n")


class Shards:
    """Collects tensors, and writes a safetensors file before the next tensor would exceed the limit.

    ``limit`` is the maximum size of a file in bytes; a larger tensor gets a file for itself.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder: Path = folder
        self.limit: int = limit
        self._held: dict[str, Tensor] = {}
        self._size = 0
        self._names: list[list[str]] = []  # of each file
        self.total: int = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors, by name, that have to be in the same file."""
        size = sum(each.numel() * each.element_size() for each in tensors.values())
        if self._held and self._size + size > self.limit:
            self._write()
        # a copy, because what comes from a model in high precision may be a view of its parameters
        for name, each in tensors.items():
            self._held[name] = each.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._size += size
        self.total += size

    def _path(self, index: int, count: int | None = None) -> Path:
        number = f"{index + 1:05d}"
        if count == 1:
            return self.folder / "model.safetensors"
        return self.folder / f"model-{number}{'' if count is None else f'-of-{count:05d}'}.safetensors"

    def _write(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = self._path(len(self._names))
        try:
            save_file(self._held, path, metadata={"format": "pt"})
        except SafetensorError as error:  # such as that of a full disk, which is no OSError there
            raise OSError(f"save_pretrained: {path} can't be written, the previous files are kept: {error}") from None
        self._names.append(list(self._held))
        self._held, self._size = {}, 0

    def finish(self) -> None:
        """Write the remaining tensors, and rename the files; also write the index, unless there is only one file."""
        if self._held or not self._names:
            self._write()
        count, places = len(self._names), {}
        for index, names in enumerate(self._names):
            path = self._path(index).rename(self._path(index, count))
            places.update(dict.fromkeys(names, path.name))
        if count > 1:
            write_json(self.folder / INDEX, {"metadata": {"total_size": self.total}, "weight_map": places})


def _keep_others(old: Path, new: Path) -> None:
    """Copy files of folder ``old`` that are no part of a checkpoint, such as a tokenizer's, to ``new``."""
    for path in old.iterdir():
        if OURS.fullmatch(path.name) or (new / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True)
        else:
            shutil.copy2(path, new / path.name, follow_symlinks=False)


def _replace(folder: Path, new: Path, before: Path) -> None:
    """Rename the folder ``new`` to ``folder``; an older ``folder`` is ``before`` meanwhile, and then removed."""
    if not folder.exists():
        new.rename(folder)
        return
    _keep_others(folder, new)
    folder.rename(before)
    try:
        new.rename(folder)
    except BaseException:
        before.rename(folder)
        raise
    shutil.rmtree(before, ignore_errors=True)
    if before.exists():
        warnings.warn(
            f"save_pretrained: {folder} was written, but {before}, which holds the previous files, can't be removed.",
            stacklevel=2,
        )


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Context that yields a new folder, which replaces ``folder`` if the block ends without an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    own = uuid.uuid4().hex[:12]
    beside, before = (folder.with_name(f"{folder.name}.{what}-{own}") for what in ("writing", "before"))
    beside.mkdir()
    try:
        yield beside
        _replace(folder, beside, before)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
