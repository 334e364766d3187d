"""Ranks import what their functions are made of: tests of expert parallelism have the layer and its data."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
