"""register_op: one call that makes a PyTorch operator, from schema to samples.

What it takes, and what each part is for:

    impl        Python, for CPU and CUDA alike; its annotations are the schema
    fake        shapes, dtypes and strides of the result, for tracing; None: impl is run on tensors without data
    backward    derivative; None: a backward pass that reaches the op raises
    decompose   what Inductor sees in place of the op, so that it fuses; None: the op stays as it is
    portable    what a program that leaves this package has in place of it, if that is neither of decompose and impl
    sharding    how the op runs on shards; None: on whole tensors only
    samples     inputs that the tests run the op on

Each is to be given, None too: what is left out by mistake raises, and says what to write.
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
from fp8compile.ops.sharding import Sharding
from fp8compile.quantizers.constant import Constant, salt_with
from fp8compile.target import target_of

__all__ = ["OPS", "Op", "decompositions", "for_every_op", "in_steps_on_cpu", "register_op"]

Samples = Callable[[], Iterable[tuple[Any, ...]]]


class _Missing(Enum):
    ARGUMENT = "left out"


MISSING = _Missing.ARGUMENT

# what to write for an argument that was left out
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
SETUP_CONTEXT = "a function (ctx, inputs, output) that keeps what backward needs, by ctx.save_for_backward"


@dataclass(frozen=True, kw_only=True)
class Op:
    """A registered operator, as `register_op` made it.

    Attributes:
        name: ``namespace::name``.
        overload: What to call, and what stands in graphs.
        impl: The eager kernel.
        fake: What tracing runs; ``impl`` where it was derived.
        backward: The derivative, or None.
        decompose: What Inductor sees, or None.
        portable: What an exported program has, or why there is nothing; None: what Inductor sees, or ``impl``.
        sharding: The sharding rule, or None.
        samples: Argument tuples for tests.
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
LISTENERS: list[Callable[[Op], None]] = []  # told of each op that is registered
LIBRARIES: dict[str, torch.library.Library] = {}  # a library that is collected takes its operators with it


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
    if given["backward"] is None and given["updates"]:
        raise TypeError(
            f"register_op: {name} has updates and no backward, which would make them. Write backward= "
            f"{ARGUMENTS['backward']}."
        )
    if given["backward"] is None and given["setup_context"] is not None:
        raise TypeError(
            f"register_op: {name} has a setup_context and no backward. Write backward= {ARGUMENTS['backward']}."
        )


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
            continue  # a builtin tells none
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
    """What compiled code contains of an op has to be in the key of the compile cache; constants carry it there."""
    hints = inspect.get_annotations(impl, eval_str=True)
    types = [part for hint in hints.values() for part in (hint, *get_args(hint))]  # of `Recipe | None` too
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
    """Make an operator that torch.compile, Inductor and autograd know.

    All of ``fake``, ``backward``, ``decompose``, ``sharding`` and ``samples`` have to be given; None where it says so.

    Args:
        name: ``namespace::name``.
        impl: The kernel for all devices. Its annotated signature gives the schema; a quantizer or recipe may be an
            argument. It must not return an input or a view of one.
        fake: Same arguments; returns empty tensors like the result's. None: impl itself is run on tensors without
            data, which PyTorch code that reads no value allows; a function that only says shapes traces faster.
        backward: ``(ctx, *grads)``; a gradient or None for each argument. ``ctx.needs_input_grad`` has one entry an
            argument. None: no derivative, a backward pass raises.
        decompose: Same arguments; what Inductor compiles in place of the op. None: the op stays one call. It returns
            ``NotImplemented`` where that depends on the arguments or on `target_of` their device.
        sharding: Same arguments; returns ``Split`` values, from shapes alone. None: the op needs whole tensors.
        samples: Returns argument tuples that cover the op, for the tests.
        setup_context: ``(ctx, inputs, output)``; keeps what ``backward`` needs, and is given exactly with it.
        prepare: ``(needs_input_grad, args)``; the arguments with which ``impl`` or ``decompose`` runs where gradients
            are recorded, such as a constant that leaves out what only a gradient needs that nobody asks for.
        updates: Names of arguments that ``backward`` writes to, such as a state that it carries on. It returns None
            for them; whatever else it does, it does to no argument.
        portable: Same arguments; plain PyTorch that reads no data and calls no kernel of yours, on any device: what
            `decompositions` puts in the op's place, where ``decompose`` and ``impl`` can't be. A text says why there
            is none, and is raised.
        unknown: None is taken; a misspelled name is told which one it may be.

    Returns:
        The operator.

    Raises:
        TypeError: An argument is left out, unknown, no function, or takes others than ``impl``; or what is compiled
            of the op would not be part of a cache's key.
        ValueError: The name has no namespace or is taken, or ``impl`` isn't annotated.
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

    namespace, _, op_name = name.partition("::")
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
    op = OPS[name] = Op(
        name=name,
        overload=overload,
        impl=impl,
        fake=given["fake"] or impl,
        backward=given["backward"],
        decompose=given["decompose"],
        sharding=given["sharding"],
        samples=given["samples"],
        updates=updates,
        portable=portable,
    )
    for listener in LISTENERS:
        listener(op)
    return overload


def in_steps_on_cpu(steps: Callable[..., Any]) -> Callable[..., Any]:
    """The decomposition of an op that is one kernel on a GPU, and there stays one call: its steps on a CPU.

    Args:
        steps: The op's computation, a function of the same arguments.
    """

    @functools.wraps(steps)
    def decompose(*args: Any) -> Any:
        return steps(*args) if target_of(args[0].device).type == "cpu" else NotImplemented

    return decompose


def for_every_op(listener: Callable[[Op], None]) -> None:
    """Call ``listener`` with each registered op, and later with each op that is registered."""
    LISTENERS.append(listener)
    for op in OPS.values():
        listener(op)


def _portable(op: Op) -> Callable[..., Any]:
    """The function that replaces an op in a program that leaves this package; raises if there is none."""
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
    """Every registered operator in terms of PyTorch's own, as ``ExportedProgram.run_decompositions`` takes it.

    What is left of a program then runs, and is saved and loaded, without this package. What can't be said in PyTorch's
    operators raises a RuntimeError there, and stays in no program: messages of expert parallelism, kernels for groups
    of rows on a GPU, and products over the tokens of groups, which backwards have. Experts run one after the other
    over all rows, since a program does not read how many rows each has.
    """
    return {op.overload: _portable(op) for op in OPS.values()}
