"""Runs loco_step on four ranks: LoCo sends what plain 4 bit sends, and is at least 4 times nearer."""

import re
import subprocess
import sys


def main(*command):
    *launch, program = command
    run = subprocess.run([*launch, "-n", "4", program], capture_output=True, text=True, timeout=50)
    sent = {name.strip(): int(n) for name, n in re.findall(r"(\S.*?) +(\d+) bytes", run.stdout)}
    off = {name.strip(): float(n) for name, n in re.findall(r"(\S.*?) +([\d.]+) % off", run.stdout)}
    sent = {name.split("] ")[-1]: n for name, n in sent.items()}
    off = {name.split("] ")[-1]: n for name, n in off.items()}
    fine = (
        run.returncode == 0
        and sent["LoCo"] == sent["plain 4 bit"] <= 0.2657 * sent["bf16"]
        and 2 * sent["bf16"] == sent["f32"]
        and off["LoCo"] * 4 <= off["plain 4 bit"]
    )
    if not fine:
        print(f"expected LoCo to send as plain 4 bit and to be nearer, got {sent}, {off} and status "
              f"{run.returncode}\n{run.stdout}{run.stderr}", file=sys.stderr)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
