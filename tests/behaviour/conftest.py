"""Collects outcomes of rows, and fails a test whose outcome is no longer what was recorded."""

from __future__ import annotations

import json
import os

import pytest
from ways import RECORD, VERSIONS, Way, recorded

from fp8compile._compat import TORCH_VERSION

VERSION = "{}.{}".format(*TORCH_VERSION)


def _check_recorded(group, row, way):
    cell = recorded(VERSION).get(group, {}).get(row, {}).get(way.name)
    assert way.outcome == cell, (
        f"tests/behaviour/outcomes says {cell!r} of {group} / {row} / {way.name}, this run {way.outcome!r}. If that "
        "is as it should be: python tests/behaviour/table.py"
    )


@pytest.fixture
def way(request):
    """How the test runs, and what the table says of it: see ways.py."""
    way = Way(request.param)
    yield way
    group, row = request.node.get_closest_marker("behaviour").args
    if RECORD in os.environ:
        # one short line: workers append to one file
        with open(os.environ[RECORD], "a") as file:
            file.write(json.dumps([group, row, way.name, way.outcome]) + "\n")
    elif VERSION in VERSIONS:
        _check_recorded(group, row, way)
