"""A state for recipes that need one, so that a test can be about all recipes."""

from __future__ import annotations

import torch

import fp8compile as f8

__all__ = ["MULTIPLIERS", "state_of"]

MULTIPLIERS = {"input": 3.0, "weight": 5.0, "grad_output": 7.0}  # none of them a power of two


def state_of(recipe: f8.Recipe) -> f8.DelayedState | None:
    """What ``f8.linear`` takes as ``state``: with these multipliers for delayed scaling, None for any other recipe."""
    if not recipe.history():
        return None
    return f8.DelayedState.initial(recipe)._replace(multiplier=torch.tensor(list(MULTIPLIERS.values())))
