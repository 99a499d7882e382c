"""Runs the smallest example on four ranks: each must print 6 = (0 + 1 + 2 + 3) * 4 / 4."""

import subprocess
import sys


def main(*command):
    *launch, program = command
    run = subprocess.run([*launch, "-n", "4", program], capture_output=True, text=True, timeout=50)
    found = sorted(line[line.find("rank "):] for line in run.stdout.splitlines() if "rank " in line)
    expected = [f"rank {rank}: 6" for rank in range(4)]
    if run.returncode != 0 or found != expected:
        print(f"expected {expected} and status 0, got {found} and status {run.returncode}\n"
              f"{run.stdout}{run.stderr}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
