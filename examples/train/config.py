"""The options of a run. Each is a field of `TrainConfig`, and a flag of the same name on the command line."""

from __future__ import annotations

import argparse
import math
import types
from dataclasses import dataclass, field, fields
from math import lcm
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

import fp8compile as f8

BF16 = "bf16"  # the name of training without FP8
NUM_SPREAD_SEEDS = 3  # number of seeds of bf16 that --check compares with
GROUPED_SIZE = 8  # elements; grouped GEMMs need rows of a multiple of 16 bytes
MAX_EXPERTS = 1024  # largest number of groups of PyTorch's grouped GEMMs on a GPU


class UsageError(Exception):
    """A mistake that the user can mend; printed as one line, exit code 2."""


def _option(text: str, default: Any) -> Any:
    return field(default=default, metadata={"help": text})


def _switch(text: str) -> Any:
    return _option(text, default=False)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All options that decide the numbers of a run. A `UsageError` is raised if they contradict one another.

    The defaults are the preset of the criterion: on two CPU cores rowwise and bf16 together take less than four
    minutes, and the model's loss gets well below that of counting triples of bytes.
    """

    recipe: str = _option(f"{', '.join(f8.recipes.names())}, an installed package's, or {BF16} for none", "rowwise")
    compare: str | None = _option("train this one too, from the same seed and batches: bf16", default=None)
    check: bool = _switch("judge FP8 against bf16 over three seeds; exit code 1 if it fails")
    data: str | None = _option("file or folder with text (default: Python's standard library)", default=None)
    dim: int = _option("width of the model", 128)
    layers: int = _option("number of blocks", 4)
    heads: int = _option("query heads, which divide half of --dim", 4)
    kv_heads: int = _option("key and value heads, which divide --heads", 2)
    hidden: int = _option("width of the feed-forward layers, or of each expert", 384)
    experts: int = _option("experts of each feed-forward layer, 0 for none", 0)
    top_k: int = _option("with --experts: how many of them each byte goes to", 0)
    qk_norm: bool = _switch("normalize queries and keys, head by head")
    seq: int = _option("bytes in a sequence", 128)
    batch: int = _option("sequences in a batch", 16)
    steps: int = _option("updates", 300)
    lr: float = _option("peak learning rate", 3e-3)
    seed: int = _option("decides initial weights and the order of the data", 0)
    compile: bool = _option("run without torch.compile", default=True)
    backend: str = _option("backend of torch.compile", "inductor")
    device: str = _option("cpu or cuda", "cuda" if torch.cuda.is_available() else "cpu")
    threads: int = _option("CPU threads, which decide the order of sums", torch.get_num_threads())
    eval_every: int = _option("steps between evaluations; there is one at the end, too", 100)
    eval_sequences: int = _option("held-out sequences of an evaluation", 256)
    checkpoint_every: int = _option("steps between checkpoints; there is one at the end, too", 100)
    monitor: int = _option("steps between readings of FP8 operands, into monitor-<arm>.jsonl; 0 for none", 0)
    tp: int = _option("processes that the model is cut over", 1)
    sp: bool = _switch("with --tp: cut the sequence too, between matrix products")
    fsdp: bool = _switch("shard parameters and batch over the processes, by stock FSDP2")
    hsdp: bool = _switch("like --fsdp, with two replicas of the shards")
    graph_fsdp: bool = _switch("like --fsdp, with all communication in the graph of the whole model")
    bf16_gather: bool = _switch("with --fsdp: all-gather FP8 weights in bfloat16; results are bit-identical")
    ep: int = _option("with --experts: processes that experts are spread over, which share the batch too", 1)
    quantized_parameters: bool = _switch("FP8 parameters, with float32 masters in the optimizer")

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP shards the parameters, in any of its ways."""
        return self.fsdp or self.hsdp or self.graph_fsdp

    def __post_init__(self) -> None:
        self._check(0 < self.lr < math.inf, "lr", "has to be a positive number")
        for each in fields(self):
            least = 0 if each.name in ("seed", "experts", "top_k", "monitor") else 1
            if each.type == "int":
                self._check(getattr(self, each.name) >= least, each.name, f"has to be at least {least}")
        self._check(self.compare != self.recipe, "compare", "is --recipe too; compare with another one")
        self._check(not self.check or self.compare == BF16, "check", "needs --compare bf16")
        self._check(self.recipe != BF16 or not self.quantized_parameters, "quantized_parameters", "needs FP8 layers")
        self._check(
            not self.graph_fsdp or not self.quantized_parameters, "graph_fsdp", "takes no quantized parameters"
        )
        gathers = self.is_sharded and not self.graph_fsdp and not self.quantized_parameters
        self._check(gathers or not self.bf16_gather, "bf16_gather", "needs --fsdp, and weights in high precision")
        self._check(not self.sp or self.tp > 1, "sp", "needs --tp 2 or more")
        self._check(self.experts or not self.top_k, "top_k", "needs --experts")
        self._check(self.experts or self.ep == 1, "ep", "needs --experts")
        if self.experts:
            self._check(2 <= self.experts <= MAX_EXPERTS, "experts", f"has to be from 2 to {MAX_EXPERTS}")
            self._check(1 <= self.top_k <= self.experts, "top_k", f"has to be from 1 to --experts {self.experts}")
        self._check_multiples()

    def _check_multiples(self) -> None:
        multiples = {"dim": 2 * self.heads, "heads": lcm(self.kv_heads, self.tp), "kv_heads": self.tp}
        if self.experts:
            multiples |= {"experts": self.ep, "ep": self.tp, "hidden": GROUPED_SIZE}
            multiples["dim"] = lcm(multiples["dim"], GROUPED_SIZE)
        else:
            multiples["hidden"] = self.tp
        if self.sp:
            multiples["seq"] = self.tp
        for name, divisor in multiples.items():
            self._check(getattr(self, name) % divisor == 0, name, f"has to be a multiple of {divisor}")

    def _check(self, holds: object, name: str, rule: str) -> None:
        if not holds:
            value = getattr(self, name)
            raise UsageError(f"{_flag(name)}{'' if value is True else f' {value}'} {rule}")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One of a run's trainings. Metrics, checkpoints and columns of the table are named after it."""

    name: str
    recipe: str
    seed: int


