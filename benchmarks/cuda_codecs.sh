#!/usr/bin/env bash
# On a machine with a CUDA device: builds the package, runs the tests of the codecs on the device,
# the same under compute-sanitizer, and the benchmark; if asked to, also beside other libraries' codecs.
# Results go to OUT (default: cuda-results).
#
#   benchmarks/cuda_codecs.sh [build] [test] [sanitize] [bench] [peers]     (default: all but peers)
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out=${OUT:-cuda-results}
steps=${*:-build test sanitize bench}
. benchmarks/steps.sh

pytest() { (cd tests && python3 -m pytest -q -p no:cacheprovider ${PYTEST_ARGS:-} "$@"); }

sanitize() {  # sanitize TOOL: on a part of the suite, since it takes ten to a hundred times as long
  (cd tests && compute-sanitizer --tool "$1" --error-exitcode 9 --print-limit 20 \
    python3 -m pytest -q -x -p no:cacheprovider conformance/test_cuda.py \
    conformance/test_diff_cuda.py -k every_kernel)
}

bench() { python3 -m cccl bench codec --device cuda --json "$@"; }

step build python3 -m pip install --no-build-isolation -C cmake.define.CCCLIB_CUDA=ON .
step test-conformance pytest conformance
step test-api pytest python/test_cuda_api.py
for tool in memcheck racecheck initcheck synccheck; do step "sanitize-$tool" sanitize "$tool"; done
for dtype in float32 bfloat16 float16; do
  step "bench-$dtype" bench --codec all --dtype "$dtype"
  step "bench-$dtype-best" bench --codec block_float4 block_float3 --level best --dtype "$dtype"
  step "bench-$dtype-rotated" bench --codec block_float8 block_float5 block_float4 block_float3 \
    --rotation hadamard --dtype "$dtype"
  step "bench-$dtype-sparse" bench --codec sparse "sparse(block_float8)" --zeros 0.9 --dtype "$dtype"
  step "bench-$dtype-top-k" bench --codec sparse --top-k 0.1 --dtype "$dtype"
done
for dtype in float32 bfloat16 float16; do step "peers-$dtype" bench --dtype "$dtype" --peers; done
for kind in bench peers; do cat "$out/$kind"-*.log 2>/dev/null | grep '^{' >"$out/$kind.json"; done
exit $status
