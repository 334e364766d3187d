"""Lies here so that pytest puts this folder on the path: `import swiglu8` works without installing it."""

from __future__ import annotations
