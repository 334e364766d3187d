"""Text tables that fit a width: equal rows fold into one, notes are numbered, long cells wrap."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

__all__ = [
    "LOG_WIDTH",
    "Cell",
    "Note",
    "folded",
    "folded_names",
    "listed",
    "paragraph",
    "table_lines",
    "terminal_width",
]

LOG_WIDTH = 100  # width of a file, a pipe or anything else that is no terminal
LEAST_WIDTH = 40  # narrower is unreadable, so lines then are longer than the terminal
NARROWEST = 6  # the least width of a column that is wrapped
BETWEEN = "  "
HARD_SPACE = "\N{NO-BREAK SPACE}"  # where textwrap breaks no line
SPACES = re.compile(r"(?<!\bx) (?!x\b)")  # "64 x 32" stays together
# the places at which a word that is too long for its column is broken, the best one first
BREAKS = tuple(
    map(
        re.compile,
        (
            r"(?<= )",
            r"(?<=[^.]\.)(?=[^.])",
            r"(?<=[._,/:}])",
            r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=[._,/:}])",
        ),
    )
)
LONG_WORD = 12  # words up to this length are not broken


@dataclass(frozen=True)
class Note:
    """A table cell with an explanation, which is printed as a numbered note below the table."""

    text: str  # the reason
    short: str = ""  # what the cell itself says; may be empty

    def __str__(self) -> str:
        return f"{self.short}: {self.text}" if self.short else self.text


Cell = str | Note
Content = TypeVar("Content", bound=Hashable)


def terminal_width() -> int:
    """Number of columns to print in: from the variable COLUMNS, else the terminal, else `LOG_WIDTH`."""
    return max(LEAST_WIDTH, shutil.get_terminal_size((LOG_WIDTH, 24)).columns)


# ---------------------------------------------------------------------------------- equal rows


def _numbers(values: Sequence[int]) -> str:
    """Write sorted numbers in short form, such as "0..31", "0,2" or "0..2,5"."""
    starts = [0, *(at for at, (a, b) in enumerate(pairwise(values), 1) if b != a + 1), len(values)]
    runs = [values[first:end] for first, end in pairwise(starts)]
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def _common(words: Sequence[list[str]]) -> int:
    return next(
        (at for at, parts in enumerate(zip(*words, strict=False)) if len(set(parts)) > 1), min(map(len, words))
    )


def _alternatives(names: Sequence[str]) -> str:
    """Write several names in one compact form, as "{0..31}" or "{gate,up}_proj"; one name is unchanged."""
    if len(names) == 1:
        return names[0]
    if all(name.isdecimal() and name == str(int(name)) for name in names):
        return f"{{{_numbers(sorted(map(int, names)))}}}"
    parts = [re.split(r"(?<=_)|(?=_)", name) for name in names]
    before = _common(parts)
    after = _common([part[before:][::-1] for part in parts])
    inside = ["".join(part[before : len(part) - after]) for part in parts]
    if not all(inside):
        return f"{{{','.join(names)}}}"
    tail = parts[0][len(parts[0]) - after :]
    return f"{''.join(parts[0][:before])}{{{','.join(inside)}}}{''.join(tail)}"


Pattern = tuple[tuple[str, ...], ...]  # alternatives of each part between dots


def _merged_at(patterns: list[Pattern], place: int) -> list[Pattern]:
    """Merge patterns that differ only at index ``place``; the merged pattern has all their alternatives there."""
    together: dict[Hashable, list[Pattern]] = {}
    for pattern in patterns:
        key = (*pattern[:place], None, *pattern[place + 1 :]) if place < len(pattern) else pattern
        together.setdefault((len(pattern), key), []).append(pattern)
    merged = []
    for same in together.values():
        first = same[0]
        if len(same) > 1:
            names = tuple(dict.fromkeys(name for each in same for name in each[place]))
            first = (*first[:place], names, *first[place + 1 :])
        merged.append(first)
    return merged


def _patterns(names: Iterable[str]) -> list[Pattern]:
    """Fold dotted names into patterns; a pattern is a tuple of alternatives for each part between dots.

    Patterns are in the order of each pattern's first name.
    """
    patterns: list[Pattern] = [tuple((part,) for part in name.split(".")) for name in dict.fromkeys(names)]
    before = 0
    while len(patterns) != before:
        before = len(patterns)
        for place in reversed(range(max(map(len, patterns), default=0))):
            patterns = _merged_at(patterns, place)
    return patterns


def _shown(pattern: Pattern) -> str:
    return ".".join(map(_alternatives, pattern))


def folded_names(names: Iterable[str]) -> list[str]:
    """Fold dotted names into patterns for exactly these names, such as "layers.{0..31}.{gate,up}_proj"."""
    return [_shown(pattern) for pattern in _patterns(names)]


def folded(rows: Iterable[tuple[str, Content]]) -> list[tuple[str, Content]]:
    """Fold (name, content) rows: rows with equal content become one row, named by a pattern of names.

    Names that need several patterns give several rows. Rows are in the order of each row's first name.
    """
    names: dict[Content, list[str]] = {}
    place: dict[tuple[str, Content], int] = {}
    for at, (name, rest) in enumerate(rows):
        names.setdefault(rest, []).append(name)
        place.setdefault((name, rest), at)
    found = [(pattern, rest) for rest, same in names.items() for pattern in _patterns(same)]
    found.sort(key=lambda each: place[".".join(part[0] for part in each[0]), each[1]])
    return [(_shown(pattern), rest) for pattern, rest in found]


# ---------------------------------------------------------------------------------- a table


def _parts(word: str, width: int) -> list[str]:
    """Split a word into parts no wider than ``width``, at readable places such as dots if possible."""
    for pattern in BREAKS:
        parts = pattern.split(word)
        if max(map(len, parts)) <= width:
            return parts
    return [part[at : at + width] for part in parts for at in range(0, len(part), width)]


def _pieces(word: str, width: int) -> list[str]:
    """Split a word into pieces no wider than ``width``, as few as possible."""
    if len(word) <= width:
        return [word]
    pieces = [""]
    for part in _parts(word, width):
        if len(pieces[-1]) + len(part) <= width:
            pieces[-1] += part
        else:
            pieces.append(part)
    return [piece.rstrip() for piece in pieces if piece]


@lru_cache(maxsize=4096)
def _wrapped(text: str, width: int) -> list[str]:
    """Wrap a cell's text into lines of ``width``; breaks only words wider than ``width``."""
    lines = [""]
    for word in SPACES.split(text):
        for number, piece in enumerate(_pieces(word, width)):
            room = len(lines[-1]) + (1 if lines[-1] and not number else 0) + len(piece) <= width
            if number or not room:
                lines.append(piece)
            else:
                lines[-1] = f"{lines[-1]} {piece}" if lines[-1] else piece
    return [line for line in lines if line] or [""]


