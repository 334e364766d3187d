#!/usr/bin/env bash
# All that needs a GPU, in under 30 minutes: the tests marked gpu, then the benchmarks; the short tables last.
#
#   benchmarks/gpu_all.sh [FOLDER FOR LOGS]
#
# Runs from any folder, needs torch >= 2.11 with CUDA and pytest; compares with torchao where it is installed. A step
# that fails or runs out of time doesn't stop the others; the script's exit status says whether one did.
set -u
cd "$(dirname "$0")/.." || exit 2
logs=${1:-${OUT:-$(mktemp -d)}}
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-$(nproc)}
mkdir -p "$logs" || exit 2
failed=()

# step NAME SECONDS COMMAND...: runs it with a time limit, its output to a log; says how it went
step() {
    local name=$1 seconds=$2 began=$SECONDS
    shift 2
    timeout --kill-after=10 "$seconds" "$@" >"$logs/$name.log" 2>&1
    local status=$?
    echo "$name: $((SECONDS - began)) s, exit status $status$([ $status = 124 ] && echo ' (out of time)')"
    [ $status = 0 ] || { failed+=("$name"); tail -n 25 "$logs/$name.log"; }
}

"$python" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__, torch.cuda.get_device_name())' || exit 2

step tests 300 "$python" -m pytest tests/test_gpu.py -m gpu -q --maxfail=20 --show-capture=no -p no:cacheprovider
step linear 300 "$python" -m benchmarks.linear --rounds 7
step block 240 "$python" -m benchmarks.block --rounds 7 --shapes llama3-8b
step gemm 240 "$python" -m benchmarks.gemm --rounds 7 --sizes 16384x4096x14336 16384x8192x8192 4096x4096x4096
step train 300 "$python" -m benchmarks.train --steps 8 --contenders tensorwise rowwise "torchao tensorwise"
step compile_time 180 "$python" -m benchmarks.compile_time --contenders rowwise
step overhead 60 "$python" -m benchmarks.overhead
step import_time 30 "$python" -m benchmarks.import_time --runs 3

for name in tests linear block gemm train compile_time overhead import_time; do
    printf '\n== %s\n' "$name"
    tail -n 40 "$logs/$name.log"
done
[ ${#failed[@]} = 0 ] || { printf '\nfailed: %s\n' "${failed[*]}"; exit 1; }
