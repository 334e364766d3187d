#!/usr/bin/env bash
# Collects wheels for a machine with a GPU and no network: what gpu_all.sh compares with, and what else is named.
#
#   benchmarks/gpu_wheels.sh [PACKAGE==VERSION ...]
#
# They go to .whl, for Python 3.12 on x86-64 Linux; PYTHON_VERSION names another Python. gpu_all.sh installs them for
# its own run, without what they depend on, so name that too. PyTorch, Triton, numpy and pytest must be there already.
set -eu
cd "$(dirname "$0")/.."
platforms=()
for each in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${each}_x86_64")
done
torchao=$(grep -o 'torchao==[0-9.]*' pyproject.toml)
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
    --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" --dest .whl "$torchao" "$@"
ls -l .whl