def _fitted(cells: Sequence[Sequence[str]], floors: list[int], room: int) -> list[int]:
    """Choose column widths with a sum of at most ``room`` characters, none below the column's floor.

    The column whose shrinking adds the fewest lines shrinks first. If all columns are at their floors, the sum may be
    larger.
    """

    def heights(at: int, width: int) -> list[int]:
        return [len(_wrapped(row[at], width)) for row in cells]

    widths = [max(len(row[at]) for row in cells) for at in range(len(floors))]
    now = [heights(at, width) for at, width in enumerate(widths)]
    while sum(widths) > room:
        tried = {
            at: [*now[:at], heights(at, width - 1), *now[at + 1 :]]
            for at, width in enumerate(widths)
            if width > floors[at]
        }
        if not tried:
            break
        costs = {at: (sum(map(max, *columns, [0] * len(cells))), -widths[at]) for at, columns in tried.items()}
        at = min(costs, key=costs.__getitem__)
        widths[at], now = widths[at] - 1, tried[at]
    return widths


def _least(word: str) -> int:
    if len(word) <= LONG_WORD:
        return len(word)
    return min(LONG_WORD, max(map(len, BREAKS[-1].split(word))))


def _floor(cells: Sequence[str], *, is_number: bool) -> int:
    """Return the width below which a column would break a short word or, if ``is_number``, a number."""
    words = [word for cell in cells for word in SPACES.split(cell)]
    return max([NARROWEST, *map(len if is_number else _least, words)])


