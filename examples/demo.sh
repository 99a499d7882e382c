#!/bin/sh
# Gets the digits, once, and runs the demo; then, where PyTorch is, what needs it. The last line is what
# makes a shell use the build.
# Usage: demo.sh BUILD [OPTION...], see digits_demo --help.
set -eu

build=${1:?usage: demo.sh BUILD [OPTION...]}
shift
here=$(dirname "$0")
"$here/fetch_digits.sh" "$build/digits.csv"
finish() {
  [ ! -f "$build/activate" ] || printf '\nhsdp_run, hsdp_check and "import hsdp" in this shell:  . %s\n' "$build/activate"
  exit "$status"
}
status=0
"$build/examples/digits_demo" --build "$build" "$@" || status=$?

python=$build/../venv/bin/python
export PYTHONPATH="$build/python" OMP_NUM_THREADS=1
if ! "$python" -c "import torch, hsdp" 2>/dev/null; then
  echo "PyTorch is not installed (make venv WITH_TORCH=1 installs it): its part of the demo is left out"
  finish
fi
# on_mesh SCRIPT OPTION...: without the ranks in front of the lines
on_mesh() {
  "$build/hsdp/tools/hsdp_run" -n 4 "$python" "$@" >"$build/demo/torch.log" 2>&1 || status=1
  sed -e 's/^\[[0-9]*\] //' -e 's/^[^ ]/           &/' "$build/demo/torch.log"
}
echo
echo "hsdp from PyTorch: a character-level GPT, and FSDP2 over gloo"
echo
mkdir -p "$build/demo"
on_mesh "$here/beside_fsdp2.py"
on_mesh "$here/train_gpt.py" --plot "$build/demo/gpt_loss.png"
finish
