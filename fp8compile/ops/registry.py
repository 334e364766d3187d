"""register_op: register an operator with schema, kernel, derivative, decomposition and samples.

The five arguments in `ARGUMENTS` must be given; all but ``samples`` may be None. If one is left out by mistake,
register_op raises and says what to write. Samples of this package's own ops are in `fp8compile.testing.samples`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import keyword
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args

import torch

from fp8compile import _compat, inductor
from fp8compile._compat import OpOverload
from fp8compile.ops.by_launch import by_launch
from fp8compile.ops.sharding_rules import Sharding
from fp8compile.quantizers.constant import Constant, salt_with
from fp8compile.target import target_of

__all__ = ["OPS", "Op", "decompositions", "for_every_op", "register_kernel_op", "register_op"]

Samples = Callable[[], Iterable[tuple[Any, ...]]]


class _Missing(Enum):
    ARGUMENT = "left out"


MISSING = _Missing.ARGUMENT
OURS = "fp8compile::"  # the namespace of this package's ops

# for each argument, what to write if it was left out; for error messages
ARGUMENTS = {
    "fake": "a function of impl's arguments that returns empty tensors like impl's result, or fake=None to run "
    "impl itself on fake tensors (for PyTorch code that reads no values)",
    "backward": "a function (ctx, *grads) that returns a gradient or None for each argument, or backward=None if "
    "the op has no derivative (a backward pass that reaches it raises an error)",
    "decompose": "a function of impl's arguments in plain PyTorch, which Inductor compiles and fuses instead of "
    "the op, or decompose=None to keep the op as one call in compiled code",
    "sharding": "a function of impl's arguments that returns the ways to shard them, fp8compile.library.Split "
    "values, or sharding=None if the op requires full tensors",
    "samples": "a function that returns tuples of arguments for tests, including odd shapes and layouts",
}
WITH_BACKWARD = {
    "updates": "updates but no backward, which would compute them",
    "setup_context": "a setup_context but no backward",
}
SETUP_CONTEXT = "a function (ctx, inputs, output) that saves what backward needs, with ctx.save_for_backward"


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operator that `register_op` registered.

    Attributes:
        name: ``namespace::name``.
        overload: The PyTorch operator to call; graphs contain it.
        impl: The eager kernel.
        fake: The function that tracing runs; ``impl`` if none was given.
        backward: The derivative, or None.
        decompose: The code that Inductor compiles instead of the op, or None.
        portable: The code that replaces the op in an exported program, or a string with the reason why there is none.
            None: ``decompose`` replaces the op, or ``impl`` if ``decompose`` is None.
        sharding: The sharding rule, or None.
        samples: Returns argument tuples for tests; None for ops of this package.
        updates: Names of the arguments that the backward writes to; they do not have gradients.
    """

    name: str
    overload: OpOverload
    impl: Callable[..., Any]
    fake: Callable[..., Any]
    backward: Callable[..., Any] | None
    decompose: Callable[..., Any] | None
    sharding: Sharding | None
    samples: Samples | None
    updates: tuple[str, ...] = ()
    portable: Callable[..., Any] | str | None = None


OPS: dict[str, Op] = {}
LISTENERS: list[Callable[[Op], None]] = []  # called with each op that is registered
LIBRARIES: dict[str, torch.library.Library] = {}  # kept, because a library that is collected removes its operators


def _library(namespace: str) -> torch.library.Library:
    if namespace not in LIBRARIES:
        LIBRARIES[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return LIBRARIES[namespace]


def _check_name(name: str) -> None:
    namespace, _, op_name = name.partition("::")
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in (namespace, op_name)):
        raise ValueError(f"register_op: the name of an operator must have the form 'namespace::name', got {name!r}.")
    if name in OPS:
        raise ValueError(f"register_op: {name} is already registered. Choose another name.")


