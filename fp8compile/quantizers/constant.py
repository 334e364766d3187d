"""Immutable values that torch.compile takes for constants of the graph: the base of quantizers and recipes.

What `__fx_repr__` returns ends up in the source of every graph, hence in the key of every compile cache. AOTAutograd's
key contains neither decompositions nor anything else that we compile an op to, so a changed rule would meet code that
an older version of it left on disk. The salt in the repr, a hash over the sources that decide, turns that into a miss.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import inspect
import math
import re
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import Field, fields
from functools import cache
from typing import Any, ClassVar

import torch

from fp8compile import _compat
from fp8compile.quantizers.declaration import check_class, check_decorated, field_types, fits

__all__ = ["Constant", "salt_with", "source_salt"]

PACKAGE = __name__.partition(".")[0]
# the last two take ops apart between the key and the code
SALTED = ("formats.py", "target.py", "_compat", "inductor", "quantizers", "ops", "kernels", "tensor", "parallel")
NAMED: Counter[str] = Counter()  # classes that have asked for a name in graphs
SALTED_MODULES: set[str] = set()  # other packages whose ops or GEMMs are compiled into graphs
SALTED_NAMES: set[str] = set()  # what these have registered, as far as no graph names it
ALLOWED_FIELD_TYPES = (str, int, float, bool, type(None))


def _python_files(roots: list[Any]) -> list[Any]:
    """Python files at and under these paths, in the same order on every machine."""
    found, pending = [], list(roots)
    while pending:
        entry = pending.pop()
        if entry.is_dir():
            pending += entry.iterdir()
        elif entry.name.endswith(".py"):
            found.append(entry)
    return sorted(found, key=str)


@cache
def _package_hash() -> bytes:
    digest = hashlib.sha256()
    package = importlib.resources.files(PACKAGE)
    for file in _python_files([package.joinpath(name) for name in SALTED]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.digest()


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] not in (PACKAGE, "torch", "builtins")


def _foreign_source(module_name: str) -> bytes:
    """All source that code of a foreign module may call: its whole package's, or the module's if it stands alone.

    What was typed at a prompt has no source that can be found again; a number of this process's own stands for it, so
    that its graphs miss the cache instead of meeting somebody else's.
    """
    top = sys.modules.get(module_name.partition(".")[0])
    if top is not None and getattr(top, "__path__", None):
        return b"".join(file.read_bytes() for file in _python_files([importlib.resources.files(top)]))
    module = sys.modules.get(module_name)
    if module is not None and getattr(module, "__file__", None):
        return inspect.getsource(module).encode()
    return uuid.uuid4().bytes


def salt_with(module_name: str, function: str = "") -> None:
    """Add a module's source to every salt from now on, because a graph may contain code of its ops.

    An op has no text of its own in a cache's key, so the constants that graphs hold beside it carry its source there.

    Args:
        module_name: The module.
        function: What of it was registered, where graphs do not name it: that it was is then part of every salt, too.
    """
    if function:
        SALTED_NAMES.add(f"{function} {uuid.uuid4()}" if "<locals>" in function else function)
    if _is_foreign(module_name):
        SALTED_MODULES.add(module_name)
    source_salt.cache_clear()


@cache
def source_salt(cls: type[Any]) -> str:
    """Eight hex digits that change when the package's rules or the source of a foreign class or op change."""
    digest = hashlib.sha256(_package_hash())
    modules = [base.__module__ for base in cls.__mro__ if _is_foreign(base.__module__)]
    for module in [*modules, *sorted(SALTED_MODULES)]:
        digest.update(_foreign_source(module))
    digest.update("\0".join(sorted(SALTED_NAMES)).encode())
    if "<locals>" in cls.__qualname__:
        digest.update(uuid.uuid4().bytes)  # its source does not tell what it closes over
    return digest.hexdigest()[:8]


@cache
def _global_name(cls: type[Any]) -> str:
    """The name of a class in a graph's globals; no two classes share one.

    FX keeps the first of two globals of one name and lets the other's users have it. A function that defines a class
    makes another one of the same name in each call.
    """
    name = re.sub(r"\W", "_", f"{cls.__module__}.{cls.__qualname__}")
    NAMED[name] += 1
    return name if NAMED[name] == 1 else f"{name}_{NAMED[name]}"


