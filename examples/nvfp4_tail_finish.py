"""Four bits, as NVIDIA trains in them: the last blocks in eight bits, and the end of the run with a better forward.

python -m examples.nvfp4_tail_finish
python -m examples.nvfp4_tail_finish --steps 200 --finish 0.2

convert(tail=, tail_recipe=) keeps the last blocks in eight bits. set_recipe(forward=) then changes the forward of a
model that is training: outputs in high precision, gradients in four bits as before. Weights, optimizer and checkpoints
do not notice. Where a GPU has no four-bit products, and on a CPU, they are emulated, which is slow.
"""

from __future__ import annotations

import argparse

import torch

import fp8compile as f8
from examples.losses import LAST, SEQUENCE, batch, device, show
from examples.train.model import ByteLlama, ModelShape

SHAPE = ModelShape(dim=64, layers=4, heads=4, kv_heads=2, hidden=128, seq=SEQUENCE)


def train(recipe: f8.Recipe | None, steps: int, *, finish: float = 0.0) -> list[float]:
    """Losses of a training, whose last part, a share of the steps, has its forward in high precision."""
    model = ByteLlama(SHAPE, seed=0).to(device(), torch.bfloat16)
    if recipe is not None:
        f8.convert(model, recipe, filter="!head", tail=0.25, tail_recipe=f8.recipes.mxfp8(emulate=True))
        print(f8.conversion_report(model))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    step = torch.compile(model, fullgraph=True, backend="inductor" if device().type == "cuda" else "aot_eager")
    for number in range(steps):
        if finish and number == int(steps * (1 - finish)):
            f8.set_recipe(model, forward=None)  # compiles once more, at the next call
        loss = step(*batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train in bf16, in four bits to the end, and in four bits with a better finish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", default=40, type=int, help="default 40")
    parser.add_argument("--finish", default=0.2, type=float, help="share of the steps at the end, default 0.2")
    given = parser.parse_args()
    recipe = f8.recipes.nvfp4(emulate=True)
    losses = {
        "bf16": train(None, given.steps),
        "nvfp4": train(recipe, given.steps),
        "nvfp4, then bf16 forward": train(recipe, given.steps, finish=given.finish),
    }
    show(losses)
    if given.steps * given.finish >= LAST:
        bf16, whole, finished = (sum(each[-LAST:]) / LAST for each in losses.values())
        print(f"above bf16: nvfp4 {whole - bf16:+.4f} nats, finished in high precision {finished - bf16:+.4f}")


if __name__ == "__main__":
    main()
