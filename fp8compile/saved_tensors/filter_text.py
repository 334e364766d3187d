"""Texts of filter functions for keys of compile caches: equal for functions that decide alike."""

from __future__ import annotations

import builtins
import dis
import hashlib
import inspect
import uuid
from collections.abc import Callable
from functools import cache, lru_cache
from types import CodeType
from typing import Any

from fp8compile.quantizers.constant import ALLOWED_FIELD_TYPES, module_source

__all__ = ["filter_text"]

STABLE = ("builtins", "fnmatch", "fp8compile", "math", "re", "torch")  # what filters read there doesn't change
UNKNOWN = object()


@cache
def _own_text(function: Callable[..., Any]) -> str:
    return uuid.uuid4().hex


@cache
def _source_hash(function: Callable[..., Any]) -> str:
    return hashlib.sha256(module_source(function.__module__)).hexdigest()


def filter_text(function: Callable[..., Any]) -> str:
    """Return a text for a filter function and what it reads; one of this process alone if that can't be compared."""
    texts = _texts(function)
    if texts is None:
        return _own_text(function)
    found = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()
    return f"{function.__module__}.{function.__qualname__} {_source_hash(function)} {found}"


def _texts(function: Callable[..., Any]) -> dict[str, str] | None:
    """Return texts of a function, under the name "", and of all globals that it reads, by name.

    Functions of the same module that it calls are followed. None is returned if one value can't be compared.
    """
    if not inspect.isfunction(function):
        return None
    texts: dict[str, str] = {}
    pending: dict[str, Any] = {"": function}
    while pending:
        name, value = pending.popitem()
        if _is_plain(value):
            texts[name] = repr(value)
        elif _is_bare(value) and value.__globals__ is function.__globals__:
            texts[name], names = _code_text(value.__code__)
            known = {**vars(builtins), **function.__globals__}
            pending |= {each: known.get(each, UNKNOWN) for each in names if each not in texts}
        elif (home := _home(value)).partition(".")[0] in STABLE:
            texts[name] = f"{home} {value.__name__}"
        else:
            return None
    return texts


def _is_plain(value: object) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in ALLOWED_FIELD_TYPES


def _is_bare(value: Any) -> bool:
    """Whether a value is a function that has nothing but its code: no closure, no defaults, no attributes."""
    if not inspect.isfunction(value):
        return False
    return not (value.__closure__ or value.__defaults__ or value.__kwdefaults__ or vars(value))


def _home(value: Any) -> str:
    """Return the name of a module, or of the module of a class or function; "" for any other value.

    A function with a closure has no home: it may be another module's function behind a decorator.
    """
    if inspect.isfunction(value):
        return "" if value.__closure__ else str(value.__globals__.get("__name__"))
    if inspect.ismodule(value):
        return value.__name__
    return str(value.__module__) if inspect.isbuiltin(value) or isinstance(value, type) else ""


@lru_cache
def _code_text(code: CodeType) -> tuple[str, frozenset[str]]:
    """Return a text of a function's code, and the names of the globals that it reads."""
    inner = [_code_text(each) for each in code.co_consts if isinstance(each, CodeType)]
    constants = [each for each in code.co_consts if not isinstance(each, CodeType)]
    names = {
        f"import {each.argval}" if each.opname == "IMPORT_NAME" else each.argval  # the first is no global's name
        for each in dis.get_instructions(code)
        if "GLOBAL" in each.opname or each.opname in ("LOAD_NAME", "IMPORT_NAME")
    }
    # the bytecode has numbers in place of names and constants: lambdas of one file may differ in them alone
    text = f"{code.co_code!r} {code.co_names!r} {constants!r} {[each for each, _ in inner]!r}"
    return text, frozenset(names.union(*(each for _, each in inner)))
