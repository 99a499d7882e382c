#!/bin/sh
# Installs Intel MPI from its Python wheels, 126 MiB under a licence of Intel's, into a folder, once.
# Only the benchmarks use it. Of its transports only shared memory works: the wheels leave libfabric
# out.
# Usage: install_impi.sh FOLDER
# PYTHON names the interpreter whose pip is used, else python3.
set -eu

folder=${1:?usage: install_impi.sh FOLDER}
wheels='impi-rt==2021.19.0 impi-devel==2021.19.0'
python=${PYTHON:-python3}

[ "$(cat "$folder/.installed" 2>/dev/null)" != "$wheels" ] || exit 0
echo "install_impi: installing $wheels"
for attempt in 1 2 3; do
  rm -rf "$folder"
  # --prefix and not --target, which keeps lib/ of one wheel only.
  if "$python" -m pip install -qq --disable-pip-version-check --no-deps --ignore-installed \
      --no-warn-script-location --prefix "$folder" $wheels; then
    echo "$wheels" >"$folder/.installed"
    exit 0
  fi
  echo "install_impi: attempt $attempt failed" >&2
  sleep 5
done
exit 1
