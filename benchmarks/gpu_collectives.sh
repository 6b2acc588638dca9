#!/usr/bin/env bash
# On a machine with CUDA devices: builds the package, tests collectives over NCCL, and measures them
# between "hosts" with limited links that share one GPU (netlab.py). Results go to OUT.
#
#   benchmarks/gpu_collectives.sh [STEP...]
#   (default: all of build test sanitize bench cast sockets weights gpus overlap hierarchy backend ddp
#   tune)
#
# DEBS: a folder with the .deb files of iproute2, where `ip` and `tc` are not installed. CUDA MPS lets
# the hosts' kernels run side by side; fault tests run without it.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out=${OUT:-gpu-results}
steps=${*:-build test sanitize bench cast sockets weights gpus overlap hierarchy backend ddp tune}
. benchmarks/steps.sh

install_iproute2() {  # into a folder, run through its own loader, so that children inherit nothing
  [ -n "${DEBS:-}" ] && ! command -v tc >/dev/null || return 0
  local root=/opt/iproute2 tool libs
  mkdir -p $root
  for deb in "$DEBS"/*.deb; do dpkg -x "$deb" $root; done
  libs=$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu
  for tool in bin/ip sbin/tc; do
    printf '#!/bin/sh\nexec /lib64/ld-linux-x86-64.so.2 --library-path %s %s "$@"\n' \
      "$libs" "$root/$tool" >"/usr/local/bin/${tool#*/}"
    chmod +x "/usr/local/bin/${tool#*/}"
  done
}

with_mps() {  # and with the connections to the device that a process has without it
  export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log
  mkdir -p $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY
  nvidia-cuda-mps-control -d
  CUDA_DEVICE_MAX_CONNECTIONS=8 "$@"
  local result=$?
  echo quit | nvidia-cuda-mps-control
  return $result
}

lab() {  # lab HOSTS RATE COMMAND... ; RATE "none": links without a limit
  local hosts=$1 rate=$2 limit=()
  shift 2
  [ "$rate" = none ] || limit=(--rate "$rate")
  python3 benchmarks/netlab.py run --hosts "$hosts" --per-host "${PER_HOST:-1}" "${limit[@]}" \
    --mtu 9000 --timeout "${LAB_LIMIT:-120}" -- "$@"
}

collective() {  # collective HOSTS RATE ARGUMENT... : beside plain NCCL
  local hosts=$1 rate=$2
  shift 2
  with_mps lab "$hosts" "$rate" python3 -m cccl bench collective --device cuda \
    --repeats "${REPEATS:-5}" --json "$@"
}

# bf16, from 1 KiB to as much as a link takes along in seconds. Is auto never slower than plain?
sizes() {  # sizes RATE
  local some="1KiB 16KiB 256KiB 2MiB"
  if [ "$1" = 100mbit ]; then echo "$some"; else echo "$some 16MiB 64MiB 256MiB"; fi
}

bench() {  # bench HOSTS RATE
  with_mps lab "$1" "$2" python3 benchmarks/auto.py --device cuda --dtype bfloat16 \
    --beside block_float4 --seconds "${SECONDS_EACH:-1}" --sizes ${SIZES:-$(sizes "$2")} --json
}

# 64 MiB of float32, for which a cast is a codec too.
cast() { collective "$1" "$2" --codec cast_bf16 block_float8 block_float4 --numel 16777216; }

# Without a limit: threads and sockets of each for NCCL, ours too.
sockets() {  # sockets HOSTS THREADS SOCKETS
  NCCL_SOCKET_NTHREADS=$2 NCCL_NSOCKS_PERTHREAD=$3 collective "$1" none --dtype bfloat16 \
    --codec block_float8 block_float4 --numel 33554432
}

# Two hosts with two ranks each: plain, compressed, and in legs.
hierarchy() {
  PER_HOST=2 with_mps lab 2 10gbit python3 benchmarks/hierarchy.py --device cuda --json "$@"
}

