"""Whether a type checker knows the type of every public name, as whoever imports the package sees it.

    python -m benchmarks.public_types                       the tree beside this Python's packages
    python -m benchmarks.public_types --python VENV/bin/python      what is installed there, such as a wheel

It runs ``pyright --verifytypes``, which asks for an annotation where two checkers could infer two types: of every
module, class, attribute, argument and result whose name has no leading underscore. Prints what is not known, each with
its place and reason, and ends in 1 if there is any. pyright needs Node; `make lint` has mypy, which needs none.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

PACKAGE = "fp8compile"
ROOT = Path(__file__).parents[1]
# each file is named after the package whose classes it derives from; without that package, no base is known
INTEGRATIONS = f"{PACKAGE}.integrations."
PYRIGHT = "pyright==1.1.414"


@contextmanager
def _beside_packages() -> Iterator[str]:
    """A Python that has this tree's package as an installed one, and the packages of the Python that runs."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, symlinks=True)
        own = Path(sysconfig.get_path("purelib", vars={"base": folder, "platbase": folder}))
        shutil.copytree(ROOT / PACKAGE, own / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        (own / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
        yield str(Path(folder) / "bin" / "python")


def _report(pyright: str, python: str) -> dict:
    # with --verifytypes, pyright asks the first Python of the path
    around = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    around["PATH"] = f"{Path(python).absolute().parent}{os.pathsep}{around['PATH']}"
    with tempfile.TemporaryDirectory() as folder:  # where no file of the tree is taken for the package
        command = [pyright, "--verifytypes", PACKAGE, "--ignoreexternal", "--outputjson"]
        said = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=around)
    found = json.loads(said.stdout) if said.stdout.startswith("{") else {}
    if not found.get("typeCompleteness", {}).get("symbols"):
        raise SystemExit(f"public_types: {' '.join(command)} says\n{said.stdout}{said.stderr}")
    return found["typeCompleteness"]


@cache
def _is_installed(package: str, python: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code]).returncode == 0


def unknown_types(report: dict, python: str) -> list[str]:
    """A line for each public name whose type is not known, with what pyright says of it."""
    lines = []
    for symbol in report["symbols"]:
        name, said = symbol["name"], symbol["diagnostics"]
        if not symbol["isExported"] or symbol["isTypeKnown"]:
            continue
        of = name.removeprefix(INTEGRATIONS).partition(".")[0] if name.startswith(INTEGRATIONS) else ""
        if of and not _is_installed(of, python):
            continue
        reasons = [" ".join(each["message"].split()) for each in said if each["severity"] == "error"]
        place = next((f"{each['file'].rpartition('site-packages/')[2]}:{each['range']['start']['line'] + 1}: "
                      for each in said if each.get("range") and each.get("file")), "")  # fmt: skip
        lines.append(f"{place}{name}: {'; '.join(reasons) or 'a part of it is not known'}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", help="a Python that has the package installed; default: this tree")
    parser.add_argument("--pyright", default=shutil.which("pyright"), help="default: the one on the path")
    chosen = parser.parse_args()
    if chosen.pyright is None:
        raise SystemExit(f"public_types: there is no pyright. pip install {PYRIGHT}; it needs Node.")
    with _beside_packages() if chosen.python is None else nullcontext(chosen.python) as python:
        if not _is_installed("torch", python):
            raise SystemExit(f"public_types: {python} has no torch, of whose types those of the package are made.")
        report = _report(chosen.pyright, python)
        lines = unknown_types(report, python)
    for line in lines:
        print(line)
    count = sum(symbol["isExported"] for symbol in report["symbols"])
    print(f"{count - len(lines)} of {count} public names have a known type")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
