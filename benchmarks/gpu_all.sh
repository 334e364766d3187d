#!/usr/bin/env bash
# All that needs a GPU, in under 9 minutes: the tests marked gpu, then the benchmarks; the short tables last.
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

step tests 240 "$python" -m pytest tests/test_gpu.py -m gpu -q --maxfail=20 --show-capture=no -p no:cacheprovider
step linear 180 "$python" -m benchmarks.linear --rounds 7 --sizes 8192x4096x14336 16384x8192x8192
step kernels 60 "$python" -m benchmarks.kernels
step saved_bytes 20 "$python" -m benchmarks.saved_bytes
step import_time 20 "$python" -m benchmarks.import_time --runs 3

for name in tests linear kernels saved_bytes import_time; do
    printf '\n== %s\n' "$name"
    tail -n 40 "$logs/$name.log"
done
[ ${#failed[@]} = 0 ] || { printf '\nfailed: %s\n' "${failed[*]}"; exit 1; }
