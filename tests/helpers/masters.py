"""Steps of models whose weights are codes; what MasterWeights does, by hand, where weights are values."""

from __future__ import annotations

import torch

from fp8compile import DelayedScaling
from fp8compile._compat import local_itself
from fp8compile.nn.convertible.convertible_layers import is_converted, weight_names

__all__ = ["ByHand", "scaled_by_values", "train"]


class ByHand:
    """AdamW over float32 masters of the weights of a model's FP8 layers, which are their bfloat16 copies."""

    def __init__(self, model, *, lr):
        layers = [module for module in model.modules() if is_converted(module)]
        weights = [getattr(layer, name) for layer in layers for name in weight_names(layer)]
        self.pairs = {weight: weight.detach().float().requires_grad_() for weight in weights}
        self.zero_grad = model.zero_grad
        self.inner = torch.optim.AdamW([self.pairs.get(p, p) for p in model.parameters()], lr=lr)

    @torch.no_grad()
    def step(self):
        for weight, master in self.pairs.items():
            master.grad = None if weight.grad is None else weight.grad.float()
        self.inner.step()
        for weight, master in self.pairs.items():
            weight.copy_(master)

    def state_dict(self):
        masters = {str(index): master.detach() for index, master in enumerate(self.pairs.values())}
        return {"inner": self.inner.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        for master, given in zip(self.pairs.values(), state["masters"].values(), strict=True):
            master.copy_(given)


def train(model, optimizer, steps, first=0):
    """Losses of steps of an autoencoder of 64 features, on batches by their number."""
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = (model(x).float() - x.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def scaled_by_values(model):
    """Gives weights with delayed scaling the multipliers of new FP8 parameters; their own begin with 1."""
    for layer in model.modules():
        if is_converted(layer) and isinstance(quantizer := layer.recipe.weight, DelayedScaling):
            whole = layer.weight.full_tensor() if hasattr(layer.weight, "full_tensor") else layer.weight
            multiplier = local_itself(layer.multiplier)[1]
            multiplier.copy_(quantizer.next_state(torch.zeros(2), torch.ones(()), whole.abs().max().float())[1])
    return model
