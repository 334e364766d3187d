#!/usr/bin/env bash
# All that needs a GPU, in under 30 minutes: doctor, the tests marked gpu, then the benchmarks; the short tables last.
#
#   benchmarks/gpu_all.sh [--rehearse] [FOLDER FOR LOGS]
#
# Runs from any folder and installs nothing, needs torch >= 2.11 with CUDA, Triton, numpy and pytest; compares with
# torchao where it is installed or its wheel lies in .whl (benchmarks/gpu_wheels.sh). A step that fails or runs out of
# time doesn't stop the others; the script's exit status says whether one did.
#
# With --rehearse no GPU is needed: the same steps, with the same limits, at tiny sizes on a CPU that plays an H200
# (benchmarks/machine.py). Each table says that its numbers mean nothing.
set -u
cd "$(dirname "$0")/.." || exit 2
doctor=()
tests=(-m gpu)
steps=()
kernels=(--only experts)
block=(--rounds 7 --shapes llama3-8b)
gemm=(--rounds 7 --sizes 16384x4096x14336 16384x8192x8192 4096x4096x4096)
train=(--steps 8 --contenders tensorwise rowwise)
compile_time=(--contenders rowwise)
few=(--rounds 7)
overhead=()
import_time=(--runs 3)
if [ "${1:-}" = --rehearse ]; then
    shift
    export FP8COMPILE_REHEARSAL=${FP8COMPILE_REHEARSAL:-program}
    doctor=(--gpu h200 --products)
    tests=() # those of a GPU are skipped, the same bodies run on the CPU
    # a graph's program takes seconds to run: fewer contenders where graphs are large
    block=(--rounds 1 --shapes tiny --contenders rowwise)
    gemm=(--rounds 1 --sizes 64x64x64 32x64x64)
    train=(--steps 1 --contenders rowwise)
    compile_time=(--contenders bf16 --blocks 1 --kinds whole)
    few=(--rounds 1)
    overhead=(--rounds 1 --calls 1)
    import_time=(--runs 1)
    steps=(--rounds 1 --only optimizer)
    kernels=(--only optimizer)
fi
logs=${1:-${OUT:-$(mktemp -d)}}
python=${PYTHON:-python3}
# pytest's plugins of other packages are left out: a warning of theirs would be an error here
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-$(nproc)}
# what a Blackwell GPU multiplies by itself is trained there too
major=$("$python" -c 'import torch; print(torch.cuda.get_device_capability()[0])' 2>/dev/null || echo 0)
[ "$major" -lt 10 ] || train+=(mxfp8 nvfp4)
mkdir -p "$logs" || exit 2
# one process for each of some tests: most of their time is the compiler's
[ ${#tests[@]} = 0 ] || ! "$python" -c 'import xdist' 2>/dev/null || tests+=(-p xdist -n 8)
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

if compgen -G '.whl/*.whl' >/dev/null; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$logs/site" .whl/*.whl || exit 2
    PYTHONPATH=$PYTHONPATH:$logs/site
fi
"$python" -c '
import torch, triton
from benchmarks.machine import machine
assert machine().is_rehearsal or torch.cuda.is_available(), "there is no GPU; try --rehearse"
print("torch", torch.__version__, "triton", triton.__version__, "on", machine().name())' || exit 2
[ -z "${FP8COMPILE_REHEARSAL:-}" ] && "$python" -c 'import torchao' 2>/dev/null && train+=("torchao tensorwise")

step doctor 150 "$python" -m fp8compile doctor "${doctor[@]}"
step tests 240 "$python" -m pytest tests/package/test_gpu.py "${tests[@]}" -q --maxfail=20 --show-capture=no -p no:cacheprovider
step linear 180 "$python" -m benchmarks.linear "${few[@]}"
step block 180 "$python" -m benchmarks.block "${block[@]}"
step gemm 120 "$python" -m benchmarks.gemm "${gemm[@]}"
step train 300 "$python" -m benchmarks.train "${train[@]}"
step gpu_step 240 "$python" -m benchmarks.gpu_step "${steps[@]}"
step gpu_kernels 90 "$python" -m benchmarks.gpu_kernels "${kernels[@]}"
step compile_time 150 "$python" -m benchmarks.compile_time "${compile_time[@]}"
step overhead 45 "$python" -m benchmarks.overhead "${overhead[@]}"
step import_time 45 "$python" -m benchmarks.import_time "${import_time[@]}"

for name in doctor tests linear block gemm train gpu_step gpu_kernels compile_time overhead import_time; do
    printf '\n== %s\n' "$name"
    tail -n 40 "$logs/$name.log"
done
[ ${#failed[@]} = 0 ] || { printf '\nfailed: %s\n' "${failed[*]}"; exit 1; }
