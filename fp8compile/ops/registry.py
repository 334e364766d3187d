"""register_op: register an operator with schema, kernel, derivative, decomposition and samples.

The five arguments in `ARGUMENTS` must be given; all but ``samples`` may be None. If one is left out by mistake,
register_op raises and says what to write.
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
from fp8compile.ops.sharding_rules import Sharding
from fp8compile.quantizers.constant import Constant, salt_with
from fp8compile.target import target_of

__all__ = ["OPS", "Op", "decompositions", "for_every_op", "register_kernel_op", "register_op"]

Samples = Callable[[], Iterable[tuple[Any, ...]]]


class _Missing(Enum):
    ARGUMENT = "left out"


MISSING = _Missing.ARGUMENT

# for each argument, what to write if it was left out; for error messages
ARGUMENTS = {
    "fake": "a function of impl's arguments that returns empty tensors like impl's result, or fake=None to let impl "
    "itself run on tensors without data (PyTorch code that reads no value can)",
    "backward": "a function (ctx, *grads) that returns a gradient or None for each argument, or backward=None if the "
    "op has no derivative: a backward pass that reaches it then raises",
    "decompose": "a function of impl's arguments in plain PyTorch, which Inductor compiles and fuses in place of the "
    "op, or decompose=None to keep the op as one call in compiled code",
    "sharding": "a function of impl's arguments that returns the ways to cut them, fp8compile.library.Split values, "
    "or sharding=None if the op needs whole tensors",
    "samples": "a function that returns tuples of arguments for tests, odd shapes and layouts among them",
}
WITH_BACKWARD = {
    "updates": "updates and no backward, which would make them",
    "setup_context": "a setup_context and no backward",
}
SETUP_CONTEXT = "a function (ctx, inputs, output) that keeps what backward needs, by ctx.save_for_backward"


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operator that `register_op` registered.

    Attributes:
        name: ``namespace::name``.
        overload: The PyTorch operator to call; graphs contain it.
        impl: The eager kernel.
        fake: The function that tracing runs; ``impl`` if none was given.
        backward: The derivative, or None.
        decompose: The code that Inductor compiles in place of the op, or None.
        portable: The code that replaces the op in an exported program, or a text that says why there is none. None:
            ``decompose`` replaces the op, or ``impl`` if ``decompose`` is None.
        sharding: The sharding rule, or None.
        samples: Returns argument tuples for tests.
        updates: Names of the arguments that the backward writes to; they have no gradient.
    """

    name: str
    overload: torch._ops.OpOverload
    impl: Callable[..., Any]
    fake: Callable[..., Any]
    backward: Callable[..., Any] | None
    decompose: Callable[..., Any] | None
    sharding: Sharding | None
    samples: Samples
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
        raise ValueError(f"register_op: {name!r} is no operator name; write 'namespace::name'.")
    if name in OPS:
        raise ValueError(f"register_op: {name} is registered already; choose another name.")


