"""The configuration of a training run: what the flags say, checked, and what config.json keeps."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, get_args, get_type_hints

from fp8compile.cli.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BF16", "Arm", "TrainConfig", "arms", "config_from_json", "extended"]

BF16 = "bf16"
# The criterion compares with bf16 over this many seeds: the number.
NUM_SPREAD_SEEDS = 3
# AdamW counts steps in float32; products of two such sizes are numbers of bytes that PyTorch can refuse.
AT_MOST = {
    **dict.fromkeys(("dim", "layers", "heads", "kv_heads", "hidden", "seq", "batch", "steps", "tp", "ep"), 2**24),
    **dict.fromkeys(("eval_every", "eval_sequences", "checkpoint_every"), math.inf),
}
MOST_EXPERTS = 1024  # PyTorch's grouped GEMMs take no more groups on a GPU
MAX_THREADS = max(1024, os.cpu_count() or 1)  # at some 30,000 OpenMP ends the process


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides the numbers of a run.

    The defaults are the preset of the criterion: on two CPU cores rowwise and bf16 together take
    less than four minutes, and the model gets well past counting triples of bytes.

    Attributes:
        recipe: Name of a recipe, or "bf16" for no conversion.
        compare: Recipe trained after it from the same seed and batches; None for none.
        check: Whether to judge the criterion, which trains bf16 on two seeds more.
        data: Absolute path of a file or folder; None for the standard library's sources.
        dim: Width of the model.
        layers: Number of blocks.
        heads: Query heads.
        kv_heads: Key and value heads.
        hidden: Width of the feed-forward layers, or of each expert.
        experts: Experts of each feed-forward layer; 0 for none.
        top_k: To how many of them each byte goes; 0 without experts.
        qk_norm: Whether queries and keys are normalized, head by head.
        seq: Bytes in a sequence.
        batch: Sequences in a batch.
        steps: Updates.
        lr: Peak learning rate.
        compile: Whether to use ``torch.compile(fullgraph=True)``.
        backend: Backend of ``torch.compile``.
        seed: Decides initial weights and the order of the data.
        eval_every: Steps between evaluations; there is one at the end in any case.
        eval_sequences: Held-out sequences of an evaluation.
        checkpoint_every: Steps between checkpoints; there is one at the end in any case.
        threads: CPU threads; 0 is replaced by what PyTorch uses on its own.
        device: Device; "" is replaced by "cuda" where there is one, else "cpu".
        tp: Processes that the model is cut over.
        ep: Processes that experts are spread over, which share the batch too; of more, each ep have all experts.
        sp: Whether they cut the sequence, too, between its matrix products.
        fsdp: Whether parameters and batch are sharded over processes.
        hsdp: Whether there are two replicas of these shards; implies ``fsdp``.
        graph_fsdp: Whether what ranks send is in the graph of the whole model; implies ``fsdp``.
        quantized_parameters: Whether weights of FP8 layers are codes, with float32 masters in the optimizer.
        dp: Processes, or groups of ``tp`` of them, that share the batch; 0 is replaced by how many were started.

    Raises:
        UserError: A value that no run can have.
    """

    recipe: str = "rowwise"
    compare: str | None = None
    check: bool = False
    data: str | None = None
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 384
    experts: int = 0
    top_k: int = 0
    qk_norm: bool = False
    seq: int = 128
    batch: int = 16
    steps: int = 300
    lr: float = 3e-3
    compile: bool = True
    backend: str = "inductor"
    seed: int = 0
    eval_every: int = 100
    eval_sequences: int = 256
    checkpoint_every: int = 100
    threads: int = 0
    device: str = ""
    tp: int = 1
    ep: int = 1
    sp: bool = False
    fsdp: bool = False
    hsdp: bool = False
    graph_fsdp: bool = False
    quantized_parameters: bool = False
    dp: int = 0

    @property
    def blocks_apart(self) -> bool:
        """Whether stock FSDP2 has the parameters, and blocks are compiled each by itself."""
        return (self.fsdp or self.dp > 1) and not self.graph_fsdp

    def __post_init__(self) -> None:
        """Check what needs no PyTorch."""
        object.__setattr__(self, "fsdp", self.fsdp or self.hsdp or self.graph_fsdp)
        for name, most in AT_MOST.items():
            value = getattr(self, name)
            if not 1 <= value <= most:
                bound = "at least 1" if value < 1 else f"at most {most}"
                raise UserError(f"{_flag(name)} is {value}; it has to be {bound}")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise UserError(f"--lr is {self.lr}; it has to be a positive number")
        if not 0 <= self.seed < 2**62:
            raise UserError(f"--seed is {self.seed}; it has to be from 0 to 2**62 - 1")
        if not 0 <= self.threads <= MAX_THREADS:
            raise UserError(f"--threads is {self.threads}; it has to be from 1 to {MAX_THREADS}")
        if self.compare == self.recipe:
            raise UserError(f"--compare {self.compare} is --recipe too; compare with another one")
        if self.check and self.compare != BF16:
            raise UserError("--check judges a recipe against bf16; add --compare bf16")
        self._check_experts()
        self._check_cuts()
        if self.quantized_parameters:
            self._check_quantized_parameters()

    def _check_ep(self) -> None:
        if self.ep == 1:
            return
        if self.experts % self.ep or not self.experts:
            raise UserError(
                f"--ep is {self.ep} and --experts {self.experts}; each process has as many experts, so make --experts "
                f"a multiple of {self.ep}"
            )
        if self.ep % self.tp:
            raise UserError(
                f"--ep is {self.ep} and --tp {self.tp}; of the processes that experts are spread over as many as --tp "
                f"have the same rows, so make --ep a multiple of {self.tp}"
            )

    def _check_experts(self) -> None:
        self._check_ep()
        if self.experts == 0 and self.top_k == 0:
            return
        if self.experts == 0:
            raise UserError(f"--top-k is {self.top_k}, and there are no experts; add --experts, or leave it out")
        if not 2 <= self.experts <= MOST_EXPERTS:
            raise UserError(f"--experts is {self.experts}; it has to be from 2 to {MOST_EXPERTS}")
        if not 1 <= self.top_k <= self.experts:
            raise UserError(
                f"--top-k is {self.top_k}; it says to how many of --experts {self.experts} each byte goes, and has to "
                f"be from 1 to {self.experts}"
            )
        if self.tp > 1 and self.ep == 1:
            raise UserError(
                f"--tp {self.tp} cuts the attention, and no experts; add --ep {self.tp}, or a multiple of it, to "
                "spread them over processes"
            )

    def _check_quantized_parameters(self) -> None:
        if self.recipe == BF16:
            raise UserError("--quantized-parameters are those of FP8 layers, of which --recipe bf16 has none")
        if self.graph_fsdp:
            raise UserError(
                "--quantized-parameters doesn't go with --graph-fsdp, which takes weights in high precision; leave "
                "one of them out"
            )

    def _check_cuts(self) -> None:
        if self.sp and self.tp == 1:
            raise UserError("--sp cuts the sequence over the processes of --tp; add --tp 2, or more")
        features = () if self.experts else ("hidden",)
        for name in ("heads", "kv_heads", *features, *(("seq",) if self.sp else ())):
            if getattr(self, name) % self.tp:
                raise UserError(
                    f"{_flag(name)} is {getattr(self, name)}, and each of --tp {self.tp} processes takes as many; it "
                    f"has to be a multiple of {self.tp}"
                )
        if self.dp and self.batch % self.dp:
            flag = "--hsdp" if self.hsdp else "--ep" if self.ep > 1 else "--fsdp"
            raise UserError(
                f"--batch is {self.batch}, and {self.dp} processes{f' of --tp {self.tp} each' if self.tp > 1 else ''} "
                f"share it by {flag}; it has to be a multiple of {self.dp}"
            )


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One of the trainings of a run.

    Attributes:
        name: What rows, files and columns call it.
        recipe: Name of its recipe.
        seed: Its seed.
    """

    name: str
    recipe: str
    seed: int


def _flag(field: str) -> str:
    return "--no-compile" if field == "compile" else "--" + field.replace("_", "-")


def _shown(field: str, value: object) -> str:
    return _flag(field) if isinstance(value, bool) else f"{_flag(field)} {value}"


def arms(config: TrainConfig) -> tuple[Arm, ...]:
    """Return the trainings of a run, in their order.

    Args:
        config: The run's configuration.

    Returns:
        The recipe, what it is compared with, and for a check bf16 on the seeds that follow.
    """
    names = [config.recipe] if config.compare is None else [config.recipe, config.compare]
    trained = [Arm(name=name, recipe=name, seed=config.seed) for name in names]
    if config.check:
        seeds = range(config.seed + 1, config.seed + NUM_SPREAD_SEEDS)
        trained += [Arm(name=f"{BF16}-seed{seed}", recipe=BF16, seed=seed) for seed in seeds]
    return tuple(trained)


def _check_types(stored: object) -> None:
    hints = get_type_hints(TrainConfig)
    if not isinstance(stored, dict) or stored.keys() != hints.keys():
        raise UserError("its train is not from this version of fp8compile; start a new run")
    for name, hint in hints.items():
        kinds = get_args(hint) or (hint,)
        if type(stored[name]) not in kinds:
            wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise UserError(f"{name} is a {type(stored[name]).__name__}; it is {wanted}")


def config_from_json(stored: object, path: Path) -> TrainConfig:
    """Build the configuration that config.json holds.

    Args:
        stored: The parsed object.
        path: Of the file.

    Returns:
        The configuration.

    Raises:
        UserError: It is not one that this version wrote.
    """
    try:
        _check_types(stored)
        return TrainConfig(**stored)
    except UserError as error:
        raise UserError(f"cannot use {path}: {error}") from error


def extended(config: TrainConfig, explicit: dict[str, object]) -> TrainConfig:
    """Apply the flags given beside --resume.

    Args:
        config: The run's configuration.
        explicit: Fields whose flags were typed.

    Returns:
        The configuration, with more steps if asked.

    Raises:
        UserError: A flag says something else than the run, other than more steps.
    """
    given = dict(explicit)
    steps = given.pop("steps", config.steps)
    stored = asdict(config)
    conflicts = [
        f"{_shown(name, value)} (the run has {stored[name]})" for name, value in given.items() if value != stored[name]
    ]
    if steps < config.steps:
        conflicts.append(f"--steps {steps} (the run has {config.steps}; it can only be extended)")
    if conflicts:
        raise UserError(f"--resume goes on as the run began, which {', '.join(conflicts)} contradicts; leave it out")
    return TrainConfig(**{**stored, "steps": steps})
