#!/bin/sh
# Makes the virtual environment in which the Python package is built and tested, once: a second run
# with the same Python and requirements does nothing.
# Usage: make_venv.sh FOLDER [WITH_TORCH [WITH_DOCS]]
# WITH_TORCH is 1 (the default), 0, or another release of torch; WITH_DOCS, for the documentation site, 0 (the
# default) or 1.
# PYTHON names the interpreter, else python3.
set -eu

folder=${1:?usage: make_venv.sh FOLDER [WITH_TORCH [WITH_DOCS]]}
with_torch=${2:-1}
with_docs=${3:-0}
python=${PYTHON:-python3}
here=$(dirname "$0")/../bindings

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "make_venv: expected Python 3.11 or later, got $("$python" --version); set PYTHON" >&2
  exit 1
fi

# What a stamp holds when this Python was given these requirements.
wanted() {
  { "$python" -c 'import sys; print(sys.version, sys.base_prefix)'; cat "$@"; } | cksum
}
# install STAMP FILE: the requirements in FILE, unless STAMP says that it was done.
install() {
  stamp=$1
  file=$2
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(wanted "$file")" ]; then
    return 0
  fi
  if [ ! -x "$folder/bin/python" ]; then
    "$python" -m venv "$folder"
  fi
  echo "make_venv: installing $(grep -v '^#' "$file" | tr '\n' ' ')"
  for attempt in 1 2 3; do
    if "$folder/bin/python" -m pip install -qq --disable-pip-version-check -r "$file"; then
      wanted "$file" >"$stamp"
      return 0
    fi
    echo "make_venv: attempt $attempt failed" >&2
    sleep 5
  done
  exit 1
}

# Another interpreter: begin anew.
if [ -x "$folder/bin/python" ] &&
   [ "$("$python" -c 'import sys; print(sys.version)')" != \
     "$("$folder/bin/python" -c 'import sys; print(sys.version)' 2>/dev/null)" ]; then
  rm -rf "$folder"
fi
install "$folder/.requirements" "$here/requirements-test.txt"
case $with_torch in
  0) ;;
  1) install "$folder/.torch" "$here/requirements-torch.txt" ;;
  *)
    sed "s/^torch==.*/torch==$with_torch/" "$here/requirements-torch.txt" >"$folder/requirements-torch.txt"
    install "$folder/.torch" "$folder/requirements-torch.txt"
    ;;
esac
if [ "$with_docs" != 0 ]; then
  install "$folder/.docs" "$here/requirements-docs.txt"
fi
