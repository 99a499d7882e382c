#!/usr/bin/env bash
# Runs check_nccl as REPLICATE x SHARD processes on this machine's GPUs.
#
# Usage: tests/gpu/nccl_ranks.sh BUILD_DIR REPLICATE SHARD
# Each process claims to be a separate host, so that several can share a GPU. Their data then go
# through the loopback interface, which is right for checks and useless for timing. If each rank has
# a GPU, SHARE_GPU=0 turns that off.
# LIMIT_S, default 240: the seconds for each process, including minutes to start on many GPUs.
# Exit status: 0 all hold, 1 some do not, 124 a process ran out of time, 77 there is no GPU or no libnccl.
set -u
build=${1:?usage: nccl_ranks.sh BUILD_DIR REPLICATE SHARD}
replicate=${2:?usage: nccl_ranks.sh BUILD_DIR REPLICATE SHARD}
shard=${3:?usage: nccl_ranks.sh BUILD_DIR REPLICATE SHARD}
export WORLD_SIZE=$((replicate * shard))
limit_s=${LIMIT_S:-240}

# Uses the NCCL library of Python's packages if the loader finds none.
if [ -z "${HSDP_NCCL_LIBRARY:-}" ] && ! ldconfig -p 2>/dev/null | grep -q 'libnccl\.so\.2'; then
  found=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0])' 2>/dev/null)
  for file in "$found/lib/libnccl.so.2" "$build/../nccl/nvidia/nccl/lib/libnccl.so.2"; do
    if [ -f "$file" ]; then export HSDP_NCCL_LIBRARY=$file; break; fi
  done
fi
if [ "${SHARE_GPU:-1}" = 1 ]; then
  export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} NCCL_IB_DISABLE=${NCCL_IB_DISABLE:-1}
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
pids=()
for ((rank = 0; rank < WORLD_SIZE; ++rank)); do
  if [ "${SHARE_GPU:-1}" = 1 ]; then export NCCL_HOSTID=hsdp-check-$rank; fi
  RANK=$rank timeout --foreground -k 5 "$limit_s" "$build/check_nccl" "$replicate" "$shard" "$folder" &
  pids+=($!)
done
worst=0
rank=0
for pid in "${pids[@]}"; do
  wait "$pid"
  status=$?
  if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then echo "FAILED rank $rank: ran out of $limit_s s"; fi
  rank=$((rank + 1))
  if [ "$status" -ne 0 ] && { [ "$worst" -eq 0 ] || [ "$worst" -eq 77 ]; }; then worst=$status; fi
done
exit "$worst"
