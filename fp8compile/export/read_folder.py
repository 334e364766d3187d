"""Access to the tensors of a checkpoint's folder, one at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8compile.export.write_folder import INDEX

__all__ = ["StoredFiles", "listed", "read_json"]

PROBLEMS = 8  # the most problems in an error


def listed(problems: Sequence[str]) -> str:
    """Return a text for an error: the first of ``problems``, one per line, and the number of those left out."""
    shown = "".join(f"\n    {each}" for each in problems[:PROBLEMS])
    return shown + (f"\n    and {len(problems) - PROBLEMS} more" if len(problems) > PROBLEMS else "")


def read_json(function: str, path: Path) -> dict[str, Any]:
    """Read a JSON file of a checkpoint; raise a FileNotFoundError, or a ValueError if the file is no JSON.

    Error texts begin with ``function``, the caller's name.
    """
    if not path.exists():
        raise FileNotFoundError(f"{function}: {path} is not there; it takes a folder such as save_pretrained writes.")
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{function}: {path} is no JSON: {error}") from None
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
        index = folder / INDEX
        mapped = read_json(function, index)["weight_map"] if index.exists() else None
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
                f"{INDEX} places {key} in {mapped.get(key)}; it is in {self._places.get(key)}" for key in wrong
            ]

    def names(self) -> set[str]:
        """Return the names of all tensors in the folder."""
        return set(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from the header of its file."""
        return tuple(self._files[self._places[name]].get_slice(name).get_shape())

    def get(self, name: str) -> Tensor | None:
        """Return a tensor by its name; None if the folder does not have it."""
        if (file := self._places.get(name)) is None:
            return None
        found: Tensor = self._files[file].get_tensor(name)
        return found
