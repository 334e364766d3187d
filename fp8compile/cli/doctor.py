"""`fp8compile doctor`: reports what this machine can run, and checks that fp8compile works on it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from fp8compile.cli.errors import UserError
from fp8compile.cli.gpu_flag_choices import GPUS
from fp8compile.cli.section import Section
from fp8compile.tables import Cell, Note

__all__ = ["add_parser", "examine"]

log: logging.Logger = logging.getLogger(__name__)
ALL_GEMMS, CANNOT = "all three", "can't run"
DEVICE_KEYS = ("device", "name", "capability", "architecture", "rocm", "threads")
PACKAGES = ("torch", "triton", "numpy", "matplotlib", "torchao")


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

    from fp8compile.target import target_of

    devices: list[dict[str, Any]] = [
        {"device": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    ]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        rocm = {}
        if torch.version.hip is not None:
            rocm = {"architecture": target_of(torch.device("cuda", index)).gcn, "rocm": torch.version.hip}
        devices.append({"device": f"cuda:{index}", "name": name, "capability": f"{major}.{minor}", **rocm})
    return devices


def _broken(error: Exception) -> dict[str, str]:
    return {"gemm": "all", "kind": "none", "detail": str(error)}


def _gemms(name: str, device: str, *, grouped: bool = False) -> list[dict[str, str]]:
    """Describe how a device runs each GEMM of the recipe ``name``, for linears or, if ``grouped``, for experts."""
    import torch

    from fp8compile import recipes
    from fp8compile.testing.explain.recipe_support import recipe_support

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
    import torch

    from fp8compile._compat import KNOWN_VERSIONS, TORCH_VERSION

    newest = KNOWN_VERSIONS[-1]
    if newest >= TORCH_VERSION:
        return []
    known = ".".join(map(str, newest))
    return [
        f"PyTorch {torch.__version__} is newer than {known}, the newest version that this fp8compile was tested with. "
        "Private interfaces that it uses may have changed. Look for a newer fp8compile, and rely on the self-checks."
    ]


def _checks() -> Iterator[dict[str, Any]]:
    from fp8compile.cli.doctor_checks import run_checks

    return run_checks()


def _products(devices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from fp8compile.cli.doctor_products import found_products

    return found_products(devices)


def _are_in_order(products: list[dict[str, Any]]) -> bool:
    from fp8compile.cli.doctor_products import are_in_order

    return are_in_order(products)


def examine() -> dict[str, Any]:
    """Examine versions, devices, recipes and GEMMs of this machine, and run the self-checks.

    Returns:
        A JSON-serializable dict with ``versions``, ``warnings``, ``devices``, ``recipes`` (how each GEMM of linears
        and of experts runs on each device), ``products`` (results of test GEMMs for each kind of GPU), ``checks``
        (each with name, ok and detail) and ``ok``: whether all checks and test GEMMs passed.
    """
    log.info("looking for devices")
    devices = _devices()
    products = _products(devices)
    checks = list(_checks())
    return {
        "versions": _versions(),
        "warnings": _warnings(),
        "devices": devices,
        "recipes": _recipes(devices),
        "products": products,
        "checks": checks,
        "ok": all(check["ok"] for check in checks) and _are_in_order(products),
    }


def _recipe_rows(row: dict[str, Any]) -> list[tuple[Cell, ...]]:
    """Return the table rows of one recipe on one device; GEMMs that run alike share a row."""
    rows: list[tuple[Cell, ...]] = []
    for layers in ("gemms", "experts"):
        ways: dict[Cell, list[str]] = {}
        for gemm in row[layers]:
            way = Note(gemm["detail"], CANNOT) if gemm["kind"] == "none" else gemm["detail"]
            ways.setdefault(way, []).append(gemm["gemm"])
        name = row["recipe"] + (", experts" if layers == "experts" else "")
        rows += [
            (row["device"], name, ALL_GEMMS if len(gemms) == len(row[layers]) > 1 else ", ".join(gemms), way)
            for way, gemms in ways.items()
        ]
    return rows


def _sections(devices: list[dict[str, Any]]) -> Iterator[Section]:
    keys = [key for key in DEVICE_KEYS if any(key in device for device in devices)]
    rows = tuple(tuple(str(device.get(key, "")) for key in keys) for device in devices)
    yield Section(title="devices", columns=tuple(keys), rows=rows)
    ways = [row for found in _recipes(devices) for row in _recipe_rows(found)]
    yield Section(title="recipes, and how their GEMMs run", columns=("device", "recipe", "GEMMs", "run"), rows=ways)


def _print_products(found: list[dict[str, Any]]) -> bool:
    """Print the entries of `found_products`; return whether all test GEMMs passed."""
    from fp8compile.cli.doctor_products import are_in_order, product_sections
    from fp8compile.cli.terminal import print_sections

    print_sections(product_sections(found))
    return are_in_order(found)


def _print() -> bool:
    """Print doctor's report; return whether all self-checks and all test GEMMs passed."""
    from fp8compile.cli.terminal import print_section

    warnings = tuple(f"WARNING: {text}" for text in _warnings())
    print_section(Section(title="versions", lines=warnings, rows=tuple(_versions().items())))
    log.info("looking for devices")
    devices = _devices()
    for section in _sections(devices):
        print_section(section)
    right = _print_products(_products(devices))
    checks = list(_checks())
    rows = tuple(("ok" if check["ok"] else "FAILED", check["name"], check["detail"]) for check in checks)
    failed = frozenset(at for at, check in enumerate(checks) if not check["ok"])
    print_section(Section(title="self-checks", rows=rows, loud=failed))
    return right and not failed


