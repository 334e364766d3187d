"""The folder of a run, and writing to it so that a kill or a full disk tears nothing.

    RUN/config.json             what was asked for, and what it ran on
    RUN/metrics.jsonl           one row a line: kind "train", "eval" or "done", arm, step, numbers
    RUN/checkpoint-<arm>.pt     the newest state of a training, see checkpoint.py
    RUN/loss.png                the curves

Rows are appended as they come; every other file is replaced as a whole. Of several ranks the first one reads and
writes; the others know what it read. A folder may come from anywhere: what is read from it is checked before it is
used. A run holds a lock on its folder, so that no second one writes there.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fp8compile.cli.errors import UserError
from fp8compile.cli.train.rows import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fp8compile.cli.train.ranks import Ranks
    from fp8compile.cli.train.rows import Row

__all__ = ["RunFolder", "existing_run_folder", "new_run_folder", "write_atomically"]


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
        command = f"fp8compile train --resume {shlex.quote(str(self.path))}"
        size = self._ranks.size
        return command if size == 1 else f"torchrun --nproc-per-node {size} -m {command}"

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def checkpoint(self, arm: str) -> Path:
        """Return the path of an arm's checkpoint."""
        return self.path / f"checkpoint-{arm}.pt"

    @property
    def config(self) -> Path:
        """The path of config.json."""
        return self.path / "config.json"

    def write_config(self, config: Row) -> None:
        """Write config.json."""
        if self._ranks.is_first:
            text = json.dumps(config, indent=2) + "\n"
            write_atomically(self.config, text.encode())

    def read_config(self) -> Row:
        """Read config.json.

        Returns:
            The parsed object.

        Raises:
            UserError: It is missing or no JSON object.
        """
        return self._ranks.same(self._read_config)

    def _read_config(self) -> Row:
        try:
            config = json.loads(self.config.read_bytes())
        except OSError as error:
            raise UserError(f"no run in {self.path}: cannot read config.json: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"cannot use {self.config}: {error}; start a new run") from error
        if not isinstance(config, dict):
            raise UserError(f"cannot use {self.config}: it is no JSON object; start a new run")
        return config

    def append(self, row: Row) -> None:
        """Add a row to metrics.jsonl; it outlives a kill of the process from here on."""
        if not self._ranks.is_first:
            return
        line = json.dumps(row) + "\n"
        with _writing(self._metrics), self._metrics.open("a") as file:
            file.write(line)

    def rows(self) -> list[Row]:
        """Return the rows of metrics.jsonl, without a last line that a kill cut short.

        Raises:
            UserError: It can't be read, or a line is no row.
        """
        return self._ranks.same(self._read_rows)

    def _read_rows(self) -> list[Row]:
        try:
            return rows_of(self._metrics.read_bytes())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"cannot use {self._metrics}: {error.strerror}") from error
        except ValueError as error:
            raise UserError(f"cannot use {self._metrics}: {error}; start a new run") from error

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


# -------------------------------------------------------------------- whose folder it is


def _lock(path: Path, held: ExitStack) -> None:
    """Keep other runs on this machine out of a folder; the system lets go when the process ends, however it ends."""
    descriptor = os.open(path, os.O_RDONLY)  # of the folder itself: no file is left behind
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"another run is alive in {path}; wait for its end, or stop it") from error
    except OSError as error:  # some network file systems have none
        print(f"note: no lock on {path}: {error.strerror}; see to it that no other run writes there", flush=True)


def _refuse_taken(path: Path) -> None:
    if (path / "config.json").exists():
        raise UserError(f"{path} already has a run; go on with it by --resume {path}, or give another --out")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is no empty folder; give another --out")


def _make_folder(path: Path, held: ExitStack) -> bool:
    """Make a folder for a run, and lock it; return whether it was there, empty."""
    with _writing(path):
        _refuse_taken(path)
        had_folder = path.exists()
        path.mkdir(parents=True, exist_ok=True)
        _lock(path, held)
        _refuse_taken(path)  # another run may have been quicker
    return had_folder


def _open_folder(path: Path, held: ExitStack) -> None:
    try:
        _lock(path, held)
    except OSError as error:
        raise UserError(f"no run in {path}: {error.strerror}; check --resume") from error
    if not path.is_dir():
        raise UserError(f"no run in {path}: it is a file; give --resume the folder of the run")


@contextmanager
def new_run_folder(path: Path, ranks: Ranks) -> Iterator[RunFolder]:
    """Make the folder of a new run, which is its own while the block runs.

    Args:
        path: Where; may exist if it is an empty folder.
        ranks: The processes of the run.

    Yields:
        The folder, with nothing in it.

    Raises:
        UserError: There is a run or anything else, or the folder cannot be made.
    """
    with ExitStack() as held:
        had_folder = ranks.same(lambda: _make_folder(path, held))
        yield RunFolder(path, ranks, is_fresh=True, had_folder=had_folder)


@contextmanager
def existing_run_folder(path: Path, ranks: Ranks) -> Iterator[RunFolder]:
    """Open the folder of a run to resume, which is its own while the block runs.

    Args:
        path: Where.
        ranks: The processes of the run.

    Yields:
        The folder.

    Raises:
        UserError: It is no folder, or another run is alive in it.
    """
    with ExitStack() as held:
        ranks.same(lambda: _open_folder(path, held))
        yield RunFolder(path, ranks, is_fresh=False)
