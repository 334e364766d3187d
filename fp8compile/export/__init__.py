"""From training to serving: checkpoints that servers load, with the codes and scales that training has.

    model --plan.py: what is written, and how--> stream.py: tensors, layer by layer --> save.py: a folder --> check.py

    scheme.py            the kinds of quantized weights; Format and Scheme: how a format stores a kind
    fine_grained.py, compressed_tensors.py, modelopt.py, torchao.py    the formats
    format_table.py      the formats by name
    checkpoint_names.py  where each matrix of a parameter goes in a checkpoint
    whole_weights.py     a parameter over ranks as whole tensors
    whole_matrix.py      a matrix that ranks quantize into, a tile at a time
    fill_whole_tensor.py where a rank's part lies in a whole, and how the parts are sent
    write_folder.py      files that are written beside their place and renamed
    read_folder.py       tensors of a folder's files
    load.py              a folder that becomes the parameters of a model
    program.py           the forward as a graph of PyTorch's operators

All that is specific to one format goes into that format's file; all that is specific to models goes into `plan.py`.
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