def arms(config: TrainConfig) -> tuple[Arm, ...]:
    """The trainings of a run: ``--recipe``, then ``--compare``, then for ``--check`` bf16 with the following seeds."""
    names = [config.recipe] if config.compare is None else [config.recipe, config.compare]
    trained = [Arm(name=name, recipe=name, seed=config.seed) for name in names]
    if config.check:
        seeds = range(config.seed + 1, config.seed + NUM_SPREAD_SEEDS)
        trained += [Arm(name=f"{BF16}-seed{seed}", recipe=BF16, seed=seed) for seed in seeds]
    return tuple(trained)


def _flag(name: str) -> str:
    return "--no-compile" if name == "compile" else "--" + name.replace("_", "-")


def parser() -> argparse.ArgumentParser:
    """A parser with a flag for each field of `TrainConfig`. Its result has only the flags that were given."""
    made = argparse.ArgumentParser(
        prog="examples.train",
        description="Train a small byte-level Llama in FP8 on any text, and show what FP8 did.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    hints = get_type_hints(TrainConfig)
    for each in fields(TrainConfig):
        kind, text = hints[each.name], each.metadata["help"]
        if kind is bool:
            action = "store_false" if each.default else "store_true"
            made.add_argument(_flag(each.name), dest=each.name, action=action, help=text)
            continue
        kind = get_args(kind)[0] if isinstance(kind, types.UnionType) else kind
        shown = text if each.default is None else f"{text} (default {each.default})"
        made.add_argument(_flag(each.name), type=kind, metavar=kind.__name__.upper(), help=shown)
    made.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default runs/<time>)")
    made.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run in this folder")
    return made
