"""What `fp8compile explain` explains: from a name on the command line to a model and inputs for it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from fp8compile.cli.errors import UserError
from fp8compile.testing.report import is_compiled
from fp8compile.testing.state import kept_state

__all__ = ["Target", "load_target"]

DEFAULT_NAMES = ("model_and_inputs", "example")
WANTED = "(model, args) or (model, args, kwargs), or a torch.nn.Module with example_inputs()"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Target:
    """A model, and a call of it.

    Attributes:
        name: As typed.
        model: The model.
        args: Of the call.
        kwargs: Of the call.
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def try_out(self) -> None:
        """Call the model once, so that inputs which don't fit it are told from what a compiler can't do.

        Raises:
            UserError: The call fails.
        """
        try:
            # not without gradients, which a model may ask for in its forward
            with kept_state(self.model, (self.args, self.kwargs)):
                self.model(*self.args, **self.kwargs)
        except Exception as error:  # the user's code may raise anything
            raise UserError(f"{self.name}: calling the model with its inputs failed: {_said(error)}") from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look their module up by name
    sys.path.insert(0, str(path.parent.resolve()))  # as `python FILE.py` does
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"{path}: running it failed: {_said(error)}") from error
    return module


def _from_name(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"{name!r} is neither a FILE.py nor the name of a module")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # the installed command doesn't look there, `python -m` does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UserError(f"there is no module {error.name!r}") from error
        raise UserError(f"importing {name} failed: {_said(error)}") from error
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"importing {name} failed: {_said(error)}") from error


def _attribute(module: ModuleType, place: str, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise UserError(f"{place} has no {name!r}")
        value = getattr(value, part)
    return value


def _found(text: str) -> Any:
    place, colon, name = text.rpartition(":")
    if not colon:
        place, name = text, ""
    is_file = place.endswith(".py")
    if not name and not is_file:
        raise UserError(f"{text!r} is neither package.module:name nor FILE.py:name nor FILE.py")
    module = _from_file(Path(place)) if is_file else _from_name(place)
    if name:
        return _attribute(module, place, name)
    for default in DEFAULT_NAMES:
        if hasattr(module, default):
            return getattr(module, default)
    raise UserError(f"{place} has neither {' nor '.join(DEFAULT_NAMES)}; name what to explain: {place}:name")


def _called(text: str, value: Any) -> Any:
    """What a function returns, or an object of a class."""
    try:
        return value()
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"{text}: calling it without arguments failed: {_said(error)}") from error


def _inputs(text: str, model: nn.Module) -> tuple[nn.Module, Any]:
    if not hasattr(model, "example_inputs"):
        raise UserError(
            f"{text}: {type(model).__name__} has no example_inputs(); give a function that returns {WANTED}"
        )
    return model, _called(f"{text}: example_inputs()", model.example_inputs)


def load_target(text: str) -> Target:
    """Find and call what is to be explained.

    Args:
        text: ``package.module:name``, ``FILE.py:name`` or ``FILE.py``.

    Returns:
        The model and its inputs; a single input may be given bare.

    Raises:
        UserError: It isn't there, fails, or gives something else.
    """
    value = _found(text)
    if not callable(value):
        raise UserError(f"{text} is a {type(value).__name__}; it has to be a function that returns {WANTED}")
    if not isinstance(value, nn.Module):
        value = _called(text, value)
    if isinstance(value, nn.Module):
        value = _inputs(text, value)
    if not isinstance(value, tuple) or len(value) not in (2, 3) or not isinstance(value[0], nn.Module):
        raise UserError(f"{text} gives a {type(value).__name__} that is not {WANTED}")
    model, args, *rest = value
    kwargs = rest[0] if rest else {}
    if isinstance(args, Tensor):
        args = (args,)
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        kinds = f"{type(args).__name__} and {type(kwargs).__name__}"
        named = "; for named arguments return (model, (), {...})" if isinstance(args, dict) else ""
        raise UserError(f"{text} gives {kinds} for args and kwargs; they are a tuple and a dict{named}")
    if is_compiled(model):
        raise UserError(f"{text} gives a model that is compiled already; give what torch.compile was given")
    return Target(text, model, tuple(args), kwargs)