# A trained model's weights, 256 MiB of bf16 without losing a bit, beside plain NCCL.
weights() {  # weights HOSTS RATE
  local file=$out/weights.npy collective window chunk
  [ -f "$file" ] || python3 benchmarks/lossless.py --size small --save "$file" || return
  for collective in broadcast all_gather; do
    for window in ${WINDOWS:-2 3}; do
      for chunk in ${CHUNKS:-auto 4MiB 8MiB}; do
        echo "$collective on $1 hosts, window $window, chunk $chunk"
        lab "$1" "$2" python3 -m cccl bench collective --device cuda --dtype bfloat16 --json \
          --codec lossless --collective "$collective" --window "$window" --chunk-size "$chunk" \
          --numel "${WEIGHTS_NUMEL:-134217728}" --input "$file" --repeats "${REPEATS:-7}" || return
      done
    done
  done
}

# Between the GPUs of this machine, if it has several: NVLink, or whatever NCCL finds.
between_gpus() {
  torchrun --standalone --nproc-per-node gpu -m cccl bench collective --device cuda --dtype bfloat16 \
    --codec auto block_float8 block_float4 --repeats "${REPEATS:-7}" --json \
    --numel 512 131072 8388608 33554432 134217728 536870912
}

pytest() {
  (cd tests && timeout "${LIMIT:-300}" python3 -m pytest -q -p no:cacheprovider ${PYTEST_ARGS:-} "$@")
}

# Over a collective of all ranks, eager and in a graph. NCCL asks for kernels that an architecture does
# not have: what the driver answers is no error here.
compute_sanitizer() {
  (cd tests && compute-sanitizer --target-processes all --report-api-errors no --error-exitcode 9 \
    --print-limit 20 \
    python3 -m pytest -q -p no:cacheprovider distributed/test_gpu_collectives.py -k "graph and replays")
}

install_iproute2
step build python3 -m pip install --no-build-isolation -C cmake.define.CCCLIB_CUDA=ON \
  -C cmake.define.CMAKE_CUDA_ARCHITECTURES=90 .
mapfile -t gpu_tests < <(cd tests && ls distributed/test_gpu_*.py)
step test pytest "${gpu_tests[@]}"
step sanitize compute_sanitizer
for hosts in 2 4; do
  for rate in ${RATES:-100mbit 1gbit 10gbit 20gbit none}; do
    step "bench-$hosts-$rate" bench "$hosts" "$rate"
  done
  step "cast-$hosts-10gbit" cast "$hosts" 10gbit
  for settings in ${SOCKETS:-4x4 8x8}; do
    step "sockets-$hosts-none-$settings" sockets "$hosts" "${settings%x*}" "${settings#*x}"
  done
done
for hosts in ${WEIGHTS_HOSTS:-2 4}; do
  step "weights-$hosts" with_mps weights "$hosts" "${WEIGHTS_RATE:-10gbit}"
done
if [ "$(nvidia-smi --list-gpus | wc -l)" -gt 1 ]; then step gpus between_gpus; fi
for hosts in 2 4; do
  step "overlap-$hosts" with_mps lab "$hosts" 10gbit python3 benchmarks/gpu_overlap.py
done
step hierarchy hierarchy --mib 64
step backend-calls with_mps lab 2 10gbit python3 benchmarks/backend.py --device cuda calls
step backend-ddp with_mps lab 2 10gbit python3 benchmarks/backend.py --device cuda ddp --mib 128
step ddp with_mps lab "${DDP_HOSTS:-4}" "${DDP_RATE:-10gbit}" python3 benchmarks/gpu_ddp.py --json ${DDP_ARGS:-}
for hosts in ${TUNE_HOSTS:-2 4}; do
  step "tune-$hosts" with_mps lab "$hosts" "${TUNE_RATE:-10gbit}" python3 benchmarks/gpu_tuning.py ${TUNE_ARGS:-}
done
for log in "$out"/*.log; do  # gpu_report.py makes tables and figures of these
  grep -o '{"\(way\|collective\|codec\|mib\)".*' "$log" >"${log%.log}.json" || rm "${log%.log}.json"
done
exit $status
