# make train   install into .venv, train FP8 beside bf16, print the table
# make test    install into .venv, lint, run the quick tests
# .ci/run      make test, then a slice of the slow tests and of another PyTorch (what CI runs)

PYTHON ?= python3.11
VENV ?= .venv
# The build of PyTorch to install. Only this one package decides whether CUDA comes along.
TORCH ?= torch==2.13.0
# Its Triton, which a CPU build leaves out; for the generated GPU code. Empty with a CUDA build, which brings its own.
TRITON ?= triton==3.7.1
WORKERS ?= 2
# Of `make test-slice`: which tests, into how many slices of equal duration, and which of them runs.
MARK ?= slow
SLICES ?= 8
SLICE ?= 1

BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
DURATIONS := --durations-path tests/durations.json
# The Python of `make gpu`: this one if it is installed, else the machine's.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
INSTALLED := $(VENV)/.installed

.PHONY: install train test test-full test-slice durations lint docs release gpu gpu-rehearsal gpu-decide gpu-wheels clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)" $(TRITON)
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

train: $(INSTALLED)
	$(BIN)/python -m examples.train --recipe rowwise --compare bf16 --check --layers 3 --steps 200

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m benchmarks.house --budget

test: lint
	$(PYTEST) -m "not slow" --durations 25

test-full: lint
	$(PYTEST)

test-slice: $(INSTALLED)
	$(PYTEST) -m "$(MARK)" --splits $(SLICES) --group $(SLICE) --splitting-algorithm least_duration $(DURATIONS)

# how long each slow test takes, for slices of equal duration; two hours on 2 quiet cores
durations: $(INSTALLED)
	$(PYTEST) -m slow --store-durations --clean-durations $(DURATIONS)

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# dist/, built and installed beside each PyTorch; takes 10 GB of disk for a while
release:
	PYTHON=$(PYTHON) bash .ci/release

# installs nothing: a machine that is lent with a GPU has its own PyTorch, and often no network
gpu gpu-rehearsal:
	PYTHON=$(GPU_PYTHON) bash benchmarks/gpu_all.sh $(if $(filter gpu-rehearsal,$@),--rehearse)

# which kernels to change: 15 minutes of timings, the most valuable first; DECIDE=--dry-run tries it without a GPU
gpu-decide:
	PYTHONPATH=$(CURDIR) $(GPU_PYTHON) -m benchmarks.gpu_decide $(DECIDE)

gpu-wheels:
	PYTHON=$(GPU_PYTHON) bash benchmarks/gpu_wheels.sh

clean:
	rm -rf $(VENV) .venv-* dist build runs site .pytest_cache .ruff_cache .mypy_cache
