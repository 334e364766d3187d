"""Text on disk, and the batches made from it.

A batch is a pure function of the text, the seed and the step, so that a resumed run needs no
state of an iterator. The last bytes of the text are held out; no training batch touches them.

Letters: B sequences, T bytes in one.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch

from fp8compile.cli.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["Text", "default_folder", "held_out_batches", "load_text", "training_batch"]

HELD_OUT_SHARE = 0.05
# Bounds the memory that a careless --data / would take; the standard library has a tenth of it.
MAX_BYTES = 256 * 2**20
# Tests and tables of the standard library: not what people mean by source code.
SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "idle_test", "encodings"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """A text as bytes, its tail held out.

    Attributes:
        train: Bytes to train on, shape (P,), uint8.
        held_out: Bytes to evaluate on, shape (Q,), uint8.
        sha256: Hex digest of both together, by which a resumed run knows its text.
        num_files: Files read.
        num_skipped: Files of the folder left out, because they hold a NUL byte.
    """

    train: Tensor
    held_out: Tensor
    sha256: str
    num_files: int
    num_skipped: int


def default_folder() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def _python_sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(folder).parts) and path.is_file():
            yield path


def _visible_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and path.is_file():
            yield path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # the second of a NUL in a name
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', error)}; check --data") from error


def _files(source: Path | None) -> Iterator[Path]:
    if source is None:
        return _python_sources(default_folder())
    if source.is_dir():
        return _visible_files(source)
    if source.exists() and not source.is_file():
        raise UserError(f"{source} is neither a file nor a folder; give --data a text")
    return iter((source,))


def _gather(source: Path | None) -> tuple[bytes, int, int]:
    pieces, size, num_skipped = [], 0, 0
    for path in _files(source):
        content = _read(path)
        if b"\0" in content:  # no text in any encoding that works byte by byte
            num_skipped += 1
            continue
        pieces.append(content)
        size += len(content)
        if size > MAX_BYTES:
            raise UserError(
                f"{source} holds more than {MAX_BYTES >> 20} MiB of text; give --data a smaller folder or file"
            )
    return b"\n".join(pieces), len(pieces), num_skipped


def load_text(source: Path | None, *, batch: int, seq: int) -> Text:
    """Read a file, every visible file below a folder, or the standard library's sources.

    Files of a folder are joined in the order of their paths; those with a NUL byte are left out.

    Args:
        source: File or folder; None for the ``.py`` files of the running Python's library.
        batch: Sequences in a training batch.
        seq: Bytes in a sequence.

    Returns:
        The text, split into a part to train on and a held-out tail of 5 percent, or more where
        that is less than one sequence.

    Raises:
        UserError: Nothing readable there, no text in it, or too little for one batch.
    """
    content, num_files, num_skipped = _gather(source)
    place = default_folder() if source is None else source
    if not content.strip():
        binary = f" ({num_skipped} binary file(s) left out)" if num_skipped else ""
        raise UserError(f"no text in {place}{binary}; give --data a file or folder with text")
    # A target is the byte after its token, hence the one byte more on each side.
    needed = (batch * seq + 1) + (seq + 1)
    if len(content) < needed:
        raise UserError(
            f"{place} has {len(content)} bytes of text; one batch of {batch} sequences of {seq} "
            f"bytes and a held-out sequence take {needed}; lower --batch or --seq, or give more"
        )
    num_held_out = max(int(len(content) * HELD_OUT_SHARE), seq + 1)
    bytes_P = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return Text(
        train=bytes_P[:-num_held_out],
        held_out=bytes_P[-num_held_out:],
        sha256=hashlib.sha256(content).hexdigest(),
        num_files=num_files,
        num_skipped=num_skipped,
    )


def _windows(bytes_P: Tensor, starts: list[int], seq: int) -> tuple[Tensor, Tensor]:
    windows = torch.stack([bytes_P[start : start + seq + 1] for start in starts]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def training_batch(text: Text, *, seed: int, step: int, batch: int, seq: int) -> tuple[Tensor, Tensor]:
    """Return the batch of one step, the same whatever ran before.

    Args:
        text: Where the bytes come from.
        seed: Decides the order of the data.
        step: Which batch, from 0.
        batch: Sequences in it.
        seq: Bytes in a sequence.

    Returns:
        Tokens and targets, each shape (batch, seq), int64, on the CPU.
    """
    # Seeding by a string goes through SHA-512, so neighbouring seeds and steps share nothing;
    # random() is the one draw whose sequence Python promises to keep.
    random = Random(f"{seed}/{step}")
    num_starts = len(text.train) - seq
    starts = [int(random.random() * num_starts) for _ in range(batch)]
    return _windows(text.train, starts, seq)


def held_out_batches(text: Text, *, batch: int, seq: int, sequences: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the held-out batches, the same ones each time.

    Args:
        text: Where the bytes come from.
        batch: Sequences in a batch; the last one may have fewer.
        seq: Bytes in a sequence.
        sequences: How many sequences, spread evenly over the held-out tail; fewer if it is short.

    Yields:
        Tokens and targets, each shape (batch or fewer, seq), int64, on the CPU.
    """
    room = (len(text.held_out) - 1) // seq
    count = min(sequences, room)
    starts = [index * room // count * seq for index in range(count)]
    for first in range(0, count, batch):
        yield _windows(text.held_out, starts[first : first + batch], seq)
