"""`fp8compile explain --mesh fsdp=8,ep=8`: explains one rank of a mesh, without other ranks or a GPU."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from fp8compile.cli.errors import Failed, UserError
from fp8compile.cli.section import Section
from fp8compile.cli.target import found_at
from fp8compile.cli.user_code import running

if TYPE_CHECKING:
    from fp8compile.testing.explain.mesh import MeshExplanation

__all__ = ["explain_on_mesh", "sizes_of"]

log: logging.Logger = logging.getLogger(__name__)
WANTED = "a function of the mesh, or of the mesh and a recipe, that returns (model, args)"


def sizes_of(text: str) -> dict[str, int]:
    """Parse sizes of mesh dims, such as ``"fsdp=8,ep=8"``, to a dict; the outermost dim is first.

    Raises:
        UserError: The text has another form, or the mesh has fewer than two ranks.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not (name.isidentifier() and equals and size.isdecimal() and int(size) > 0) or name in sizes:
            raise UserError(
                f"--mesh {text!r}: it must be a list of NAME=SIZE with different names, outermost dim first, such as "
                "--mesh fsdp=8,ep=8."
            )
        sizes[name] = int(size)
    if all(size == 1 for size in sizes.values()):
        raise UserError(f"--mesh {text}: a mesh must have at least 2 ranks, for example --mesh fsdp=8.")
    return sizes


def _builder(text: str) -> tuple[Callable[..., Any], int]:
    """Import the function that TARGET ``text`` names; return the function and its number of required arguments.

    The function takes the mesh, or the mesh and a recipe.
    """
    function = found_at(text)
    if not callable(function):
        raise UserError(f"{text} is a {type(function).__name__}; with --mesh it must be {WANTED}.")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(f"{text}: {error}; with --mesh it must be {WANTED}.") from error
    taken = sum(each.default is each.empty for each in parameters)
    if taken not in (1, 2):
        raise UserError(f"{text} has {taken} parameters without a default; with --mesh it must be {WANTED}.")
    return function, taken


def _checked(text: str, value: Any) -> tuple[Any, tuple[Any, ...]]:
    from torch import Tensor, nn

    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], nn.Module)):
        raise UserError(f"{text} returned a {type(value).__name__}; with --mesh it must return (model, args).")
    model, args = value
    return model, (args,) if isinstance(args, Tensor) else tuple(args)


def _built(text: str, function: Callable[..., Any], rest: tuple[Any, ...], mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    return _checked(text, function(mesh, *rest))


def explain_on_mesh(text: str, mesh: str, recipe: str | None, gpu: str) -> dict[str, MeshExplanation]:
    """Explain a model on one rank of a mesh; if TARGET takes a recipe, in FP8 and in high precision.

    Args:
        text: TARGET, the name of a function that builds the model.
        mesh: Sizes of the mesh, as `sizes_of` takes them.
        recipe: Name of a recipe, for a TARGET that takes one; else None.
        gpu: The GPU, a key of `fp8compile.testing.explain.PEAKS`.

    Returns:
        The explanations, by the name of their column in the printed table.

    Raises:
        UserError: TARGET is no function of a mesh, TARGET fails, or the flags don't fit TARGET.
    """
    from fp8compile import recipes
    from fp8compile.testing.explain.mesh import explain_mesh

    sizes = sizes_of(mesh)
    log.info("loading %s", text)
    with running(f"{text}: loading it"):
        function, taken = _builder(text)
    if taken == 1 and recipe is not None:
        raise UserError(
            f"--recipe {recipe}: {text} has no parameter for a recipe, so it converts the model itself. Omit --recipe."
        )
    if taken == 2 and recipe is None:
        raise UserError(f"{text} requires a recipe. Add --recipe rowwise, or another recipe.")
    columns: dict[str, tuple[Any, ...]] = {"as TARGET returns it": ()}
    if taken == 2 and recipe is not None:
        with running(f"--recipe {recipe}"):
            columns = {recipe: (recipes.by_name(recipe),), "without FP8": (None,)}
    found = {}
    for name, rest in columns.items():
        log.info("tracing one rank: %s", name)
        with running(f"{text}: tracing it on {mesh}"):
            found[name] = explain_mesh(partial(_built, text, function, rest), sizes, gpu=gpu)
    return found


def check(found: dict[str, MeshExplanation]) -> None:
    """Raise `Failed` if the model of the first explanation does not run in the formats of its recipes."""
    name, first = next(iter(found.items()))
    if first.problem:
        raise Failed(f"{name}: {first.problem}")


def to_json(found: dict[str, MeshExplanation]) -> str:
    """Convert explanations, given by column name, to a JSON object with the same keys."""
    return json.dumps(
        {
            name: {**asdict(each), "problem": each.problem, "sent_bytes": each.sent_bytes, "fp8": each.fp8_products}
            for name, each in found.items()
        }
    )


def mesh_sections(found: dict[str, MeshExplanation]) -> list[Section]:
    """Return two tables: counts, MB and times with a column for each explanation, and messages between ranks."""
    each = list(found.values())
    first = each[0]
    ranks = " x ".join(f"{name} {size}" for name, size in first.mesh.items())
    rows = (
        ("graphs, forward and backward", *(str(one.graphs) for one in each)),
        ("GEMMs, and those in FP8", *(f"{len(one.products)}, {one.fp8_products}" for one in each)),
        ("collectives", *(str(len(one.messages)) for one in each)),
        ("MB sent to other ranks", *(f"{one.sent_bytes / 1e6:,.1f}" for one in each)),
        ("MB saved for the backward", *(f"{one.kept_bytes / 1e6:,.1f}" for one in each)),
        ("MB of parameters", *(f"{one.parameter_bytes / 1e6:,.1f}" for one in each)),
        ("minimum ms of the GEMMs", *(f"{one.product_seconds * 1e3:.2f}" for one in each)),
        ("minimum ms of communication", *(f"{one.message_seconds * 1e3:.2f}" for one in each)),
    )
    sent = [
        (name, op, dtype, str(count), str(times), f"{size / 1e6:,.1f}")
        for name, one in found.items()
        for (op, dtype, count), (times, size) in one.sent.items()
    ]
    bound = (
        "from published peak rates: lower bounds, not measurements; GEMMs and communication do not overlap, and "
        "other kernels are not included"
    )
    return [
        Section(
            title=f"one rank of {ranks}, {first.gpu}",
            lines=(bound,),
            columns=("", *found),
            rows=rows,
            loud=frozenset({1}) if first.problem else frozenset(),
            numbers=tuple(range(1, 1 + len(each))),
        ),
        Section(
            title="what it sends",
            columns=("", "collective", "dtype", "ranks", "times", "MB to others"),
            rows=tuple(sent),
            numbers=(3, 4, 5),
        ),
    ]
