"""`fp8compile explain`: defines its flags and runs it; imports PyTorch only when it runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8compile import recipes
from fp8compile.cli.errors import Failed, UserError
from fp8compile.cli.gpu_flag_choices import GPUS
from fp8compile.cli.user_code import running

if TYPE_CHECKING:
    from fp8compile.cli.target import Target
    from fp8compile.testing.explain import Explanation
    from fp8compile.testing.memory import MemoryReport

__all__ = ["add_parser"]

DESCRIPTION = """
Is this really running in FP8? Compiles a model, inspects its graphs, and shows for each linear layer the dtypes of its
three GEMMs, padding, fused casts, and the roofline of a GPU.
"""
EXIT_CODES = """
exit code: 0 if the answer is YES; 1 if a converted layer fell back, if this can't be ruled out, or if no layer runs in
FP8 (for example, because the model was not converted); 2 if there is no answer because TARGET raises an error, calls
sys.exit or os._exit, or is not a model; 130 if stopped by Ctrl-C
"""
TARGET = """
package.module:name or FILE.py:name: a function that returns (model, args) or (model, args, kwargs), or a module (or
its class) with a method example_inputs(). FILE.py alone uses model_and_inputs, or else example
"""
COMPILING = "compiling the model and running it"
log: logging.Logger = logging.getLogger(__name__)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``explain`` to the argument parser."""
    parser = subparsers.add_parser(
        "explain", help="show which parts of a model really run in FP8", description=DESCRIPTION, epilog=EXIT_CODES,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("target", metavar="TARGET", help=TARGET)
    names = f"{', '.join(recipes.names())}, or the recipe of an installed package"
    recipe = f"convert the model with this recipe instead of its own: {names}; or a call such as 'rowwise(by_mx=True)'"
    parser.add_argument("--recipe", metavar="NAME", help=recipe)
    parser.add_argument(
        "--experts", metavar="NAME", help="with --recipe: a different recipe for modules named experts"
    )
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="generate code for this GPU (default h200)")
    parser.add_argument("--no-gpu", action="store_true", help="omit generated code and minimum times")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="add the memory of a training step, compared with the model without FP8; takes several more minutes",
    )
    parser.add_argument(
        "--tp",
        type=int,
        metavar="N",
        help="simulate one of N tensor parallel ranks in this process; TARGET applies the plan",
    )
    parser.add_argument(
        "--mesh",
        metavar="NAME=N,...",
        help="simulate one rank of a mesh, such as fsdp=8,ep=8, with the outermost dim first. TARGET is a function of "
        "the mesh, or of the mesh and a recipe (None: without FP8), that returns (model, args)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help="also write an HTML page")
    parser.set_defaults(run=_run)


def _convert(model: Any, name: str, experts: str | None) -> None:
    from fp8compile import convert, revert

    log.info("converting it with %s", name)
    with running(f"--recipe {name}: converting the model"):  # a recipe may come from another package
        try:
            recipe = recipes.by_name(name)
            chosen = recipe if experts is None else {"*.experts": recipes.by_name(experts), "*": recipe}
            convert(revert(model), chosen)
        except (ValueError, TypeError, ImportError) as error:
            raise UserError(f"--recipe {name}: {error}") from error


def _check_writable(path: Path) -> None:
    """Raise a `UserError` if the HTML page can't be written; called before the explanation, which takes minutes."""
    is_new = not path.exists()
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise UserError(f"--html {path}: {error.strerror}") from error
    if is_new:
        path.unlink()


def _target(parsed: argparse.Namespace) -> Target:
    """Load the model and inputs that the flags name; the user's code prints to standard error."""
    from fp8compile.cli.explain.fake_ranks import check_spread
    from fp8compile.cli.target import load_target

    with contextlib.redirect_stdout(sys.stderr):
        log.info("loading %s", parsed.target)
        target = load_target(parsed.target)
        if parsed.recipe is not None:
            _convert(target.model, parsed.recipe, parsed.experts)
        if parsed.tp is not None:
            check_spread(target, parsed.tp)
        return target


def _steps(parsed: argparse.Namespace, target: Target) -> Generator[Explanation, None, None]:
    """Yield the explanation of the model, more complete after each step."""
    from fp8compile.testing.explain import explain_in_steps

    with contextlib.redirect_stdout(sys.stderr):
        log.info("calling it once, with fake tensors")
        values = target.try_out()
    gpu = None if parsed.no_gpu else parsed.gpu
    steps = explain_in_steps(target.model, target.args, target.kwargs, gpu=gpu, values=values)
    with contextlib.closing(steps):
        while True:
            with contextlib.redirect_stdout(sys.stderr), running(f"{parsed.target}: {COMPILING}"):
                found = next(steps, None)
            if found is None:
                return
            yield found


def _memory(parsed: argparse.Namespace, target: Target) -> dict[str, MemoryReport]:
    """Return memory reports of a training step by column name: of the model, and of the model without FP8."""
    from fp8compile.testing.memory import memory_beside_unconverted

    log.info("generating code for its memory")
    with contextlib.redirect_stdout(sys.stderr), running(f"{parsed.target}: {COMPILING}"):
        try:
            return memory_beside_unconverted(target.model, target.args, target.kwargs, arch=parsed.gpu)
        except (ValueError, NotImplementedError, ModuleNotFoundError) as error:
            raise UserError(f"--memory: {error}") from error


def _check_flags(parsed: argparse.Namespace) -> None:
    if parsed.experts is not None and (parsed.recipe is None or parsed.mesh is not None):
        raise UserError(
            "--experts requires --recipe, and is not supported with --mesh, because TARGET then converts the model. "
            "Add --recipe and omit --mesh, or omit --experts."
        )
    for flag, given in (("--tp", parsed.tp), ("--no-gpu", parsed.no_gpu), ("--html", parsed.html)):
        if parsed.memory and given:
            raise UserError(f"--memory can't be combined with {flag}. Omit one of them.")


def _check(found: Explanation) -> None:
    if found.fell_back:
        raise Failed(f"fell back: {' | '.join(found.fell_back)}")
    if not found.runs_in_fp8:
        raise Failed(f"not proven: {' | '.join(found.unproven)}" if found.unproven else found.verdict)


def _run_on_mesh(parsed: argparse.Namespace) -> int:
    from fp8compile.cli.explain import mesh

    for flag, given in (
        ("--tp", parsed.tp),
        ("--html", parsed.html),
        ("--no-gpu", parsed.no_gpu),
        ("--memory", parsed.memory),
    ):
        if given:
            raise UserError(f"--mesh can't be combined with {flag}. Omit one of them.")
    with contextlib.redirect_stdout(sys.stderr):
        found = mesh.explain_on_mesh(parsed.target, parsed.mesh, parsed.recipe, parsed.gpu)
    if parsed.json:
        print(mesh.to_json(found), flush=True)
    else:
        from fp8compile.cli.terminal import print_sections

        print_sections(mesh.mesh_sections(found))
    mesh.check(found)
    return 0


def _run(parsed: argparse.Namespace) -> int:
    _check_flags(parsed)
    if parsed.mesh is not None:
        return _run_on_mesh(parsed)
    if parsed.html is not None:
        _check_writable(Path(parsed.html))
    from fp8compile.cli.explain.fake_ranks import pretended_ranks
    from fp8compile.cli.explain.sections import gpu_sections, graph_sections
    from fp8compile.cli.terminal import print_sections

    memory: dict[str, MemoryReport] = {}
    with pretended_ranks(parsed.tp):
        target = _target(parsed)
        with contextlib.closing(_steps(parsed, target)) as steps:
            found = next(steps)
            if not parsed.json:
                print_sections(graph_sections(found))  # before minutes go into code for a GPU
            found = next(steps, found)
        if not parsed.json:
            print_sections(gpu_sections(found))  # likewise, before minutes go into the code for memory
        if parsed.memory:
            memory = _memory(parsed, target)
    if parsed.html is not None:
        from fp8compile.cli.explain.html import page

        Path(parsed.html).write_text(page(found, parsed.target), encoding="utf-8")
    if parsed.json:
        more = {"memory": {name: each.to_dict() for name, each in memory.items()}} if memory else {}
        print(json.dumps({**found.to_dict(), **more}, indent=1), flush=True)
    elif memory:
        from fp8compile.cli.explain.memory import memory_sections

        print_sections(memory_sections(memory))
    _check(found)
    return 0