def _check_known(name: str, unknown: Iterable[str]) -> None:
    for argument in unknown:
        close = difflib.get_close_matches(argument, [*ARGUMENTS, "setup_context"], n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise TypeError(
            f"register_op: {name}: unknown {argument}; allowed are {', '.join(ARGUMENTS)}, setup_context.{hint}"
        )


def _check_given(name: str, given: dict[str, Any]) -> None:
    if given["samples"] is MISSING and name.startswith(OURS):
        given["samples"] = None
    if missing := [argument for argument in ARGUMENTS if given[argument] is MISSING]:
        lines = "".join(f" Write {argument}= {ARGUMENTS[argument]}." for argument in missing)
        raise TypeError(f"register_op: {name} lacks {', '.join(missing)}.{lines}")
    for argument, what in ARGUMENTS.items():
        value = given[argument]
        if not callable(value) and (value is not None or (argument == "samples" and not name.startswith(OURS))):
            raise TypeError(f"register_op: {name}: `{argument}` is {value!r}; it must be {what}.")
    if given["backward"] is not None and given["setup_context"] is None:
        raise TypeError(
            f"register_op: {name} has a backward, but no setup_context. Write setup_context= {SETUP_CONTEXT}."
        )
    for argument, what in WITH_BACKWARD.items():
        if given["backward"] is None and given[argument]:
            raise TypeError(f"register_op: {name} has {what}. Pass backward= {ARGUMENTS['backward']}.")


def _check_signatures(name: str, impl: Callable[..., Any], given: dict[str, Any]) -> None:
    if not inspect.isfunction(impl):
        raise TypeError(
            f"register_op: {name}: `impl` must be a function, whose annotations are the schema, got {impl!r}."
        )
    parameters = inspect.signature(impl).parameters
    named = [parameter.name for parameter in parameters.values() if parameter.kind is parameter.KEYWORD_ONLY]
    if named:
        raise TypeError(
            f"register_op: {name}: impl has the keyword-only parameters {', '.join(named)}, but all arguments "
            "of an operator must be positional. Remove the * before them."
        )
    if unknown := [each for each in given["updates"] if each not in parameters]:
        raise TypeError(
            f"register_op: {name}: `updates` must name parameters, {', '.join(parameters)}, got {', '.join(unknown)}."
        )
    for argument in ("fake", "decompose", "sharding"):
        if given[argument] is None:
            continue
        try:
            signature = inspect.signature(given[argument])
        except ValueError:
            continue  # some builtins have no signature
        try:
            signature.bind(*parameters)
        except TypeError as error:
            raise TypeError(
                f"register_op: {name}: `{argument}` has the signature {signature}, but impl has "
                f"({', '.join(parameters)}): {error}. Give both the same parameters."
            ) from None


def _schema(name: str, impl: Callable[..., Any]) -> str:
    try:
        return torch.library.infer_schema(impl, mutates_args=())
    except ValueError as error:
        raise ValueError(
            f"register_op: {name}: PyTorch can't derive a schema from impl's signature. Annotate every parameter "
            "and the result (Tensor, int, float, bool, str, torch.dtype, a quantizer's class, fp8compile.Recipe). "
            f"PyTorch's error: {error}"
        ) from None


def _check_salted(name: str, impl: Callable[..., Any]) -> None:
    """Raise a TypeError if no argument of the op's kernel ``impl`` is a `Constant`, such as a quantizer.

    A constant's text carries a hash of the sources. Without the hash, compile caches would return code of older
    sources.
    """
    hints = inspect.get_annotations(impl, eval_str=True)
    types = [part for hint in hints.values() for part in (hint, *get_args(hint))]  # finds Recipe in `Recipe | None`
    if not any(isinstance(part, type) and issubclass(part, Constant) for part in types):
        raise TypeError(
            f"register_op: {name} has a decompose or a backward, which become part of compiled code, but no "
            "argument that is a quantizer or recipe. PyTorch's compile cache identifies an op only by its name, so "
            "it would run code of an older version; a constant adds a hash of your source to the key. Give impl an "
            "argument annotated as fp8compile.Quantizer or another constant, or pass decompose=None, backward=None."
        )


def register_op(
    name: str,
    impl: Callable[..., Any],
    *,
    fake: Callable[..., Any] | _Missing | None = MISSING,
    backward: Callable[..., Any] | _Missing | None = MISSING,
    decompose: Callable[..., Any] | _Missing | None = MISSING,
    sharding: Sharding | _Missing | None = MISSING,
    samples: Samples | _Missing = MISSING,
    setup_context: Callable[..., Any] | None = None,
    prepare: Callable[..., Any] | None = None,
    updates: tuple[str, ...] = (),
    portable: Callable[..., Any] | str | None = None,
    **unknown: Any,
) -> OpOverload:
    """Register an operator that works with torch.compile, Inductor and autograd.

    The arguments ``fake``, ``backward``, ``decompose``, ``sharding`` and ``samples`` are required; all of them except
    ``samples`` may be None.

    Args:
        name: ``namespace::name``.
        impl: The kernel for all devices. The schema is inferred from its annotated signature; a quantizer or recipe
            may be an argument. The kernel must not return an input or a view of an input.
        fake: Takes the same arguments and returns empty tensors like those of the result. None runs ``impl`` itself on
            fake tensors, which works for PyTorch code that does not read values; a function that only computes shapes
            traces faster.
        backward: ``(ctx, *grads)``. Returns a gradient or None for each argument. ``ctx.needs_input_grad`` has one
            entry for each argument. None: the op is not differentiable, and a backward pass that reaches it raises an
            error.
        decompose: Takes the same arguments; Inductor compiles it instead of the op. It may return ``NotImplemented``,
            for some arguments or for a target device (`target_of`), to keep the op as one call. None: the op always
            stays one call.
        sharding: Takes the same arguments, reads only their shapes, and returns ``Split`` values. None: the op needs
            full tensors.
        samples: Returns argument tuples that cover the op, for tests.
        setup_context: ``(ctx, inputs, output)``. Saves what ``backward`` needs; required if and only if ``backward``
            is given.
        prepare: ``(needs_input_grad, args)``. If gradients are recorded, returns the arguments with which ``impl`` or
            ``decompose`` runs; it can replace a constant with one that skips the work for gradients that are not
            needed.
        updates: Names of arguments that ``backward`` writes to, such as a state. ``backward`` returns None for these
            arguments, and writes to no other argument.
        portable: Takes the same arguments. Plain PyTorch code for any device that does not read data and does not call
            your kernels. `decompositions` uses it instead of the op if ``decompose`` and ``impl`` can't be used. If
            there is no such code, a string with the reason, which `decompositions` raises.
        unknown: Not allowed; the error for a misspelled name suggests the right one.

    Returns:
        The operator.

    Raises:
        TypeError: An argument is missing, is unknown, is not a function, or takes other arguments than ``impl``;
            ``backward`` is given without ``setup_context``, or ``setup_context`` or ``updates`` without ``backward``;
            or the op's compiled code would not be part of the key of compile caches.
        ValueError: The name is not ``namespace::name`` or is taken, or ``impl`` isn't annotated.
    """
    _check_name(name)
    _check_known(name, unknown)
    given: dict[str, Any] = {
        "fake": fake,
        "backward": backward,
        "decompose": decompose,
        "sharding": sharding,
        "samples": samples,
        "setup_context": setup_context,
        "updates": updates,
    }
    _check_given(name, given)
    _check_signatures(name, impl, given)
    schema = _schema(name, impl)
    compiled = decompose is not None or backward is not None
    if compiled:
        _check_salted(name, impl)

    namespace, op_name = name.split("::")
    if hasattr(getattr(torch.ops, namespace), op_name):
        raise ValueError(f"register_op: {name} is already an operator of another library. Choose another name.")
    lib = _library(namespace)
    lib.define(op_name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    lib.impl(op_name, _compat.as_kernel(impl), "CompositeExplicitAutograd")
    torch.library.register_fake(name, given["fake"] or impl, lib=lib)
    overload = getattr(getattr(torch.ops, namespace), op_name).default
    _compat.impl_autograd(
        lib, overload, setup_context, given["backward"] or _no_backward(name), _no_jvp(name), prepare
    )
    _compat.loop_under_vmap(lib, overload)
    if decompose is not None:
        inductor.register_decomposition(overload, given["decompose"])
    if compiled:
        salt_with(impl.__module__)
    del given["setup_context"]  # autograd has it
    given["fake"] = given["fake"] or impl
    op = OPS[name] = Op(name=name, overload=overload, impl=impl, portable=portable, **given)
    for listener in LISTENERS:
        listener(op)
    return overload


def _no_backward(name: str) -> Callable[..., Any]:
    """Return the derivative of an op that has none: a function that raises."""

    def backward(ctx: Any, *grads: Any) -> Any:
        if not name.startswith(OURS):
            raise RuntimeError(f"{name} has no derivative: it was registered with backward=None. Detach its inputs.")
        raise RuntimeError(
            f"{name} has no derivative. Among the ops with GEMMs, only fp8compile::linear and delayed_linear are "
            "differentiable, and only once. Compute second derivatives with the unconverted model (fp8compile.revert)."
        )

    return backward


def _no_jvp(name: str) -> Callable[..., Any]:
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(
            f"{name} has no forward-mode derivative. Use reverse mode, or the unconverted model (fp8compile.revert)."
        )

    return jvp


def register_kernel_op(
    name: str,
    steps: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    launch: Callable[..., Any],
    sharding: Sharding | None = None,
) -> OpOverload:
    """Register an op without derivative that is one kernel on a GPU.

    ``fake`` makes empty results; for ``launch`` see `fp8compile.ops.by_launch`. ``steps``, plain PyTorch with the same
    arguments, replaces the op on a CPU and in exported programs.
    """

    @functools.wraps(steps)
    def decompose(*args: Any) -> Any:
        return steps(*args) if target_of(args[0].device).type == "cpu" else NotImplemented

    op = register_op(
        name,
        by_launch(steps, fake=fake, launch=launch),
        fake=fake,
        backward=None,
        decompose=decompose,
        portable=steps,
        sharding=sharding,
    )
    inductor.register_launch(op, launch)
    return op


def for_every_op(listener: Callable[[Op], None]) -> None:
    """Call ``listener`` with each op that is registered already or will be registered later."""
    LISTENERS.append(listener)
    for op in OPS.values():
        listener(op)


def _portable(op: Op) -> Callable[..., Any]:
    """Return the function that replaces an op in an exported program; it raises if the op can't be replaced."""
    if callable(op.portable):
        return op.portable

    @functools.wraps(op.impl)
    def taken_apart(*args: Any) -> Any:
        found = NotImplemented if op.portable is not None else (op.decompose or op.impl)(*args)
        if found is NotImplemented:
            why = op.portable or (
                "neither decompose nor portable supports these arguments on their device. Register portable= code "
                "that does, or load the program where this operator is installed, without decompositions"
            )
            raise RuntimeError(f"decompositions: {op.name} can't be decomposed: {why}.")
        return found

    return taken_apart


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Map every registered operator to a function of PyTorch's operators, for ``run_decompositions``.

    An ``ExportedProgram`` decomposed by this map runs, and is saved and loaded, without this package. Some operators
    can't be decomposed: messages of expert parallelism, kernels for groups of rows on a GPU, and products over the
    tokens of groups, which only backwards have. ``run_decompositions`` then raises a RuntimeError. Experts run one
    after the other over all rows, because an exported program can't read how many rows each expert has.
    """
    return {op.overload: _portable(op) for op in OPS.values()}


def _refuse_to_save(target: object) -> None:
    """Raise a RuntimeError if a program that is saved calls an op of ``OPS``, which who loads it may not know."""
    if isinstance(target, OpOverload) and target._schema.name in OPS:
        raise RuntimeError(
            f"torch.export.save: the program calls {target._schema.name}, whose recipe PyTorch's files can't store, "
            "so the file could not be loaded. Create the program with fp8compile.export.program(model, args), or "
            "call program.run_decompositions(fp8compile.ops.decompositions()) first: the program then has only "
            "PyTorch operators, and its results are bit-identical."
        )


_compat.when_program_is_saved(_refuse_to_save)
