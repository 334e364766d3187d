"""The folder of a run, and writing to it so that a kill or a full disk tears nothing.

    RUN/config.json             what was asked for, and what it ran on
    RUN/metrics.jsonl           one row a line: kind "train", "eval" or "done", arm, step, numbers
    RUN/checkpoint-<arm>.pt     the newest state of a training, see checkpoint.py
    RUN/loss.png                the curves

Rows are appended as they come; every other file is replaced as a whole. Of several ranks the first one reads and
writes; the others know what it read.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fp8compile.cli.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fp8compile.cli.ranks import Ranks

__all__ = ["RunFolder", "existing_run_folder", "new_run_folder", "write_atomically"]

Row = dict[str, object]


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _sync_folder(folder: Path) -> None:
    # Without it a power cut may forget the new name of a file whose bytes are safe.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Replace a file by new content, or leave it as it is.

    Args:
        path: The file; need not exist.
        content: All of it.

    Raises:
        UserError: The file system refused; the old file is intact and nothing is left beside it.
    """
    temporary = path.with_name(path.name + ".tmp")
    with _writing(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


class RunFolder:
    """Files of one run.

    Attributes:
        path: The folder.
        is_fresh: Whether this process made the run, and no step of it is done yet.
    """

    def __init__(self, path: Path, ranks: Ranks, *, is_fresh: bool, had_folder: bool = True) -> None:
        """Take over a folder; see :func:`new_run_folder` and :func:`existing_run_folder`."""
        self.path = path
        self._ranks = ranks
        self.is_fresh = is_fresh
        self._had_folder = had_folder

    @property
    def resume_command(self) -> str:
        """What a user types to go on."""
        command = f"fp8compile train --resume {self.path}"
        size = self._ranks.size
        return command if size == 1 else f"torchrun --nproc-per-node {size} -m {command}"

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def checkpoint(self, arm: str) -> Path:
        """Return the path of an arm's checkpoint."""
        return self.path / f"checkpoint-{arm}.pt"

    def write_config(self, config: Row) -> None:
        """Write config.json."""
        if self._ranks.is_first:
            text = json.dumps(config, indent=2) + "\n"
            write_atomically(self.path / "config.json", text.encode())

    def read_config(self) -> Row:
        """Read config.json.

        Returns:
            The parsed object.

        Raises:
            UserError: It is missing or no JSON object.
        """
        return self._ranks.same(self._read_config)

    def _read_config(self) -> Row:
        path = self.path / "config.json"
        try:
            config = json.loads(path.read_bytes())
        except OSError as error:
            raise UserError(f"no run in {self.path}: cannot read config.json: {error.strerror}") from error
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}; start a new run") from error
        if not isinstance(config, dict):
            raise UserError(f"{path} is damaged: not an object; start a new run")
        return config

    def append(self, row: Row) -> None:
        """Add a row to metrics.jsonl; it outlives a kill of the process from here on."""
        if not self._ranks.is_first:
            return
        line = json.dumps(row) + "\n"
        with _writing(self._metrics), self._metrics.open("a") as file:
            file.write(line)

    def rows(self) -> list[Row]:
        """Return the rows of metrics.jsonl, without a last line that a kill cut short."""
        return self._ranks.same(self._read_rows)

    def _read_rows(self) -> list[Row]:
        if not self._metrics.exists():
            return []
        rows = []
        for line in self._metrics.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        return rows

    def replace_rows(self, rows: Iterable[Row]) -> None:
        """Rewrite metrics.jsonl."""
        if self._ranks.is_first:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            write_atomically(self._metrics, text.encode())

    def discard(self) -> None:
        """Remove what a failed start made, down to the folder itself if that was new."""
        if not self._ranks.is_first:
            return
        if self._had_folder:
            for path in self.path.iterdir():
                path.unlink()
        else:
            shutil.rmtree(self.path, ignore_errors=True)


def _make_folder(path: Path) -> bool:
    """Make a folder for a run; return whether it was there, empty."""
    if (path / "config.json").exists():
        raise UserError(f"{path} already has a run; go on with it by --resume {path}, or give another --out")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is no empty folder; give another --out")
    had_folder = path.exists()
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return had_folder


def new_run_folder(path: Path, ranks: Ranks) -> RunFolder:
    """Make the folder of a new run.

    Args:
        path: Where; may exist if it is an empty folder.
        ranks: The processes of the run.

    Returns:
        The folder, with nothing in it.

    Raises:
        UserError: There is a run or anything else, or the folder cannot be made.
    """
    had_folder = ranks.same(lambda: _make_folder(path))
    return RunFolder(path, ranks, is_fresh=True, had_folder=had_folder)


def existing_run_folder(path: Path, ranks: Ranks) -> RunFolder:
    """Open the folder of a run to resume.

    Args:
        path: Where.
        ranks: The processes of the run.

    Returns:
        The folder.

    Raises:
        UserError: It is no folder.
    """
    if not path.is_dir():
        raise UserError(f"no run in {path}: there is no such folder; check --resume")
    return RunFolder(path, ranks, is_fresh=False)
