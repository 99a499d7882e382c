#!/bin/sh
# Installs NCCL from its Python wheel, headers and library, into a folder, once. Where nvcc is, the
# build takes nccl.h from there unless the system has one.
# Usage: install_nccl.sh FOLDER
# PYTHON names the interpreter whose pip is used, else python3.
set -eu

folder=${1:?usage: install_nccl.sh FOLDER}
wheel=nvidia-nccl-cu13==2.28.9
python=${PYTHON:-python3}

[ "$(cat "$folder/.installed" 2>/dev/null)" != "$wheel" ] || exit 0
echo "install_nccl: installing $wheel"
for attempt in 1 2 3; do
  if "$python" -m pip install -qq --disable-pip-version-check --no-deps --upgrade \
      --target "$folder" "$wheel"; then
    echo "$wheel" >"$folder/.installed"
    exit 0
  fi
  echo "install_nccl: attempt $attempt failed" >&2
  sleep 5
done
exit 1