def _check_known(name: str, unknown: Iterable[str]) -> None:
    for argument in unknown:
        close = difflib.get_close_matches(argument, [*ARGUMENTS, "setup_context"], n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise TypeError(
            f"register_op: {name} is given {argument}; it takes {', '.join(ARGUMENTS)}, setup_context.{hint}"
        )


def _check_given(name: str, given: dict[str, Any]) -> None:
    if missing := [argument for argument in ARGUMENTS if given[argument] is MISSING]:
        lines = "".join(f" Write {argument}= {ARGUMENTS[argument]}." for argument in missing)
        raise TypeError(f"register_op: {name} is registered without {', '.join(missing)}.{lines}")
    for argument, what in ARGUMENTS.items():
        value = given[argument]
        if not callable(value) and (value is not None or argument == "samples"):
            raise TypeError(f"register_op: {name}: {argument} is {value!r}; it is {what}.")
    if given["backward"] is not None and given["setup_context"] is None:
        raise TypeError(
            f"register_op: {name} has a backward and no setup_context. Write setup_context= {SETUP_CONTEXT}."
        )
    for argument, what in WITH_BACKWARD.items():
        if given["backward"] is None and given[argument]:
            raise TypeError(f"register_op: {name} has {what}. Write backward= {ARGUMENTS['backward']}.")


def _check_signatures(name: str, impl: Callable[..., Any], given: dict[str, Any]) -> None:
    if not inspect.isfunction(impl):
        raise TypeError(f"register_op: {name}: impl is {impl!r}; it is a function, whose annotations are the schema.")
    parameters = inspect.signature(impl).parameters
    named = [parameter.name for parameter in parameters.values() if parameter.kind is parameter.KEYWORD_ONLY]
    if named:
        raise TypeError(
            f"register_op: {name}: impl takes {', '.join(named)} by name only; an operator takes all by place."
        )
    if unknown := [each for each in given["updates"] if each not in parameters]:
        raise TypeError(
            f"register_op: {name}: updates names {', '.join(unknown)}; impl's arguments are {', '.join(parameters)}."
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
                f"register_op: {name}: {argument} takes {signature} and impl ({', '.join(parameters)}): {error}. Give "
                "both the same arguments."
            ) from None


def _schema(name: str, impl: Callable[..., Any]) -> str:
    try:
        return torch.library.infer_schema(impl, mutates_args=())
    except ValueError as error:
        raise ValueError(
            f"register_op: {name}: no schema can be made of impl's signature. Annotate every argument and the result "
            f"(Tensor, int, float, bool, str, torch.dtype, a quantizer's class, fp8compile.Recipe). PyTorch says: "
            f"{error}"
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
            f"register_op: {name} has a decompose or a backward, which end up in compiled code, and takes no "
            "quantizer or recipe. PyTorch's compile cache knows an op by its name only and would run the code of an "
            "older version of it; the constant's text carries a hash of your source into the key. Give impl an "
            "argument annotated as fp8compile.Quantizer or another constant, or write decompose=None, backward=None."
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
) -> torch._ops.OpOverload:
    """Register an operator that works with torch.compile, Inductor and autograd.

    The arguments ``fake``, ``backward``, ``decompose``, ``sharding`` and ``samples`` must be given; all of them but
    ``samples`` may be None.

    Args:
        name: ``namespace::name``.
        impl: The kernel for all devices. Its annotated signature gives the schema; a quantizer or recipe may be an
            argument. The kernel must not return an input or a view of an input.
        fake: Takes the same arguments and returns empty tensors like those of the result. None: ``impl`` itself runs
            on tensors without data, which works for PyTorch code that reads no value; a function that only computes
            shapes traces faster.
        backward: ``(ctx, *grads)``. Returns a gradient or None for each argument. ``ctx.needs_input_grad`` has one
            entry for each argument. None: the op has no derivative, and a backward pass that reaches it raises.
        decompose: Takes the same arguments; Inductor compiles it in place of the op. It may return
            ``NotImplemented``, for some arguments or for a target device (`target_of`), to keep the op as one call.
            None: the op always stays one call.
        sharding: Takes the same arguments, reads only their shapes, and returns ``Split`` values. None: the op needs
            whole tensors.
        samples: Returns argument tuples that cover the op, for tests.
        setup_context: ``(ctx, inputs, output)``. Saves what ``backward`` needs; to be given if and only if
            ``backward`` is.
        prepare: ``(needs_input_grad, args)``. If gradients are recorded, returns the arguments with which ``impl`` or
            ``decompose`` runs; it can replace a constant by another one that omits work for gradients that are not
            needed.
        updates: Names of arguments that ``backward`` writes to, such as a state. ``backward`` returns None for these
            arguments, and writes to no other argument.
        portable: Takes the same arguments; plain PyTorch for any device that reads no data and calls none of your
            kernels. `decompositions` puts it in place of the op, if ``decompose`` and ``impl`` can't be used. If there
            is no such code, a text with the reason, which `decompositions` raises.
        unknown: No other argument is allowed; the error for a misspelled name suggests the right one.

    Returns:
        The operator.

    Raises:
        TypeError: An argument is left out, is unknown, is not a function, or takes other arguments than ``impl``;
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
        raise ValueError(f"register_op: {name} is an operator of another library; choose another name.")
    lib = _library(namespace)
    lib.define(op_name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    lib.impl(op_name, _compat.as_kernel(impl), "CompositeExplicitAutograd")
    torch.library.register_fake(name, given["fake"] or impl, lib=lib)
    overload = getattr(getattr(torch.ops, namespace), op_name).default
    _compat.impl_autograd(lib, overload, setup_context, given["backward"], prepare)
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


def register_kernel_op(
    name: str,
    impl: Callable[..., Any],
    steps: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    samples: Samples,
    sharding: Sharding | None = None,
) -> torch._ops.OpOverload:
    """Register an op without derivative that is one kernel on a GPU.

    ``impl`` is the kernel for all devices and ``fake`` makes empty results. ``steps``, plain PyTorch with the same
    arguments, replaces the op in compiled code for a CPU and in exported programs.
    """

    @functools.wraps(steps)
    def decompose(*args: Any) -> Any:
        return steps(*args) if target_of(args[0].device).type == "cpu" else NotImplemented

    return register_op(
        name,
        impl,
        fake=fake,
        backward=None,
        decompose=decompose,
        portable=steps,
        sharding=sharding,
        samples=samples,
    )


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
            why = op.portable or f"its decomposition is for other arguments or another device than {_device(args)}"
            raise RuntimeError(f"decompositions: {op.name} can't be taken apart into operators of PyTorch: {why}.")
        return found

    return taken_apart


def _device(args: Iterable[Any]) -> str:
    return next((str(each.device) for each in args if isinstance(each, torch.Tensor)), "this one")


def decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Map every registered operator to a function of PyTorch's operators, for ``run_decompositions``.

    An ``ExportedProgram`` decomposed by this map runs, and is saved and loaded, without this package. Some operators
    can't be decomposed: messages of expert parallelism, kernels for groups of rows on a GPU, and products over the
    tokens of groups, which only backwards have. ``run_decompositions`` then raises a RuntimeError. Experts run one
    after the other over all rows, because an exported program can't read how many rows each expert has.
    """
    return {op.overload: _portable(op) for op in OPS.values()}


def _refuse_to_save(target: object) -> None:
    """Raise a RuntimeError if an exported program that is being saved calls an op of ``OPS``.

    A process that loads the program may not know the op.
    """
    if isinstance(target, torch._ops.OpOverload) and target._schema.name in OPS:
        raise RuntimeError(
            f"torch.export.save: the program calls {target._schema.name}, and the file would load nowhere: the "
            "operator takes a recipe, which PyTorch's files can't hold. Make the program by "
            "fp8compile.export.program(model, args), or call program.run_decompositions("
            "fp8compile.ops.decompositions()) first: it then has only PyTorch's operators, and the same bits."
        )


_compat.when_program_is_saved(_refuse_to_save)
