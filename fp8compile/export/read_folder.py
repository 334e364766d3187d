"""Access to the tensors of a checkpoint's folder, one at a time."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8compile.export.write_folder import INDEX

__all__ = ["StoredFiles", "grouped", "listed", "read_json"]

PROBLEMS = 8  # the most reasons in an error
NAMES = 3  # the most further names with the same reason


def grouped(problems: Iterable[str]) -> list[str]:
    """Return one text per reason. A problem is a name, a space and the reason."""
    found: dict[str, list[str]] = {}
    for name, _, reason in (each.partition(" ") for each in problems):
        found.setdefault(reason, []).append(name)
    texts = []
    for reason, (first, *others) in found.items():
        names = ", ".join(others[:NAMES]) + (", ..." if len(others) > NAMES else "")
        texts.append(f"{first} {reason}" + (f" (and {len(others)} more: {names})" if others else ""))
    return texts


def listed(problems: Sequence[str]) -> str:
    """Return a text for an error: the first of ``problems`` by reason, one per line, and how many are left out."""
    texts = grouped(problems)
    shown = "".join(f"\n    {each}" for each in texts[:PROBLEMS])
    return shown + (f"\n    and {len(texts) - PROBLEMS} more" if len(texts) > PROBLEMS else "")


def read_json(function: str, path: Path) -> dict[str, Any]:
    """Read a JSON file of a checkpoint, which holds an object.

    Error texts begin with ``function``, the caller's name.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no JSON, or holds something else than an object.
    """
    if not path.exists():
        raise FileNotFoundError(f"{function}: {path} does not exist. Pass a folder written by save_pretrained.")
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{function}: {path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{function}: {path} must be a JSON object, got {reprlib.repr(found)}.")
    return found


def _weight_map(function: str, path: Path) -> dict[str, str] | None:
    """Return the file of each tensor, from an index; None if there is no index."""
    if not path.exists():
        return None
    found = read_json(function, path).get("weight_map")
    files = found.values() if isinstance(found, dict) else [None]
    if not all(isinstance(each, str) and Path(each).name == each for each in files):
        raise ValueError(
            f"{function}: weight_map of {path} must be an object that maps each tensor to the name of a file in the "
            f"same folder, got {reprlib.repr(found)}."
        )
    return found


class StoredFiles:
    """The tensors of a folder's safetensors files by name; opened files stay open.

    ``function``, the caller's name, is for error texts.
    """

    def __init__(self, function: str, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._files: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        self.problems: list[str] = []
        mapped = _weight_map(function, folder / INDEX)
        names = sorted(set(mapped.values())) if mapped else ["model.safetensors"]
        for name in names:
            try:
                self._files[name] = safe_open(folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                self.problems.append(f"{name} can't be read: {error}")
                continue
            self._places.update(dict.fromkeys(self._files[name].keys(), name))
        if mapped is not None and not self.problems:
            wrong = sorted(key for key in {*mapped, *self._places} if mapped.get(key) != self._places.get(key))
            self.problems += [
                f"{INDEX} lists {key} in {mapped.get(key)}, but it is in {self._places.get(key)}" for key in wrong
            ]

    def names(self) -> set[str]:
        """Return the names of all tensors in the folder."""
        return set(self._places)

    def layers(self) -> list[str]:
        """Return the names of all layers with a weight, in high precision or quantized."""
        found = (name.rpartition(".") for name in self._places)
        return sorted(layer for layer, _, own in found if own in ("weight", "weight_packed", "_weight_qdata"))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from the header of its file."""
        return tuple(self._files[self._places[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return a tensor's dtype, from the header of its file and by its name there, such as ``"F8_E4M3"``."""
        found: str = self._files[self._places[name]].get_slice(name).get_dtype()
        return found

    def get(self, name: str) -> Tensor | None:
        """Return a tensor by its name; None if the folder does not have it."""
        if (file := self._places.get(name)) is None:
            return None
        found: Tensor = self._files[file].get_tensor(name)
        return found
