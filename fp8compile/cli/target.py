"""Loads the TARGET of `fp8compile explain`: a model and its inputs, named on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from fp8compile.cli.errors import UserError
from fp8compile.cli.user_code import running
from fp8compile.nn.parameter_uses.first_forward import suppress_warnings
from fp8compile.testing.explain.emulation import emulation_note
from fp8compile.testing.graphs.kept_state import kept_state
from fp8compile.testing.graphs.report import is_compiled
from fp8compile.testing.graphs.without_values import on_meta, values_needed

__all__ = ["Target", "found_at", "load_target"]

log: logging.Logger = logging.getLogger(__name__)
DEFAULT_NAMES = ("model_and_inputs", "example")
WANTED = "(model, args) or (model, args, kwargs), or a torch.nn.Module with example_inputs()"


@dataclass(frozen=True)
class Target:
    """A model, and the arguments to call it with.

    Attributes:
        name: TARGET, as the user typed it.
        model: The model.
        args: Arguments of the call.
        kwargs: Keyword arguments of the call.
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def try_out(self) -> bool | None:
        """Call the model once, so that wrong inputs raise here and not in a compiler.

        Returns:
            False if the call works with fake tensors, True if the call needs real values. None if the call needs real
            values but the model is on the meta device; the explanation then reports the failure.

        Raises:
            UserError: The call fails.
        """
        what = f"{self.name}: calling the model with its inputs"
        # not under no_grad, because a model may compute gradients in its forward
        with running(what), suppress_warnings():
            why = values_needed(self.model, self.args, self.kwargs)
            if not why:
                return False
            if on_meta(self.model):
                return None
            log.info("calling it with real tensors, because it fails with fake ones (%s)", why)
            if note := emulation_note(self.model):
                print(note, file=sys.stderr)
            with kept_state(self.model, (self.args, self.kwargs)):
                self.model(*self.args, **self.kwargs)
            return True


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    # another name than __main__, so that code under `if __name__ == "__main__"` does not run
    name = "explained_main" if path.stem == "__main__" else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"{path} ends in .py"
    assert spec.loader is not None, f"{path} ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)  # dataclasses and pickle look their module up by name
    sys.path.insert(0, str(path.parent.resolve()))  # as `python FILE.py` does
    with running(f"{path}: running it"):
        spec.loader.exec_module(module)
    return module


def _from_name(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(
            f"{name!r} is neither a FILE.py nor the name of a module. Pass FILE.py:name or package.module:name."
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as with `python -m`; the installed command doesn't search this folder
    with running(f"importing {name}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                raise UserError(f"there is no module {error.name!r}") from error
            raise


def _attribute(module: ModuleType, place: str, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise UserError(f"{place} has no {name!r}. Name a function or model that it defines.")
        value = getattr(value, part)
    return value


def found_at(text: str) -> Any:
    """Import the object that ``package.module:name``, ``FILE.py:name`` or ``FILE.py`` names.

    ``FILE.py`` alone means the first of the names in ``DEFAULT_NAMES`` that the file defines.
    """
    place, colon, name = text.rpartition(":")
    if not colon:
        place, name = text, ""
    is_file = place.endswith(".py")
    if not name and not is_file:
        raise UserError(f"{text!r} must be package.module:name, FILE.py:name or FILE.py.")
    module = _from_file(Path(place)) if is_file else _from_name(place)
    if name:
        return _attribute(module, place, name)
    for default in DEFAULT_NAMES:
        if hasattr(module, default):
            return getattr(module, default)
    raise UserError(
        f"{place} has neither {' nor '.join(DEFAULT_NAMES)}. Name the function or model to explain, as {place}:name."
    )


def _called(text: str, value: Any) -> Any:
    with running(f"{text}: calling it without arguments"):
        return value()


def _inputs(text: str, model: nn.Module) -> tuple[nn.Module, Any]:
    if not hasattr(model, "example_inputs"):
        raise UserError(
            f"{text}: {type(model).__name__} has no method example_inputs(). Pass a function that returns {WANTED}."
        )
    return model, _called(f"{text}: example_inputs()", model.example_inputs)


def _loaded(text: str) -> Target:
    value = found_at(text)
    if not callable(value):
        raise UserError(f"{text} is a {type(value).__name__}; it must be a function that returns {WANTED}.")
    if not isinstance(value, nn.Module):
        value = _called(text, value)
    if isinstance(value, nn.Module):
        value = _inputs(text, value)
    if not isinstance(value, tuple) or len(value) not in (2, 3) or not isinstance(value[0], nn.Module):
        raise UserError(f"{text} returned a {type(value).__name__}; it must return {WANTED}.")
    model, args, *rest = value
    kwargs = rest[0] if rest else {}
    if isinstance(args, Tensor):
        args = (args,)
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        kinds = f"{type(args).__name__} and {type(kwargs).__name__}"
        named = "; for keyword arguments return (model, (), {...})" if isinstance(args, dict) else ""
        raise UserError(f"{text} returned {kinds} as args and kwargs; they must be a tuple and a dict{named}.")
    if is_compiled(model):
        raise UserError(f"{text} returned a model that is already compiled. Return the model before torch.compile.")
    return Target(text, model, tuple(args), kwargs)


def load_target(text: str) -> Target:
    """Import a target, and call it to get a model and inputs.

    Args:
        text: ``package.module:name``, ``FILE.py:name`` or ``FILE.py``.

    Returns:
        The model and its inputs. Instead of a tuple of inputs, the target may return a single tensor.

    Raises:
        UserError: There is no target of this name, or the target fails, or it does not return a model and inputs.
    """
    with running(f"{text}: loading it"):  # even a lookup may run the user's code
        return _loaded(text)
