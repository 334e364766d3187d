"""`fp8compile doctor`: says what this machine can run, and checks that fp8compile works on it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import platform
from importlib import metadata
from typing import Any

__all__ = ["add_parser", "examine"]

log: logging.Logger = logging.getLogger(__name__)
PACKAGES = ("torch", "triton", "numpy", "rich", "matplotlib", "torchao")


def _versions() -> dict[str, str]:
    import fp8compile

    found = {"python": platform.python_version(), "fp8compile": fp8compile.__version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _devices() -> list[dict[str, Any]]:
    import torch

    devices: list[dict[str, Any]] = [
        {"device": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    ]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        rocm = {} if torch.version.hip is None else {"rocm": torch.version.hip}
        devices.append({"device": f"cuda:{index}", "name": name, "capability": f"{major}.{minor}", **rocm})
    return devices


def _broken(error: Exception) -> dict[str, str]:
    return {"gemm": "all", "kind": "none", "detail": str(error)}


def _gemms(name: str, device: str, *, grouped: bool = False) -> list[dict[str, str]]:
    """How the GEMMs of a recipe run on a device, for linears or for experts.

    If the recipe comes from an installed package that fails, the entry has the error.
    """
    import torch

    from fp8compile import recipes
    from fp8compile.ops.support import recipe_support

    try:
        recipe = recipes.by_name(name)
    except (ImportError, TypeError, ValueError) as error:
        return [_broken(error)]
    return [dataclasses.asdict(gemm) for gemm in recipe_support(recipe, torch.device(device), grouped=grouped)]


def _recipes(devices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from fp8compile import recipes

    names, broken = recipes.names(), []
    try:
        names += recipes.installed()
    except ValueError as error:
        broken = [{"device": "any", "recipe": "of packages", "gemms": [_broken(error)], "experts": []}]
    return [
        {
            "device": entry["device"],
            "recipe": name,
            "gemms": _gemms(name, entry["device"]),
            "experts": _gemms(name, entry["device"], grouped=True),
        }
        for entry in devices
        for name in names
    ] + broken


def _warnings() -> list[str]:
    """Warnings about possible problems: a PyTorch newer than those that fp8compile was tested on."""
    import torch

    from fp8compile._compat import KNOWN_VERSIONS, TORCH_VERSION

    newest = KNOWN_VERSIONS[-1]
    if newest >= TORCH_VERSION:
        return []
    known = ".".join(map(str, newest))
    return [
        f"PyTorch {torch.__version__} is newer than {known}, the newest that this fp8compile was tested on. Private "
        "interfaces that it uses may have changed: look for a newer fp8compile, and believe the self-checks."
    ]


def examine() -> dict[str, Any]:
    """All results of doctor, as plain values for JSON.

    Returns:
        A dict with ``versions``, ``warnings``, ``devices``, ``recipes`` (how each GEMM of linears and of experts runs
        on each device), ``checks`` (each with name, ok and detail) and ``ok``.
    """
    from fp8compile.cli.checks import run_checks

    log.info("looking for devices")
    devices = _devices()
    checks = run_checks()
    return {
        "versions": _versions(),
        "warnings": _warnings(),
        "devices": devices,
        "recipes": _recipes(devices),
        "checks": checks,
        "ok": all(check["ok"] for check in checks),
    }


def _print_table(rows: list[tuple[str, ...]]) -> None:
    from fp8compile.nn.report import aligned

    for line in aligned(rows):
        print("  " + line)


def _recipe_lines(row: dict[str, Any]) -> list[tuple[str, ...]]:
    """Table rows for one recipe on one device: a row for all GEMMs that run in the same way."""
    lines: list[tuple[str, ...]] = []
    for layers in ("gemms", "experts"):
        ways: dict[str, list[str]] = {}
        for gemm in row[layers]:
            cannot = "can't run: " if gemm["kind"] == "none" else ""
            ways.setdefault(cannot + gemm["detail"], []).append(gemm["gemm"])
        name = row["recipe"] + (", experts" if layers == "experts" else "")
        lines += [(row["device"], name, ", ".join(gemms), way) for way, gemms in ways.items()]
    return lines


def _print(findings: dict[str, Any]) -> None:
    print("versions")
    _print_table(list(findings["versions"].items()))
    for warning in findings["warnings"]:
        print(f"  WARNING: {warning}")
    print("\ndevices")
    keys = ("device", "name", "capability", "rocm", "threads")
    _print_table([tuple(str(d.get(key, "")) for key in keys) for d in findings["devices"]])
    print("\nrecipes, and how their GEMMs run")
    _print_table([line for row in findings["recipes"] for line in _recipe_lines(row)])
    print("\nself-checks")
    _print_table([("ok" if check["ok"] else "FAILED", check["name"], check["detail"]) for check in findings["checks"]])


def _run(arguments: argparse.Namespace) -> int:
    findings = examine()
    if arguments.json:
        print(json.dumps(findings, indent=2))
    else:
        _print(findings)
    return 0 if findings["ok"] else 1


def add_parser(subparsers: Any) -> None:
    """Add ``doctor`` to the command."""
    text = "Say which versions and devices are here, which recipe runs how on them, and check fp8compile itself."
    parser = subparsers.add_parser("doctor", help="what runs here, and how", description=text, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)
