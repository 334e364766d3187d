"""A byte-level Llama trained in FP8 beside bf16, on one process or on many: ``python -m examples.train --help``."""