def _plain(rows: Sequence[Sequence[Cell]], notes: list[str]) -> list[list[str]]:
    """Convert cells to text; a note's cell shows the note's number, and its text is added to ``notes`` once."""
    plain = []
    for row in rows:
        cells = []
        for cell in row:
            if isinstance(cell, Note):
                if cell.text not in notes:
                    notes.append(cell.text)
                cells.append(f"{cell.short} [{notes.index(cell.text) + 1}]".strip())
            else:
                cells.append(cell)
        plain.append(cells)
    return plain


def _block(cells: Sequence[str], widths: Sequence[int], right: Collection[int]) -> list[str]:
    """Lay out one row of cells as lines; columns in ``right`` are aligned to the right."""
    columns = [_wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
    height = max(map(len, columns))
    lines = []
    for number in range(height):
        parts = [column[number] if number < len(column) else "" for column in columns]
        padded = [
            part.rjust(width) if at in right else part.ljust(width)
            for at, (part, width) in enumerate(zip(parts, widths, strict=True))
        ]
        lines.append(BETWEEN.join(padded).rstrip())
    return lines


def _note_lines(notes: Sequence[str], *, width: int) -> list[str]:
    """Lines below a table: the notes, numbered and wrapped."""
    marks = [f"[{number}] " for number in range(1, len(notes) + 1)]
    return [
        line
        for mark, note in zip(marks, notes, strict=True)
        for line in textwrap.wrap(
            note, width, initial_indent=mark, subsequent_indent=" " * len(mark), break_on_hyphens=False
        )
        or [mark.rstrip()]
    ]


def table_lines(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    width: int,
    right: Collection[int] = (),
    loud: Collection[int] = (),
    mark: Callable[[str], str] = str,
    head: Callable[[str], str] = str,
) -> list[str]:
    """Lay out a table as lines, followed by its notes.

    Args:
        columns: Headings; empty for a table without a head.
        rows: Cells, the same number in each row.
        width: Width in characters. Lines are longer if the columns' least widths need it.
        right: Indices of the columns that are aligned to the right.
        loud: Indices of the rows that stand out: ``mark`` is applied to their lines.
        mark: Makes a line stand out.
        head: Makes the headings stand out.
    """
    notes: list[str] = []
    plain = _plain(rows, notes)
    cells = [list(columns), *plain] if columns else plain
    if not cells:
        return []
    floors = [_floor([row[at] for row in cells], is_number=at in right) for at in range(len(cells[0]))]
    widths = _fitted(cells, floors, width - len(BETWEEN) * (len(floors) - 1))
    lines = []
    if columns:
        lines += [head(line) for line in _block(columns, widths, right)]
        lines.append(BETWEEN.join("-" * each for each in widths))
    for number, row in enumerate(plain):
        block = _block(row, widths, right)
        lines += map(mark, block) if number in loud else block
    return [*lines, *_note_lines(notes, width=width)]


# ---------------------------------------------------------------------------------- lines


def paragraph(text: str, *, width: int) -> list[str]:
    """Wrap a text to ``width``; lines after the first are indented by two more characters."""
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(
        text, width, initial_indent="", subsequent_indent=f"{indent}  ", drop_whitespace=True,
        break_on_hyphens=False, break_long_words=False,
    ) or [text]  # fmt: skip


def listed(head: str, items: Sequence[str], *, width: int, lines: int = 3) -> list[str]:
    """Join ``items`` after a head and wrap them into ``lines`` lines; counts the items that don't fit.

    No line ends within an item.
    """
    whole = [item.replace(" ", HARD_SPACE) for item in items]
    for kept in range(len(items), -1, -1):
        more = [f"and {len(items) - kept} more"] if kept < len(items) else []
        wrapped = paragraph(head + ", ".join([*whole[:kept], *more]), width=width)
        wrapped = [line.replace(HARD_SPACE, " ") for line in wrapped]
        if len(wrapped) <= lines:
            return wrapped
    return wrapped
