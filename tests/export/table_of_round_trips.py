"""Every model with every format: what readers find in the folder, and what a model computes that has loaded it.

python tests/export/table_of_round_trips.py    writes docs/results/serving.md; a few minutes
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import numpy as np
import serving_models as models
import serving_readers as readers
import torch
from safetensors import safe_open

import fp8compile as f8
from fp8compile.export.format_table import FORMATS
from fp8compile.export.plan import plan_of
from fp8compile.export.servers import SERVERS, missing_parameters

__all__ = ["CELLS", "COLUMNS", "PAGE", "Cell", "row", "rows_of"]

PAGE = Path(__file__).parents[2] / "docs" / "results" / "serving.md"
KINDS = ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4")
RECIPES = models.RECIPES | {"nvfp4": f8.recipes.nvfp4(weight_block=(1, 16))}
COLUMNS = (
    "weights, float32",
    "weights, bfloat16",
    "transformers, float32",
    "transformers, bfloat16",
    "loaded quantized",
    "converted again",
)
TRANSPOSED = ("gpt_oss", "llama4_text")  # experts are kept as (in_features, out_features)
EQUAL, NO_READER = "equal", "-"


class Cell(NamedTuple):
    """One model in one format.

    Attributes:
        model: Which model.
        form: Name of the format.
        kind: Kind of the codes.
    """

    model: str
    form: str
    kind: str


def _is_there(cell: Cell) -> bool:
    return cell.kind != "static_tensor"  # its scales are those of steps before, and in no folder that is loaded again


CELLS = [
    cell
    for cell in (
        Cell(model, form.name, scheme.kind) for model in KINDS for form in FORMATS.values() for scheme in form.schemes
    )
    if _is_there(cell)
]


def _trained(cell):
    """The model after a step, so that its weights are no longer those of a seed."""
    model = models.converted(models.make(cell.model), RECIPES[cell.kind])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=models.IDS, labels=models.IDS).loss.backward()
    optimizer.step()
    return model


def _stored(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names = file.keys()  # a file is no dict, and can't be iterated
            found.update((name, file.get_tensor(name)) for name in names)
    return readers.as_arrays(found)


def _matrices(model, form, dtype):
    """The values that each matrix of the checkpoint must give, by its name there."""
    values, found = models.wanted(model, dtype), {}
    for weight in plan_of(model, FORMATS[form], unfit="values").weights:
        if weight.scheme is None:
            continue
        whole = values[weight.name].float()
        whole = whole.mT if whole.ndim == 3 and model.config.model_type in TRANSPOSED else whole
        for place in weight.places:
            own = whole if place.expert is None else whole[place.expert]
            found[place.name] = own[place.start : place.stop : place.step].numpy()
    return found


def _read_by_servers(cell, folder, model, dtype):
    stored, wanted = _stored(folder), _matrices(model, cell.form, dtype)
    assert wanted
    wrong = 0
    for name, own in wanted.items():
        found = torch.from_numpy(readers.read(cell.form, cell.kind, stored, name)).to(dtype).float().numpy()
        wrong += not np.array_equal(found, own)
    return EQUAL if not wrong else f"{wrong} of {len(wanted)} differ"


def _from_pretrained(folder, dtype, form):
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    given = {}
    if form == "compressed-tensors":
        given["quantization_config"] = transformers.utils.quantization_config.CompressedTensorsConfig(dequantize=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **given)


def _read_by_transformers(cell, folder, model, dtype):
    """What transformers' own reader finds, and the model that it makes; None if it has none for these codes."""
    has_stacks = cell.model not in ("gpt_oss", "llama4") or (cell.model == "gpt_oss" and cell.kind.startswith("block"))
    reads = cell.form == "fine_grained_fp8" and has_stacks
    reads |= cell == Cell("llama", "compressed-tensors", "channel")
    if not reads:
        return NO_READER, None
    back = _from_pretrained(folder, dtype, cell.form)
    codes = {weight.name for weight in plan_of(model, FORMATS[cell.form], unfit="values").weights if weight.scheme}
    wanted = {name: each for name, each in models.wanted(model, dtype).items() if name in codes}
    wrong = [
        name for name, each in wanted.items() if not torch.equal(back.get_parameter(name).detach().to(dtype), each)
    ]
    return (EQUAL if not wrong else f"{len(wrong)} of {len(wanted)} differ"), back


def _difference(found, wanted):
    most = (found - wanted).abs().max().item()
    return "0" if torch.equal(found, wanted) else f"{most:.2g}"


def row(cell: Cell, folder: Path) -> list[str]:
    """What stands in a cell's row."""
    model, path = _trained(cell), folder / "_".join(cell)
    report = f8.export.save_pretrained(model, path, cell.form, unfit="values" if cell.model == "gpt_oss" else "raise")
    kinds = dict.fromkeys((name for own in report.quantized.values() for name in own), cell.kind)
    architecture = type(model).__name__
    loads = [each for each in SERVERS if not missing_parameters(each, FORMATS[cell.form], kinds, architecture)]
    for server in loads:
        f8.export.check(path, server=server)
    logits = models.logits(model)
    by_servers = [_read_by_servers(cell, path, model, dtype) for dtype in (torch.float32, torch.bfloat16)]
    (first, _), (second, back) = (
        _read_by_transformers(cell, path, model, dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    again = NO_READER
    if back is not None:
        again = _difference(models.logits(models.converted(back, RECIPES[cell.kind])), logits)
    other = models.converted(models.make(cell.model), RECIPES[cell.kind])
    f8.load_quantized(other, path)
    return [*by_servers, first, second, _difference(models.logits(other), logits), again]


def rows_of(page: str) -> dict[Cell, list[str]]:
    """The rows of the page, by their cells."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {Cell(*line[:3]): line[3:] for line in lines[1:]}


HEAD = """# Serving: every model with every format

Written by `tests/export/table_of_round_trips.py`. A tiny model takes a training step, is written by
`f8.export.save_pretrained`, and the folder is read:

- *weights*: all matrices by the arithmetic of vLLM and SGLang, in NumPy
  (`tests/helpers/serving_readers.py` names their files), compared with the dequantized weights of
  training, rounded to that dtype.
- *transformers*: all weights as its own loader returns them. "-": it has no reader for this format.
- *loaded quantized*: the largest difference of logits between the training forward and that of a
  model loaded with `f8.load_quantized`.
- *converted again*: the same for what transformers loaded in bfloat16, converted with the recipe.

gpt-oss interleaves gate and up, so with blocks of 128 x 128 its experts are written in high
precision. Quantized experts of gpt-oss and Llama 4 are linear layers, which transformers' reader of
`fine_grained_fp8` does not look for. Static scales (`delayed`) are in `tests/export/test_readers.py`.
"""


def main() -> None:
    """Run all cells and write the page."""
    lines = ["| model | format | scheme | " + " | ".join(COLUMNS) + " |", "|---" * (3 + len(COLUMNS)) + "|"]
    with tempfile.TemporaryDirectory() as folder:
        for cell in CELLS:
            found = row(cell, Path(folder))
            print(*cell, found, flush=True)
            lines.append("| " + " | ".join([*cell, *found]) + " |")
    import transformers

    today, equal = datetime.now(tz=UTC).date(), sum(line.count("differ") == 0 for line in lines[2:])
    run = f"Run on {today}, PyTorch {torch.__version__}, transformers {transformers.__version__}, on a CPU: "
    run += f"{equal} of {len(CELLS)} rows without a difference of weights."
    PAGE.write_text("\n".join([HEAD, run, "", *lines, ""]))


if __name__ == "__main__":
    main()
