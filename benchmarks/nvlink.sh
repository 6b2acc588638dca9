#!/usr/bin/env bash
# On a host with several GPUs: builds the package, tests it between them, and measures collectives and
# training over NVLink. Under 9 minutes with 2 GPUs. Results, JSON and a figure, go to OUT.
#
#   benchmarks/nvlink.sh [STEP...]
#   (default: build test bench off ddp fsdp hierarchy)
#
# DEBS: as for gpu_collectives.sh, for `hierarchy`, whose slow links between two groups of the GPUs
# netlab makes.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out=${OUT:-nvlink-results}
steps=${*:-build test bench off ddp fsdp hierarchy}
. benchmarks/steps.sh

ranks() { torchrun --standalone --nproc-per-node gpu "$@"; }

tests() {  # each its own group of processes on the same GPUs
  local file pids=() failed=0
  for file in direct collectives ddp backend failures; do
    (cd tests && timeout "${LIMIT:-170}" python3 -m pytest -q -p no:cacheprovider \
      "distributed/test_gpu_$file.py" ${PYTEST_ARGS:-}) >"$out/test-$file.txt" 2>&1 &
    pids+=($!)
  done
  for file in "${pids[@]}"; do wait "$file" || failed=1; done
  tail -n 3 "$out"/test-*.txt
  return $failed
}

bench() { ranks benchmarks/nvlink.py --json "$@"; }

step build python3 -m pip install --no-build-isolation -C cmake.define.CCCLIB_CUDA=ON \
  -C cmake.define.CMAKE_CUDA_ARCHITECTURES=90 .
step test tests
step bench bench
step off bench --peer-memory off --collectives all_reduce --sizes 16MiB 64MiB 256MiB --rounds 3
step ddp ranks benchmarks/gpu_ddp.py --json --model 1b --steps 15
step fsdp ranks benchmarks/gpu_ddp.py --json --model 1b --steps 15 --sharded
step hierarchy env OUT="$out/hierarchy" benchmarks/gpu_collectives.sh hierarchy
for log in "$out"/*.log; do
  grep -o '{"\(way\|collective\)".*' "$log" >"${log%.log}.json" || rm "${log%.log}.json"
done
if [ -s "$out/bench.json" ]; then
  python3 benchmarks/nvlink.py --report "$out/bench.json" --figure "$out/nvlink.png" >"$out/bench.md"
fi
exit $status
