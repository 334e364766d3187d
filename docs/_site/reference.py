"""The reference of a public module: every name of its ``__all__``, from what is imported.

A page of docs/reference has a comment. In its place come a table of the names, then each of them: functions and
classes by mkdocstrings from their sources, operators by their schema, other values by what they are. What an earlier
page has already is only in the table, which links to it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

__all__ = ["MODULES", "Reference", "names_of"]

# the pages in their order, each with the modules that it has; a name belongs to the first that has it
MODULES = {
    "reference/README.md": "fp8compile",
    "reference/recipes.md": "fp8compile.recipes",
    "reference/quantizers.md": "fp8compile.quantizers",
    "reference/parallel.md": "fp8compile.parallel",
    "reference/optim.md": "fp8compile.optim",
    "reference/testing.md": "fp8compile.testing",
    "reference/graphs.md": "fp8compile.testing.graphs",
    "reference/explain.md": "fp8compile.testing.explain",
    "reference/ptx_report.md": "fp8compile.testing.ptx_report",
    "reference/library.md": "fp8compile.library",
    "reference/export.md": "fp8compile.export",
    "reference/ops.md": "fp8compile.ops",
}


def names_of(module: str) -> list[str]:
    """Names of a module's ``__all__`` that are no modules, which have pages of their own."""
    found = importlib.import_module(module)
    return [name for name in found.__all__ if not inspect.ismodule(getattr(found, name))]


def _first_paragraph(doc: str | None) -> str:
    return " ".join(inspect.cleandoc(doc or "").split("\n\n")[0].split())


def _first_sentence(doc: str | None) -> str:
    return re.split(r"(?<=[.;])\s", _first_paragraph(doc))[0].rstrip(";").replace("|", "\\|")


def _operator_words(op: Any) -> str:
    """What an operator is: its kernel's docstring, else what the head of its file says of it."""
    from fp8compile.ops import OPS

    kernel = OPS[op._schema.name].impl
    head = importlib.import_module(kernel.__module__).__doc__ or ""
    own = re.search(rf"^ *{op._opname}  +(.+?)(?=\n\n|\n *\w+  |\Z)", head, re.MULTILINE | re.DOTALL)
    words = _first_paragraph(kernel.__doc__ or (own and own.group(1)) or head)
    words = re.sub(r"^fp8compile::[^:]*: ", "", words)  # a file's head begins with the names of its operators
    return f"{words[0].upper()}{words[1:]}"


def _is_operator(value: Any) -> bool:
    return hasattr(value, "_schema") and hasattr(value, "_opname")


def _value_words(value: Any) -> str:
    """What a constant is, in a line."""
    if isinstance(value, dict):
        keys = [str(key) for key in value]
        return f"A dict of {len(keys)} entries, by `{'`, `'.join(keys[:4])}`{' and others' if len(keys) > 4 else ''}."
    if isinstance(value, tuple):
        entries = [getattr(each, "name", each) for each in value]
        entries = [str(each() if callable(each) and not _is_operator(each) else each) for each in entries]
        return f"A tuple: `{'`, `'.join(entries)}`."
    return f"`{value!r}`".replace("|", "\\|")


def _is_documented(value: Any) -> bool:
    """Whether a value is a class or function of ours, which has a docstring."""
    is_defined = inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value))
    return is_defined and not _is_operator(value) and value.__module__.startswith("fp8compile")


def _words(value: Any) -> str:
    if _is_operator(value):
        return _operator_words(value)
    if _is_documented(value):
        return _first_sentence(value.__doc__)
    return _value_words(value)


class Reference:
    """The pages, each name on one of them."""

    def __init__(self) -> None:
        self.pages: dict[tuple[str, str], str] = {}  # by where a function or class is defined, the page that has it
        for page, module in MODULES.items():
            for name in names_of(module):
                self.pages.setdefault(self._definition(module, name), page)

    def _definition(self, module: str, name: str) -> tuple[str, str]:
        value = getattr(importlib.import_module(module), name)
        if _is_documented(value):
            return value.__module__, value.__qualname__
        return module, name

    def _rows(self, page: str, module: str) -> Iterator[str]:
        yield "| name | |"
        yield "|---|---|"
        for name in names_of(module):
            where, own = self._definition(module, name)
            there = self.pages[where, own]
            link = (
                f"[`{name}`]({'' if there == page else there.removeprefix('reference/')}#{self._anchor(where, own)})"
            )
            yield f"| {link} | {_words(getattr(importlib.import_module(module), name))} |"

    def _anchor(self, where: str, own: str) -> str:
        return f"{where}.{own}".replace("__", "")  # Markdown reads two underscores as bold

    def _entry(self, module: str, names: list[str]) -> str:
        """What a page says of a value, which a module may have by several names."""
        name, anchors = names[0], "".join(f"[](){{ #{module}.{name} }}\n" for name in names)
        where, own = self._definition(module, name)
        value, anchor = getattr(importlib.import_module(module), name), self._anchor(where, own)
        if _is_documented(value):
            options = f"\n    options:\n      heading: {name}\n      toc_label: {name}\n"
            return f"::: {anchor}{options}" if anchor == f"{module}.{name}" else f"{anchors}\n::: {anchor}{options}"
        head = f"## `{name}` {{ #{anchor} }}\n\n"
        if _is_operator(value):
            schema = str(value._schema).replace("__torch__.torch.classes.", "")
            return f"{head}```text\n{schema}\n```\n\n{_operator_words(value)}\n"
        return f"{head}{_value_words(value)}\n"

    def markdown(self, page: str) -> str:
        """What a page of the reference has in place of its line."""
        module, own = MODULES[page], {}
        for name in names_of(module):
            definition = self._definition(module, name)
            if self.pages[definition] == page:
                own.setdefault(definition, []).append(name)
        return "\n".join([*self._rows(page, module), "", *(self._entry(module, names) for names in own.values())])
