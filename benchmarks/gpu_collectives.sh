#!/usr/bin/env bash
# On a machine with CUDA devices: builds the package, tests collectives over NCCL, and measures them
# between "hosts" with limited links that share one GPU (netlab.py). Results go to OUT.
#
#   benchmarks/gpu_collectives.sh [build] [test] [bench] [overlap] [ddp] [tune]       (default: all of them)
#
# DEBS: a folder with the .deb files of iproute2, where `ip` and `tc` are not installed. CUDA MPS lets
# the hosts' kernels run side by side; fault tests run without it.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-gpu-results}
steps=${*:-build test bench overlap ddp tune}
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

lab() {  # lab HOSTS RATE COMMAND...
  local hosts=$1 rate=$2
  shift 2
  python3 benchmarks/netlab.py run --hosts "$hosts" --rate "$rate" --mtu 9000 --timeout 120 -- "$@"
}

collective() {  # collective HOSTS RATE NUMEL... : bf16, 8 and 4 bits, beside plain NCCL
  local hosts=$1 rate=$2
  shift 2
  with_mps lab "$hosts" "$rate" python3 -m cccl bench collective --device cuda --dtype bfloat16 \
    --repeats "${REPEATS:-7}" --json --numel "$@"
}

pytest() { (cd tests && timeout "${LIMIT:-300}" python3 -m pytest -q -p no:cacheprovider "$@"); }

install_iproute2
step build python3 -m pip install --no-build-isolation -C cmake.define.CCCLIB_CUDA=ON \
  -C cmake.define.CMAKE_CUDA_ARCHITECTURES=90 .
step test-collectives pytest distributed/test_gpu_collectives.py
step test-ddp pytest distributed/test_gpu_ddp.py
step test-failures pytest distributed/test_gpu_failures.py
for hosts in 2 4; do
  for rate in ${RATES:-10gbit 1gbit}; do
    step "bench-$hosts-$rate" collective "$hosts" "$rate" ${NUMEL:-33554432}
  done
done
for hosts in 2 4; do
  step "overlap-$hosts" with_mps lab "$hosts" 10gbit python3 benchmarks/gpu_overlap.py
done
step ddp with_mps lab "${DDP_HOSTS:-4}" "${DDP_RATE:-10gbit}" python3 benchmarks/gpu_ddp.py --json ${DDP_ARGS:-}
for hosts in ${TUNE_HOSTS:-2 4}; do
  step "tune-$hosts" with_mps lab "$hosts" "${TUNE_RATE:-10gbit}" python3 benchmarks/gpu_tuning.py ${TUNE_ARGS:-}
done
cat "$out"/ddp.log 2>/dev/null | grep -o '{"way".*' >"$out/ddp.json"
cat "$out"/bench-*.log 2>/dev/null | grep -oh '{"collective".*' >"$out/collectives.json"
exit $status
