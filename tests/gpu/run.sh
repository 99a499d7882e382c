#!/usr/bin/env bash
# Builds, checks and measures what runs on a GPU, in one go; a short table comes last.
#
# Usage: tests/gpu/run.sh [BUILD_DIR]     default build/gpu
# Needs a GPU with its driver, and CMake, nvcc and a C++ compiler, or a BUILD_DIR that was built
# elsewhere. compute-sanitizer is used where it is found. Takes less than ten minutes.
# Environment: HSDP_GPU_ARCH, such as 90: the architecture to build for, default this machine's GPU.
# HSDP_GPU_SECONDS: how long all of it may take, default 570. HSDP_GPU_PREBUILT=1: BUILD_DIR was built
# elsewhere, though this machine has CMake.
# Exit status: 0 all hold, 1 some do not, 77 there is no GPU.
set -u
here=$(cd "$(dirname "$0")" && pwd)
build=${1:-$here/../../build/gpu}
export here build
PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
rows=()
failed=0

# stage NAME SECONDS COMMAND...: runs it for at most that long and adds a row to the table.
stage() {
  local name=$1 limit=$2 start=$SECONDS status verdict left
  shift 2
  printf '\n=== %s\n' "$name"
  left=$((${HSDP_GPU_SECONDS:-570} - SECONDS))
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$limit" -le 0 ]; then
    status=124
  else
    timeout -k 5 "$limit" "$@"
    status=$?
  fi
  case $status in
    0) verdict=ok ;;
    77) verdict=skipped ;;
    124 | 137) verdict="FAILED: over $limit s" ;;
    *) verdict="FAILED: exit status $status" ;;
  esac
  [ "${verdict#FAILED}" = "$verdict" ] || failed=1
  rows+=("$(printf '%-28s %4d s  %s' "$name" $((SECONDS - start)) "$verdict")")
  return $status
}

finish() {
  printf '\n=== summary\n'
  printf '%s\n' "${rows[@]}"
  exit "$1"
}

architecture() {
  local found
  found=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d '. ')
  case $found in
    [0-9]*) echo "$found" ;;
    *) echo 90 ;;
  esac
}

build_all() {
  cmake -S "$here" -B "$build" -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_CUDA_ARCHITECTURES="${HSDP_GPU_ARCH:-$(architecture)}" &&
    cmake --build "$build" -j "$(nproc)"
}

if [ -x "$build/check_device" ] && [ -x "$build/kernel_bandwidth_gpu" ] &&
   { [ "${HSDP_GPU_PREBUILT:-0}" = 1 ] || ! command -v cmake >/dev/null 2>&1; }; then
  rows+=("build                           0 s  taken from $build")
else
  export -f build_all architecture
  stage build 240 bash -c build_all || finish 1
fi

stage checks 120 "$build/check_device"
if [ $? -eq 77 ]; then finish 77; fi

bandwidths=$(mktemp)
trap 'rm -f "$bandwidths"' EXIT
set -o pipefail
measure() { "$build/kernel_bandwidth_gpu" | tee "$1"; }
export -f measure
stage 'kernel bandwidths' 120 bash -c "set -o pipefail; measure '$bandwidths'"
while IFS= read -r line; do rows+=("  $line"); done <"$bandwidths"

if [ -x "$build/check_nccl" ]; then
  nccl_log=$(mktemp)
  ranks() { "$here/nccl_ranks.sh" "$build" "$1" "$2" | tee -a "$nccl_log"; }
  export -f ranks
  export nccl_log
  for shape in '1 2' '2 1' '2 2'; do
    stage "nccl ${shape/ /x}" 100 bash -c "set -o pipefail; ranks $shape"
  done
  while IFS= read -r line; do rows+=("  $line"); done < <(grep -E '^(exact|native) ' "$nccl_log")
  rows+=('  (ranks that share a GPU talk through the loopback: these times say nothing about NVLink)')
  rm -f "$nccl_log"
else
  rows+=('nccl                            0 s  skipped: nccl.h not found when it was built')
fi

# One check asks for more memory than there is: a failed call is no finding.
sanitize=(compute-sanitizer --report-api-errors no --error-exitcode 1)
first_words() { timeout 60 "${sanitize[@]}" "$build/check_device" --quick --only 'buffer: zero' 2>&1; }
if ! command -v compute-sanitizer >/dev/null 2>&1; then
  rows+=('memcheck, racecheck             0 s  skipped: compute-sanitizer not found')
elif [[ $(first_words) == *'Device not supported'* ]]; then
  rows+=('memcheck, racecheck             0 s  skipped: not supported on this machine')
else
  stage memcheck 120 "${sanitize[@]}" --tool memcheck "$build/check_device" --quick
  # The kernels that use shared memory.
  stage 'racecheck: packs' 60 "${sanitize[@]}" --tool racecheck \
    "$build/check_device" --quick --only 'cast-and-pack: large'
  stage 'racecheck: norms' 60 "${sanitize[@]}" --tool racecheck \
    "$build/check_device" --quick --only 'squared norm'
fi
finish "$failed"
