"""`fp8compile train`: its flags. Nothing here loads PyTorch; training.py does the work."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import fields
from pathlib import Path

from fp8compile import recipes
from fp8compile.cli.errors import UserError
from fp8compile.cli.train.config import TrainConfig

__all__ = ["add_parser"]

DESCRIPTION = """
Train a small byte-level Llama in FP8 on any text, by default the sources of Python's own standard
library, and show what FP8 did: losses, pace, memory, graphs, and which GEMMs ran in FP8.
"""
NEEDED = ("rich", "matplotlib")
# Flag, type, help; the default comes from TrainConfig.
VALUES = (
    ("--recipe", str, f"{', '.join(recipes.names())}, an installed package's, or bf16 for no conversion"),
    ("--compare", str, "train this one too, from the same seed and batches: bf16"),
    ("--dim", int, "width of the model"),
    ("--layers", int, "number of blocks"),
    ("--heads", int, "query heads"),
    ("--kv-heads", int, "key and value heads"),
    ("--hidden", int, "width of the feed-forward layers, or of each expert"),
    ("--experts", int, "experts of each feed-forward layer, 0 for none"),
    ("--top-k", int, "with --experts: to how many of them each byte goes"),
    ("--seq", int, "bytes in a sequence"),
    ("--batch", int, "sequences in a batch"),
    ("--steps", int, "updates"),
    ("--lr", float, "peak learning rate"),
    ("--backend", str, "backend of torch.compile"),
    ("--seed", int, "decides initial weights and the order of the data"),
    ("--eval-every", int, "steps between evaluations"),
    ("--eval-sequences", int, "held-out sequences of an evaluation"),
    ("--checkpoint-every", int, "steps between checkpoints"),
    ("--tp", int, "processes to cut the model over; torchrun starts them"),
    ("--ep", int, "with --experts: processes to spread experts over, which share the batch; torchrun starts them"),
)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand.

    Args:
        subparsers: Of the ``fp8compile`` command.
    """
    # No defaults: what is in the namespace was typed, which --resume has to know.
    parser = subparsers.add_parser(
        "train",
        help="train a small model in FP8 and show what ran",
        description=DESCRIPTION,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    defaults = {field.name: field.default for field in fields(TrainConfig)}
    for flag, kind, text in VALUES:
        default = defaults[flag[2:].replace("-", "_")]
        shown = "" if default is None else f" (default {default})"
        parser.add_argument(flag, type=kind, metavar=kind.__name__.upper(), help=text + shown)
    parser.add_argument("--data", metavar="PATH", help="file or folder with text")
    parser.add_argument("--threads", type=int, metavar="INT", help="CPU threads (default PyTorch's)")
    parser.add_argument("--device", metavar="NAME", help="device (default cuda if there, else cpu)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="run without torch.compile")
    parser.add_argument("--qk-norm", action="store_true", help="normalize queries and keys, head by head")
    parser.add_argument("--sp", action="store_true", help="with --tp: cut the sequence too, between matrix products")
    parser.add_argument(
        "--fsdp", action="store_true", help="shard parameters and batch over the processes of torchrun"
    )
    parser.add_argument("--hsdp", action="store_true", help="like --fsdp, with two replicas of the shards")
    parser.add_argument(
        "--quantized-parameters", action="store_true", help="weights are codes, with float32 masters in the optimizer"
    )
    parser.add_argument("--graph-fsdp", action="store_true", help="like --fsdp, with all that is sent in one graph")
    parser.add_argument(
        "--check",
        action="store_true",
        help="judge FP8 against bf16 over three seeds; exit code 1 if it fails",
    )
    parser.add_argument("--out", metavar="DIR", help="folder of the run (default runs/<time>)")
    parser.add_argument("--resume", metavar="DIR", help="go on with the run in this folder")
    parser.set_defaults(run=_run)


def _explicit(parsed: argparse.Namespace) -> dict[str, object]:
    names = {field.name for field in fields(TrainConfig)}
    explicit = {name: value for name, value in vars(parsed).items() if name in names}
    if "data" in explicit:
        # Resuming from another working directory must find the same text.
        explicit["data"] = str(Path(explicit["data"]).expanduser().absolute())
    if "threads" in explicit and explicit["threads"] < 1:
        raise UserError(f"--threads is {explicit['threads']}; it has to be at least 1")
    if "compile" in explicit and "backend" in explicit:
        raise UserError("--backend is one of torch.compile's, against --no-compile; leave one out")
    return explicit


def _run(parsed: argparse.Namespace) -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{' and '.join(missing)} missing; pip install {' '.join(missing)}")
    from fp8compile.cli.train.ranks import joined
    from fp8compile.cli.train.training import resumed_run, start_run

    with joined() as ranks:
        explicit = _explicit(parsed)
        out, resume = getattr(parsed, "out", None), getattr(parsed, "resume", None)
        if resume is not None and out is not None:
            raise UserError("--resume writes to the run's own folder; leave --out out")
        if resume is not None:
            return resumed_run(Path(resume), explicit, ranks)
        return start_run(TrainConfig(**explicit), None if out is None else Path(out), ranks)
