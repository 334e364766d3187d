"""What moments as codes do to training: losses beside float32 moments and torchao's, bytes, and rare gradients.

    python -m benchmarks.moments [--steps 300] [--seeds 3] [--out DIR] [--only WORD] [--page] [--section]

Trains the byte Llama of `examples/train` (2 layers, width 128) in float32, so that moments are all that differs, on
one thread; each optimizer sees the same weights and batches of a seed. Steps run op by op: a compiled step has the
same bits (tests/optim/test_adamw.py). ``--page`` writes docs/results/optimizer-states.md.
With ``--out`` what was trained is kept there, so that a script that was killed goes on; ``--only`` trains those
contenders whose name has a word, and prints no table. ``--section`` trains nothing: it writes one more section of the
page, on the trainings that ``--out`` has.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp8compile as f8
from benchmarks.resumed import resumed
from benchmarks.table import replace_section
from examples.train.data import load_text
from examples.train.model import ByteLlama, ModelShape

SHAPE = ModelShape(dim=128, layers=2, heads=4, kv_heads=2, hidden=384, seq=64)
BATCH, LR, WARM_UP, NUM_LAST = 8, 2e-3, 20, 50
ADAM = {"lr": LR, "weight_decay": 0.1}
MUON_LR = 0.02
PAGE = Path(__file__).parents[1] / "docs" / "results" / "optimizer-states.md"
RARE, EVERY = 7, 500  # the planted row, and the number of steps between its gradients
Params = Iterable[nn.Parameter]
Pair = tuple[float, float]


def ours(params: Params, **options: Any) -> list[torch.optim.Optimizer]:
    return [f8.optim.AdamW(params, **ADAM, backend=None, **options)]


def torchaos(name: str) -> Callable[[Params], list[torch.optim.Optimizer]]:
    def make(params: Params) -> list[torch.optim.Optimizer]:
        import torchao.optim

        return [getattr(torchao.optim, name)(params, **ADAM)]

    return make


def muon(kind: type, other: type, **options: Any) -> Callable[[Params], list[torch.optim.Optimizer]]:
    """Muon for the matrices of blocks; the embedding, the head and norms have AdamW."""

    def make(params: Params) -> list[torch.optim.Optimizer]:
        params = list(params)
        inner = [p for p in params if p.ndim == 2 and 256 not in p.shape]
        outer = [p for p in params if all(p is not each for each in inner)]
        return [kind(inner, lr=MUON_LR, **options), other(outer, **ADAM, **options)]

    return make


FLOAT32, FLOAT32_MUON = "float32 (torch.optim.AdamW)", "float32 (torch.optim.Muon, AdamW)"
CODES = "`f8.optim.AdamW`"
CONTENDERS: dict[str, Callable[[Params], list[torch.optim.Optimizer]]] = {
    FLOAT32: lambda params: [torch.optim.AdamW(params, **ADAM)],
    CODES: ours,
    f'{CODES}, `rounding="nearest"`': lambda params: ours(params, rounding="nearest"),
    "torchao `AdamW8bit`": torchaos("AdamW8bit"),
    FLOAT32_MUON: muon(torch.optim.Muon, torch.optim.AdamW),
    "`f8.optim.Muon`, `AdamW`": muon(f8.optim.Muon, f8.optim.AdamW, backend=None),
}
RARE_TOO = {"torchao `AdamWFp8`": torchaos("AdamWFp8")}  # one rule for both moments: what its v does with rare rows


def state_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Bytes of all tensors in states but counts of steps; of a tensor subclass those of its parts."""

    def size(x: Tensor) -> int:
        names = x.__tensor_flatten__()[0] if hasattr(x, "__tensor_flatten__") else ()
        return sum(size(getattr(x, name)) for name in names) or x.numel() * x.element_size()

    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return sum(
        size(value) for state in states for name, value in state.items() if torch.is_tensor(value) and name != "step"
    )


def trained(contender: str, seed: int, steps: int) -> tuple[float, float]:
    """The mean loss of the last steps, and the bytes a parameter of the state."""
    text, order = load_text(None, batch=BATCH, seq=SHAPE.seq), torch.Generator().manual_seed(seed)
    model = ByteLlama(SHAPE, seed=seed)
    optimizers, losses = CONTENDERS[contender](list(model.parameters())), []
    full = [[float(group["lr"]) for group in each.param_groups] for each in optimizers]
    for step in range(steps):
        starts = torch.randint(len(text.train) - SHAPE.seq - 1, (BATCH,), generator=order)
        batch = torch.stack([text.train[start : start + SHAPE.seq + 1] for start in starts]).long()
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        for each, rates in zip(optimizers, full, strict=True):
            for group, rate in zip(each.param_groups, rates, strict=True):
                now = rate * min(1.0, (step + 1) / WARM_UP)
                group["lr"] = group["lr"].fill_(now) if isinstance(group["lr"], Tensor) else now
            each.step()
            each.zero_grad()
        losses.append(loss.item())
    count = sum(p.numel() for p in model.parameters())
    return statistics.fmean(losses[-NUM_LAST:]), state_bytes(optimizers) / count


def path_of(out: Path, contender: str, what: str) -> Path:
    """The file below ``out`` for a result."""
    name = re.sub(r"\W+", "-", f"{contender}-{what}").strip("-")
    return out / f"{name}.json"


