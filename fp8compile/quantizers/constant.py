"""Immutable values that are constants of torch.compile's graphs: the base of quantizers and recipes.

A constant's expression in a graph, and with it the key of each compile cache, contains a salt: a hash over the source
files that an op is compiled from. Without the salt, a cache on disk would return code compiled from an old version.
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
from fp8compile.quantizers.check_declaration import check_class, check_decorated

__all__ = ["Constant", "module_source", "salt_with", "source_salt"]

PACKAGE = __name__.partition(".")[0]
# the last two replace ops after the cache's key was computed
SALTED = (
    "formats.py", "target.py", "scale_layouts.py", "_compat", "inductor", "layout", "quantizers", "ops", "kernels",
    "tensor", "saved_tensors", "parallel", "monitor",
)  # fmt: skip
NAMED: Counter[str] = Counter()  # for each name in graphs, the number of classes that have it
SALTED_MODULES: set[str] = set()  # modules of other packages whose ops or GEMMs are compiled into graphs
SALTED_NAMES: set[str] = set()  # functions that these have registered and that no graph names
ALLOWED_FIELD_TYPES = (str, int, float, bool, type(None))


def _python_files(roots: list[Any]) -> list[Any]:
    """Return the Python files at and below the paths ``roots``, in the same order on every machine."""
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


def module_source(module_name: str) -> bytes:
    """Return the source of a module's top-level package, or of a module outside a package, to be hashed.

    A module typed at a prompt has no source. A number unique to this process replaces the source, so that graphs miss
    the compile cache.
    """
    top = sys.modules.get(module_name.partition(".")[0])
    if top is not None and getattr(top, "__path__", None):
        return b"".join(file.read_bytes() for file in _python_files([importlib.resources.files(top)]))
    module = sys.modules.get(module_name)
    if module is not None and getattr(module, "__file__", None):
        return inspect.getsource(module).encode()
    return uuid.uuid4().bytes


def salt_with(module_name: str, function: str = "") -> None:
    """Add a module's source to all compile cache keys from now on, because compiled code depends on it.

    Args:
        module_name: The module. PyTorch and fp8compile add nothing: each key has fp8compile's sources anyway.
        function: Name of a function of the module on which compiled code depends although no graph has its name. The
            name is added to the keys. Empty for none.
    """
    if function:
        SALTED_NAMES.add(f"{function} {uuid.uuid4()}" if "<locals>" in function else function)
    if _is_foreign(module_name):
        SALTED_MODULES.add(module_name)
    source_salt.cache_clear()


@cache
def source_salt(cls: type[Any]) -> str:
    """Return eight hex digits for keys of compile caches, which change with the source a graph is compiled from.

    The sources are this package's (``SALTED``), the modules of the class and its bases, and what `salt_with` added.
    """
    digest = hashlib.sha256(_package_hash())
    modules = [base.__module__ for base in cls.__mro__ if _is_foreign(base.__module__)]
    for module in [*modules, *sorted(SALTED_MODULES)]:
        digest.update(module_source(module))
    digest.update("\0".join(sorted(SALTED_NAMES)).encode())
    if "<locals>" in cls.__qualname__:
        digest.update(uuid.uuid4().bytes)  # its source does not tell the values that it closes over
    return digest.hexdigest()[:8]


@cache
def _global_name(cls: type[Any]) -> str:
    """Return a name for a class that no other class has in a graph's globals.

    FX keeps only the first of two globals with one name, and two classes can have the same qualified name.
    """
    name = re.sub(r"\W", "_", f"{cls.__module__}.{cls.__qualname__}")
    NAMED[name] += 1
    return name if NAMED[name] == 1 else f"{name}_{NAMED[name]}"


def _expression(value: Any, names: dict[str, type[Any]], rank_salt: str) -> str:
    if isinstance(value, Constant):
        cls = type(value)
        names[_global_name(cls)] = cls  # type: ignore[arg-type]  # classes are hashable
        arguments = [f"{f.name}={_expression(getattr(value, f.name), names, rank_salt)}" for f in fields(value)]
        salt = source_salt(cls) + rank_salt  # type: ignore[arg-type]  # classes are hashable
        name = _global_name(cls)  # type: ignore[arg-type]  # classes are hashable
        return f"{name}.from_graph({', '.join([repr(salt), *arguments])})"
    if isinstance(value, tuple):
        return "(" + "".join(_expression(v, names, rank_salt) + ", " for v in value) + ")"
    return repr(value)


def _check_field(owner: str, name: str, value: Any) -> None:
    for part in value if isinstance(value, tuple) else (value,):
        if isinstance(part, float) and not math.isfinite(part):
            raise ValueError(f"{owner}: field {name} is {part}; it must be finite.")
        # the repr of a subclass of float (numpy's) or of str (an enum's) is code that a graph can't run
        if type(part) not in ALLOWED_FIELD_TYPES and not isinstance(part, Constant):
            raise TypeError(
                f"{owner}: field {name} holds a {type(part).__name__}, but a constant of a graph can only hold str, "
                "int, float, bool, None, tuples of these, and quantizers. It can't hold a tensor, a dtype, a list "
                "or a process group. Name a dtype by a string, keep what changes from step to step in buffers of a "
                "module, and pass a process group with the tensor (fp8compile.quantize(x, quantizer, group=...))."
            )


class Constant(_compat.OpaqueBase):
    """Base class of frozen dataclasses that are constants of a graph.

    Two constants are equal if they have the same class and fields. Equal constants share a compiled graph; a different
    constant recompiles. Subclasses must be frozen dataclasses. Subclassing registers them with torch.compile.

    Raises:
        TypeError: An attribute is not a field (raised when the class is defined), the class is not a frozen dataclass
            (raised when the first instance is created), or a field has a wrong value.
        ValueError: A field is infinite or NaN.
    """

    from_graph: ClassVar[Callable[..., Constant]]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # of every subclass, and for type checkers

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_class(cls)

        def from_graph(salt: str, **values: Any) -> Constant:
            """Rebuild a constant with the fields ``values`` from its expression in a graph's source.

            ``salt`` is unused; it only changes the key of the compile cache.
            """
            return cls(**values)

        # a static method for each class, because PyTorch 2.11 can't trace a classmethod of a constant
        cls.from_graph = staticmethod(from_graph)
        _compat.register_constant_type(cls)
        if "<locals>" not in cls.__qualname__:  # a file can't name a local class
            torch.serialization.add_safe_globals([cls])  # for torch.load(weights_only=True); see __setstate__

    # dataclass() replaces both methods, but PyTorch reads them before dataclass() has run
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))

    def __post_init__(self) -> None:
        """Check the fields. A subclass that overrides this method calls ``super().__post_init__()`` first."""
        check_decorated(type(self))  # type: ignore[arg-type]  # classes are hashable
        for field in fields(self):
            _check_field(type(self).__name__, field.name, getattr(self, field.name))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the fields from a pickle or a copy by the constructor, which checks them."""
        vars(self).update(vars(type(self)(**state)))

    def __repr__(self) -> str:
        arguments = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr)
        return f"{type(self).__name__}({arguments})"

    def __fx_repr__(self) -> tuple[str, dict[str, type[Any]]]:
        """Return this constant's expression in a graph's source, and the classes it names, by name."""
        names: dict[str, type[Any]] = {}
        return _expression(self, names, _compat.rank_salt()), names
