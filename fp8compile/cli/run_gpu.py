"""`fp8compile run-gpu`: runs Inductor's program for a GPU on the CPU, and checks the results.

0  results equal the FX graphs' results bitwise     1  results differ, or a kernel does something invalid
2  the program was not run: no such target or GPU, the target fails, or the simulator does not support the code
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fp8compile.cli.errors import UserError
from fp8compile.cli.section import Section

__all__ = ["add_parser"]

WANTED = "(function, args): a module or function, and a tuple of its arguments on the CPU"
SHOWN = 20  # differences, of each GPU
MODES = ("contract", "approximate", "precision_casts")


@dataclass(frozen=True)
class Outcome:
    """Result of simulating Inductor's program for one GPU on the CPU.

    Attributes:
        arch: The GPU, as the user named it.
        name: Full name of the GPU.
        graphs: A line for each graph that was run, and a line on the origin of the first NaN, if any.
        fault: Forbidden action of a kernel, such as an access out of bounds; empty if there is none.
        differences: A line for each tensor that differs from the result of the graphs.
        unknown: Why the program was not run; empty if it was.
        seconds: Duration.
    """

    arch: str
    name: str
    graphs: tuple[str, ...] = ()
    fault: str = ""
    differences: tuple[str, ...] = ()
    unknown: str = ""
    seconds: float = 0.0

    @property
    def answer(self) -> str:
        """The outcome in a few words, such as "not run" or "2 tensors DIFFER"."""
        if self.unknown:
            return "not run"
        if self.fault:
            return "FAULT"
        return (
            f"{len(self.differences)} tensors DIFFER" if self.differences else "identical to its graphs, bit for bit"
        )


def _loaded(text: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from torch import Tensor

    from fp8compile.cli.target import found_at
    from fp8compile.cli.user_code import running

    if ":" not in text:
        raise UserError(f"{text!r} does not name a function. Pass FILE.py:function or package.module:function.")
    with running(f"{text}: loading it"):
        found = found_at(text)
        value = found() if callable(found) else found
    if not isinstance(value, tuple) or len(value) != 2 or not callable(value[0]):
        raise UserError(f"{text} returned a {type(value).__name__}; it must return {WANTED}.")
    fn, args = value
    args = (args,) if isinstance(args, Tensor) else args
    if not isinstance(args, tuple | list):
        raise UserError(f"{text} returned args of type {type(args).__name__}; it must be a tuple, such as (x,).")
    return fn, tuple(args)


def _one_line(error: BaseException) -> str:
    text = str(error).partition("\n\nSet TORCHDYNAMO_VERBOSE")[0].partition("\n\nfrom user code")[0]
    return f"{type(error).__name__}: {' '.join(text.split())}"


def _cause(error: BaseException, kinds: tuple[type[BaseException], ...]) -> BaseException | None:
    """Return the first error of the classes ``kinds`` in the chain of causes that begins with ``error``; else None."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, kinds):
            return seen
        seen = getattr(seen, "inner_exception", None) or seen.__cause__ or seen.__context__
    return None


