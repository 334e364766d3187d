"""Rows of the table whose outcomes `tests/behaviour/table.py` records: a test a row, run in eager mode and compiled.

    @behaviour("Autograd", "gradient accumulation")
    def test_accumulation(way): ...

A test that passes is recorded as "works". What raises says so by `way.raises`, and the cell is the error's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

__all__ = ["OUTCOMES", "RECORD", "VERSIONS", "WAYS", "Cells", "Way", "behaviour", "recorded"]

VERSIONS = ("2.11", "2.13", "2.15")  # those with recorded outcomes
OUTCOMES = Path(__file__).parent / "outcomes"  # a file a PyTorch version; written by table.py
RECORD = "FP8COMPILE_BEHAVIOUR"  # in the environment: the file to append outcomes to
WAYS = ("eager", "compiled")
Cells = dict[str, dict[str, dict[str, str]]]  # by group, row and way


def behaviour(group: str, row: str, *, ways: tuple[str, ...] = WAYS) -> Callable:
    """Make a test that takes ``way`` a row of the table.

    Args:
        group: The part of the table.
        row: What a user does.
        ways: In which columns it makes sense.
    """

    def mark(test: Callable) -> Callable:
        test = pytest.mark.parametrize("way", ways, indirect=True)(test)
        return pytest.mark.behaviour(group, row)(test)

    return mark


# how Dynamo quotes an error: TypeError('text'), TypeError([ConstantVariable(str: 'text')])
QUOTES_BEFORE = re.compile(r"""^(: |\(\[?(ConstantVariable\(str: )?['"])""")
QUOTES_AFTER = re.compile(r"""(['"]\)+\]?\)*)+$""")


def shortened(text: str, limit: int = 300) -> str:
    """The beginning of a text that is too long for a note, without addresses in memory."""
    text = re.sub(r"0x[0-9a-f]+", "0x...", text)
    return text if len(text) <= limit else f"{text[:limit]} ..."


@cache
def recorded(version: str) -> Cells:
    """Cells of one PyTorch version; empty if none were recorded."""
    path = OUTCOMES / f"{version}.json"
    return json.loads(path.read_text()) if path.exists() else {}


class Way:
    """How a test runs, and what came of it.

    Attributes:
        name: "eager" or "compiled".
        compiled: Whether this is the column of torch.compile.
        outcome: What the table will say.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.compiled = name == "compiled"
        self.outcome = "works"

    def __call__(self, fn: Any, *, backend: str = "aot_eager", **options: Any) -> Any:
        """``fn`` as it is, or compiled as one graph."""
        return torch.compile(fn, fullgraph=True, backend=backend, **options) if self.compiled else fn

    @contextmanager
    def raises(self, kind: type[Exception], *fragments: str) -> Iterator[None]:
        """Expect an error whose text has all ``fragments``: it becomes the cell.

        What is raised while Dynamo traces, it raises as an error of its own, which quotes the original.
        """
        kinds = (kind, TorchDynamoException) if self.compiled else kind
        with pytest.raises(kinds) as caught:
            yield
        text = str(caught.value)
        missing = [fragment for fragment in fragments if fragment not in text]
        assert not missing, f"the error says nothing of {missing}:\n{text}"
        line = next(line for line in text.splitlines() if fragments[0] in line)
        _, quoted, said = line.rpartition(kind.__name__)
        quoted = quoted and fragments[0] in said
        assert quoted or type(caught.value) is kind, f"not a {kind.__name__}:\n{text}"
        said = QUOTES_BEFORE.sub("", said) if quoted else line
        self.outcome = f"{kind.__name__}: {shortened(QUOTES_AFTER.sub('', said).strip())}"

    def raises_as_before(self, kind: type[BaseException], fragment: str, run: Callable, *models: Any) -> None:
        """Expect ``run(model)`` to raise the same for each model, the unconverted one among them."""
        for model in models:
            with self.raises(kind, fragment):
                run(model)
        self.outcome += " (the unconverted model too)"
