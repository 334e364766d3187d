"""Raises an ImportError on import unless torchtitan has a known version; its configs differ between versions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["KNOWN_VERSIONS", "check_version"]

KNOWN_VERSIONS = ("0.3.0",)
WANTED = f"fp8compile.integrations.torchtitan supports torchtitan {', '.join(KNOWN_VERSIONS)}"
TO_DO = (
    f"Install torchtitan=={KNOWN_VERSIONS[-1]}, or convert the model that torchtitan builds with "
    "fp8compile.convert, before it is parallelized."
)


def check_version() -> None:
    """Raise an ImportError unless a known torchtitan version is installed; ignores local suffixes (+...)."""
    try:
        installed = version("torchtitan")
    except PackageNotFoundError as error:
        raise ImportError(f"{WANTED}, but torchtitan is not installed. {TO_DO}") from error
    if installed.partition("+")[0] not in KNOWN_VERSIONS:
        raise ImportError(f"{WANTED}, but {installed} is installed. {TO_DO}")


check_version()
