"""Text on disk, and the batches made from it.

A batch is a pure function of the text, the seed and the step, so a resumed run needs no iterator's state. The last
bytes of the text are held out; no training batch contains them.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from examples.train.config import UsageError

HELD_OUT_SHARE = 0.05
MAX_BYTES = 256 * 2**20  # bounds the memory that a careless --data / would take
# Folders of the standard library with tests and tables, which are no typical source code.
SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "idle_test", "encodings"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """A text as bytes, uint8, and its digest, by which a resumed run checks that the text is the same."""

    train: Tensor
    held_out: Tensor
    sha256: str
    num_files: int


def _files(source: Path | None) -> Iterator[Path]:
    if source is None:
        folder = Path(sysconfig.get_path("stdlib"))
        found, is_left_out = folder.rglob("*.py"), SKIPPED_FOLDERS.__contains__
    elif source.is_dir():
        folder, found, is_left_out = source, source.rglob("*"), lambda part: part.startswith(".")
    else:
        yield source
        return
    for path in sorted(found):
        if path.is_file() and not any(map(is_left_out, path.relative_to(folder).parts)):
            yield path


def _content(source: Path | None) -> tuple[bytes, int]:
    pieces, size = [], 0
    for path in _files(source):
        try:
            piece = path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}; check --data") from error
        if b"\0" not in piece:  # a file with a zero byte is no text in a bytewise encoding
            pieces.append(piece)
            size += len(piece)
        if size > MAX_BYTES:
            raise UsageError(f"{source} has more than {MAX_BYTES >> 20} MiB of text; give --data a smaller one")
    return b"\n".join(pieces), len(pieces)


def load_text(source: str | Path | None, *, batch: int, seq: int) -> Text:
    """Read a file, or all visible files below a folder. None reads the sources of Python's standard library.

    Raises:
        UsageError: There is nothing readable, or too little text for one batch and one held-out sequence.
    """
    content, num_files = _content(None if source is None else Path(source))
    needed = (batch * seq + 1) + (seq + 1)  # a target is the byte after its token
    if len(content) < needed:
        raise UsageError(
            f"{source} has {len(content)} bytes of text; one batch of {batch} sequences of {seq} bytes and a held-out "
            f"sequence take {needed}; lower --batch or --seq, or give more"
        )
    num_held_out = max(int(len(content) * HELD_OUT_SHARE), seq + 1)
    bytes_P = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return Text(
        train=bytes_P[:-num_held_out],
        held_out=bytes_P[-num_held_out:],
        sha256=hashlib.sha256(content).hexdigest(),
        num_files=num_files,
    )


def _windows(bytes_P: Tensor, starts: list[int], seq: int) -> tuple[Tensor, Tensor]:
    windows = torch.stack([bytes_P[start : start + seq + 1] for start in starts]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def training_batch(text: Text, *, seed: int, step: int, batch: int, seq: int) -> tuple[Tensor, Tensor]:
    """The tokens and the targets of a step's batch, each (batch, seq), int64, on the CPU, whatever ran before."""
    # Seeding by a string goes through SHA-512, so neighbouring seeds and steps share nothing. random() is the only
    # draw whose sequence Python promises to keep.
    random = Random(f"{seed}/{step}")
    num_starts = len(text.train) - seq
    starts = [int(random.random() * num_starts) for _ in range(batch)]
    return _windows(text.train, starts, seq)


def held_out_batches(text: Text, *, batch: int, seq: int, sequences: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The held-out batches: the same each time, spread evenly over the held-out text; the last may have fewer rows."""
    room = (len(text.held_out) - 1) // seq
    count = min(sequences, room)
    starts = [index * room // count * seq for index in range(count)]
    for first in range(0, count, batch):
        yield _windows(text.held_out, starts[first : first + batch], seq)
