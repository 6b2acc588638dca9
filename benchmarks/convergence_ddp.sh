#!/usr/bin/env bash
# Paired trainings with real DDP ranks for the survey's final claims: 2 ranks that share a GPU, or a
# CPU's cores. One report per codec, in OUTPUT/CODEC; codecs run at the same time.
#
#   WORKLOAD=gpt-medium STEPS=600 SEEDS=5 DEVICE=cuda benchmarks/convergence_ddp.sh OUTPUT \
#     block_float8 block_float4
set -euo pipefail
if (($# < 2)); then
  echo "usage: $0 OUTPUT CODEC..." >&2
  exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
export WORKLOAD=${WORKLOAD:-gpt-medium} STEPS=${STEPS:-600}
# NCCL takes ranks on one GPU for hosts apart, and sends over sockets.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} OMP_NUM_THREADS=1
output=$1
shift
mkdir -p "$output"
running=()
for codec in "$@"; do
  # shellcheck disable=SC2016  # RANK is each rank's own
  torchrun --standalone --nproc-per-node "${RANKS:-2}" --no-python bash -c \
    'NCCL_HOSTID=rank-$RANK exec python -m cccl converge run "$@"' converge \
    "$here/convergence/ddp.py:Training" --codec "$codec" --seeds "${SEEDS:-5}" --steps "$STEPS" \
    --device "${DEVICE:-cpu}" --output "$output/$codec" >"$output/$codec.log" 2>&1 &
  running+=($!)
done
for one in "${running[@]}"; do
  wait "$one" || {
    tail -n 20 "$output"/*.log >&2
    exit 1
  }
done
for codec in "$@"; do
  echo "$codec"
  python -m cccl converge report "$output/$codec" || true # the verdict's status
done
