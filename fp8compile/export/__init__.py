"""Export for serving: write checkpoints that inference servers load, with the quantized weights of training.

    model --plan.py: what is written, and how--> stream.py: tensors, layer by layer --> save.py: a folder --> check.py

    scheme.py            the kinds of quantized weights; Format and Scheme: how a format stores a kind
    fine_grained.py, compressed_tensors.py, modelopt.py    the formats
    format_table.py      the formats by name
    servers.py           which parameters each server has
    checkpoint_names.py  where each matrix of a parameter goes in a checkpoint
    whole_weights.py     gathers a sharded parameter: whole values, or whole matrices of codes
    whole_matrix.py      fills a whole matrix of codes: each rank quantizes its shard, tile by tile
    fill_whole_tensor.py position of a rank's shard in the whole tensor, and exchange of shards
    write_folder.py      writes files to a temporary folder, and then renames it
    read_folder.py       tensors of a folder's files
    load.py              loads a folder into the parameters of a model
    program.py           the forward as a graph of PyTorch's operators

Code for one format goes into that format's file; code for particular models goes into `plan.py`.
"""

from fp8compile.export.check import CheckReport, check
from fp8compile.export.load import LoadReport, load_quantized
from fp8compile.export.program import program
from fp8compile.export.save import ExportReport, save_pretrained
from fp8compile.export.stream import tensors

__all__ = [
    "CheckReport",
    "ExportReport",
    "LoadReport",
    "check",
    "load_quantized",
    "program",
    "save_pretrained",
    "tensors",
]