def _expression(value: Any, names: dict[str, type[Any]]) -> str:
    if isinstance(value, Constant):
        cls = type(value)
        names[_global_name(cls)] = cls  # type: ignore[arg-type]  # classes are hashable
        arguments = [f"{f.name}={_expression(getattr(value, f.name), names)}" for f in fields(value)]
        salt = source_salt(cls) + _compat.rank_salt()  # type: ignore[arg-type]  # classes are hashable
        name = _global_name(cls)  # type: ignore[arg-type]  # classes are hashable
        return f"{name}.from_graph({', '.join([repr(salt), *arguments])})"
    if isinstance(value, tuple):
        return "(" + "".join(_expression(v, names) + ", " for v in value) + ")"
    return repr(value)


def _check_field(owner: str, name: str, value: Any) -> None:
    for part in value if isinstance(value, tuple) else (value,):
        if isinstance(part, float) and not math.isfinite(part):
            raise ValueError(f"{owner}: field {name} is {part}; it has to be finite.")
        # a subclass of float, such as numpy's, or of str, such as an enum's, prints as code that a graph can't run
        if type(part) not in ALLOWED_FIELD_TYPES and not isinstance(part, Constant):
            raise TypeError(
                f"{owner}: field {name} holds a {type(part).__name__}; a constant of a graph holds str, int, float, "
                "bool, None, tuples of them, quantizers, and never a tensor, a dtype, a list or a process group. "
                "Name a dtype by a string; what changes from step to step belongs into a module's buffers."
            )


@cache
def _foreign_types(cls: type[Any]) -> dict[str, Any]:
    """Types of the fields that classes of other packages declare; our own classes check their fields themselves."""
    declared = {name for base in cls.__mro__ if _is_foreign(base.__module__) for name in inspect.get_annotations(base)}
    types = field_types(cls)  # type: ignore[arg-type]  # classes are hashable
    return {name: hint for name, hint in types.items() if name in declared}


class Constant(_compat.OpaqueBase):
    """Base of frozen dataclasses that are constants of a graph.

    Two constants are equal if they have the same class and fields; an equal one runs the same graph, another one
    recompiles. Subclasses are frozen dataclasses; subclassing registers them with torch.compile.

    Raises:
        TypeError: The class holds what no constant can; where it is defined, or at its first instance if only its
            decorator is wrong.
    """

    from_graph: ClassVar[Callable[..., Constant]]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # of every subclass, and for type checkers

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_class(cls, Constant)

        def from_graph(salt: str, **values: Any) -> Constant:
            """Rebuild a value from a graph's source; the salt has done its work in the cache key."""
            return cls(**values)

        # of each class its own, and static: PyTorch 2.11 can't trace a classmethod of a constant
        cls.from_graph = staticmethod(from_graph)
        _compat.register_constant_type(cls)
        if "<locals>" not in cls.__qualname__:  # no file can name one of those
            torch.serialization.add_safe_globals([cls])  # for torch.load(weights_only=True); see __setstate__

    # dataclass() replaces both; PyTorch asks for them before it runs
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))

    def __post_init__(self) -> None:
        """Check the fields; subclasses that override it call it first."""
        check_decorated(type(self))  # type: ignore[arg-type]  # classes are hashable
        for field in fields(self):
            _check_field(type(self).__name__, field.name, getattr(self, field.name))
        foreign = _foreign_types(type(self))  # type: ignore[arg-type]  # classes are hashable
        for name, hint in foreign.items():
            if not fits(getattr(self, name), hint):
                raise TypeError(
                    f"{type(self).__name__}: field {name} is {getattr(self, name)!r}; it is annotated as "
                    f"{hint.__name__ if isinstance(hint, type) else hint}."
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take fields from a file or a copy, and those only: they are checked as where a value is made."""
        vars(self).update(vars(type(self)(**state)))

    def __repr__(self) -> str:
        arguments = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr)
        return f"{type(self).__name__}({arguments})"

    def __fx_repr__(self) -> tuple[str, dict[str, type[Any]]]:
        """The expression that stands for this value in a graph's source, and the types it names."""
        names: dict[str, type[Any]] = {}
        return _expression(self, names), names