def _outcome(arch: str, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Outcome:
    from fp8compile.testing.gpu.gpus import check_is_nvidia, gpu_called
    from fp8compile.testing.gpu.program.run import run_gpu_program

    try:
        gpu = gpu_called(arch)
        check_is_nvidia(gpu, "run-gpu")
    except ValueError as error:
        raise UserError(str(error)) from None
    began = time.perf_counter()
    try:
        run = run_gpu_program(fn, *args, arch=arch, **options)
    except Exception as error:  # told apart by what the tool itself raises; all else is the function's own
        seconds = time.perf_counter() - began
        if (unknown := _cause(error, (NotImplementedError, ModuleNotFoundError))) is not None:
            return Outcome(arch, gpu.name, unknown=_one_line(unknown), seconds=seconds)
        if isinstance(error, IndexError | RuntimeError | ValueError):
            return Outcome(arch, gpu.name, fault=_one_line(error), seconds=seconds)
        raise UserError(f"running the function failed: {_one_line(error)}") from error
    return Outcome(
        arch, gpu.name, tuple(map(str, filter(None, (*run.graphs, run.nan_origin)))),
        differences=tuple(map(str, run.differences)), seconds=time.perf_counter() - began,
    )  # fmt: skip


def _sections(text: str, outcomes: Sequence[Outcome]) -> Iterator[Section]:
    rows = [(each.arch, each.name, each.answer) for each in outcomes]
    bad = frozenset(at for at, each in enumerate(outcomes) if each.fault or each.differences)
    yield Section(
        title=f"the GPU program of {text}, simulated on this CPU",
        columns=("arch", "GPU", "it has"),
        rows=rows,
        loud=bad,
    )
    for each in outcomes:
        left = len(each.differences) - SHOWN
        more = (f"and {left} more",) if left > 0 else ()
        lines = (*each.graphs, *filter(None, (each.unknown, each.fault)), *each.differences[:SHOWN], *more)
        yield Section(title=each.arch, lines=lines)


def _write_junit(path: Path, text: str, outcomes: Sequence[Outcome]) -> None:
    """Write a JUnit file with one test case for each GPU; ``text`` is the name of the test class.

    Differences and faults are failures; programs that were not run are errors.
    """
    bad = sum(bool(each.fault or each.differences) for each in outcomes)
    suite = ElementTree.Element(
        "testsuite", name="fp8compile run-gpu", tests=str(len(outcomes)), failures=str(bad),
        errors=str(sum(bool(each.unknown) for each in outcomes)),
    )  # fmt: skip
    for each in outcomes:
        case = ElementTree.SubElement(
            suite, "testcase", classname=text, name=each.arch, time=f"{each.seconds:.3f}"
        )  # fmt: skip
        said = each.unknown or each.fault or "\n".join(each.differences)
        if said:
            kind = ElementTree.SubElement(case, "error" if each.unknown else "failure", message=said.splitlines()[0])
            kind.text = said
    try:
        ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise UserError(f"--junit {path}: {error.strerror}") from error


def _run(arguments: argparse.Namespace) -> int:
    from fp8compile.cli.terminal import print_sections

    fn, args = _loaded(arguments.target)
    options = {name: getattr(arguments, name) for name in MODES}
    outcomes = [_outcome(arch, fn, args, options) for arch in dict.fromkeys(arguments.arch or ["h200"])]
    print_sections(_sections(arguments.target, outcomes))
    if arguments.junit is not None:
        _write_junit(arguments.junit, arguments.target, outcomes)
    if any(each.fault or each.differences for each in outcomes):
        return 1
    return 2 if any(each.unknown for each in outcomes) else 0


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``run-gpu`` to the argument parser."""
    text = (
        "Run the program that Inductor generates for a GPU on this machine's CPU: wrapper, kernels and GEMMs, forward "
        "and backward. Compare it bit for bit with its graphs."
    )
    parser = subparsers.add_parser(
        "run-gpu", help="simulate a GPU's program on the CPU", description=text, allow_abbrev=False
    )
    parser.add_argument(
        "target", metavar="TARGET", help=f"FILE.py:function, a function without arguments that returns {WANTED}"
    )
    parser.add_argument(
        "--arch", action="append", metavar="GPU", help="the GPU: h200 (default), rtx5090, sm_120, ...; may be repeated"
    )
    parser.add_argument(
        "--contract", action="store_true", help="contract a multiplication and an addition into one fused multiply-add"
    )
    parser.add_argument(
        "--approximate", action="store_true", help="approximate divisions, exponentials and roots as a GPU may"
    )
    parser.add_argument(
        "--precision-casts", action="store_true", help="round each operator's result to its dtype, as in eager mode"
    )
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML with one test case per GPU")
    parser.set_defaults(run=_run)