def kept(out: Path | None, contender: str, what: str, compute: Callable[[], Pair]) -> Pair:
    """What a file below ``out`` has, or else what is computed now and written there."""

    def computed() -> Pair:
        with torch.compiler.set_stance("force_eager") if "torchao" in contender else nullcontext():
            found = compute()  # torchao compiles a graph for each shape of parameter; here all run op by op
        print(contender, what, found, file=sys.stderr, flush=True)
        return found

    first, second = resumed(None if out is None else path_of(out, contender, what), computed)
    return first, second


def rare_gradients(contender: str) -> tuple[float, float]:
    """The largest change by a step, in learning rates: of a row with a gradient in one step of 500, and elsewhere.

    An embedding of 64 rows of 128; its other rows get a gradient in every step.
    """
    draws = torch.Generator().manual_seed(0)
    table = nn.Parameter(torch.zeros(64, 128))
    (optimizer,) = (CONTENDERS | RARE_TOO)[contender]([table])
    largest = torch.zeros(64)
    for step in range(2 * EVERY + 1):
        table.grad = torch.randn(table.shape, generator=draws)
        if step % EVERY:
            table.grad[RARE] = 0
        before = table.detach().clone()
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        optimizer.step()
        if step >= WARM_UP:  # a first gradient moves all by a learning rate or more
            largest = torch.maximum(largest, (table.detach() - before).abs().amax(1) / LR)
    rare = largest[RARE].item()
    largest[RARE] = 0
    return rare, largest.max().item()


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows]]


def all_trained(names: Iterable[str], seeds: Sequence[int], steps: int, out: Path | None) -> dict[str, list[Pair]]:
    return {
        name: [kept(out, name, f"{steps} steps, seed {seed}", partial(trained, name, seed, steps)) for seed in seeds]
        for name in names
    }


def losses(seeds_of: Mapping[str, Sequence[int]], steps: int, out: Path | None) -> list[str]:
    found, rows = {name: all_trained([name], seeds, steps, out)[name] for name, seeds in seeds_of.items()}, []
    for name, each in found.items():
        of_float32 = FLOAT32_MUON if "Muon" in name else FLOAT32
        plain = dict(zip(seeds_of[of_float32], found[of_float32], strict=True))
        gaps = [own[0] - plain[seed][0] for seed, own in zip(seeds_of[name], each, strict=True)]
        # a mean over other seeds says nothing beside that of float32
        mean = f"{statistics.fmean(loss for loss, _ in each):.4f}" if len(each) == len(plain) else "-"
        paired = ", ".join(f"{gap:+.4f}" for gap in gaps) if name != of_float32 else "-"
        rows.append([name, mean, paired, f"{each[0][1]:.2f}"])
    return table(["moments", "loss", "minus float32, seed by seed", "bytes a parameter"], rows)


def rare(out: Path | None) -> list[str]:
    rows = []
    for name in CONTENDERS | RARE_TOO:
        if "Muon" not in name:
            own, others = kept(out, name, "rare gradients", partial(rare_gradients, name))
            rows.append([name, f"{own:.2f}", f"{others:.2f}"])
    return table(["moments", "the rare row", "other rows"], rows)


def page(seeds: range, steps: int, out: Path | None) -> str:
    lines = [
        "# FP8 optimizer states",
        "",
        f"`python -m benchmarks.moments --steps {steps} --seeds {len(seeds)} --page` writes this page.",
        "",
        "## Loss and bytes",
        "",
        f"Mean training loss of the last {NUM_LAST} of {steps} steps, {len(seeds)} seeds; a Llama over bytes of width",
        f"{SHAPE.dim} with {SHAPE.layers} layers, in float32, betas (0.9, 0.999), the same batches for all.",
        "Norms keep float32 moments. Muon has the matrices of blocks, AdamW the rest.",
        "",
        *losses(dict.fromkeys(CONTENDERS, seeds), steps, out),
        "",
        "## Rare gradients",
        "",
        "The largest change of an element by a step, in learning rates. A row of an embedding (64, 128)",
        f"gets a gradient in one step of {EVERY}, the others in each.",
        "",
        *rare(out),
        "",
    ]
    return "\n".join(lines)


def write_section(seeds: range, steps: int, out: Path) -> None:
    """Write the section of the page on the trainings that ``out`` has."""
    trained_seeds = {
        name: [seed for seed in seeds if path_of(out, name, f"{steps} steps, seed {seed}").exists()]
        for name in CONTENDERS
    }
    body = [
        f"Likewise after {steps} steps, the last {NUM_LAST} of them, for what was trained so long. Losses of float32",
        f"moments are {spread(seeds, steps, out):.4f} apart from seed to seed.",
        f"`python -m benchmarks.moments --steps {steps} --out DIR --section` writes this section.",
        "",
        *losses({name: own for name, own in trained_seeds.items() if own}, steps, out),
    ]
    replace_section(PAGE, f"Loss after {steps} steps", body)


def spread(seeds: range, steps: int, out: Path) -> float:
    """How far the losses of float32 moments are apart."""
    found = [loss for loss, _ in all_trained([FLOAT32], seeds, steps, out)[FLOAT32]]
    return max(found) - min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only")
    parser.add_argument("--section", action="store_true", help=f"write one more section of {PAGE.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only:
        names = [name for name in CONTENDERS if options.only in name]
        all_trained(names, range(options.seeds), options.steps, options.out)
        return
    if options.section:
        write_section(range(options.seeds), options.steps, options.out)
        return
    found = page(range(options.seeds), options.steps, options.out)
    if options.page:
        PAGE.write_text(found)
    print(found)


if __name__ == "__main__":
    main()
