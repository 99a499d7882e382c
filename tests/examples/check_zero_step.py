"""Runs zero_step on four ranks: it compares itself with one process, and a rank has half the moments."""

import re
import subprocess
import sys


def main(*command):
    *launch, program = command
    run = subprocess.run([*launch, "-n", "4", program], capture_output=True, text=True, timeout=50)
    moments = re.search(r"moments of (\d+) of (\d+) parameters", run.stdout)
    fine = (
        run.returncode == 0
        and moments is not None
        and 2 * int(moments[1]) == int(moments[2])
        and re.search(r"of one process's: fine$", run.stdout, re.MULTILINE) is not None
    )
    if not fine:
        print(f"expected half the moments and the weights of one process, got status {run.returncode}\n"
              f"{run.stdout}{run.stderr}", file=sys.stderr)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