def _on_gpu(gpu: str) -> dict[str, Any]:
    """Describe a GPU that need not be present, and how it runs each recipe."""
    from fp8compile.target import pretend_target
    from fp8compile.testing.gpu.gpus import GPUS as KNOWN

    known = KNOWN[gpu]
    with pretend_target(known.target):
        recipes = _recipes([{"device": "cuda"}])
    built = known.target.build
    torch, platform_version = (".".join(map(str, each or ())) for each in (built.torch, built.rocm or built.cuda))
    build = f"PyTorch {torch} for {'ROCm' if known.is_amd else 'CUDA'} {platform_version} on Linux"
    kind = known.gcnArchName or f"{known.major}.{known.minor}"
    return {"gpu": known.name, "capability": kind, "build": build, "recipes": recipes}


def _played_on(gpu: str) -> dict[str, Any]:
    from fp8compile.cli.doctor_products import played_on

    return played_on(gpu)


def _gpu_section(found: dict[str, Any]) -> Section:
    kind = found["capability"]
    kind = f"Architecture {kind}" if kind.startswith("gfx") else f"Compute capability {kind}"
    line = (
        f"{kind}, {found['build']}: according to the tables of GEMMs. Nothing was run, and this GPU need not be "
        "present."
    )
    rows = [cells for recipe in found["recipes"] for _, *rest in _recipe_rows(recipe) for cells in [tuple(rest)]]
    title = f"recipes on {found['gpu']}, and how their GEMMs run"
    return Section(title=title, lines=(line,), columns=("recipe", "GEMMs", "run"), rows=rows)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.gpu is not None:
        from fp8compile.cli.terminal import print_section

        found = _on_gpu(arguments.gpu)
        products = [_played_on(arguments.gpu)] if arguments.products else []
        if arguments.json:
            print(json.dumps({**found, "products": products}, indent=2))
            return 0 if _are_in_order(products) else 1
        print_section(_gpu_section(found))
        return 0 if _print_products(products) else 1
    if arguments.products:
        raise UserError(
            "--products requires --gpu NAME. For the GPUs in this machine, omit --products: their GEMMs are always "
            "run."
        )
    if arguments.json:
        findings = examine()
        print(json.dumps(findings, indent=2))
        return 0 if findings["ok"] else 1
    return 0 if _print() else 1


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``doctor`` to the argument parser."""
    text = (
        "Print the versions and devices of this machine and how each recipe runs on them, run each GEMM of a GPU "
        "once, and check the fp8compile installation."
    )
    parser = subparsers.add_parser(
        "doctor", help="check this machine and show how each recipe runs on it", description=text, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--gpu", choices=GPUS, help="show how each recipe runs on this GPU instead, which need not be present"
    )
    parser.add_argument(
        "--products",
        action="store_true",
        help="with --gpu, simulate each GEMM of that GPU on the CPU and compare the results",
    )
    parser.set_defaults(run=_run)
