"""Runs an example on four ranks and checks what it prints: check_example.py NAME LAUNCHER... PROGRAM."""

import re
import subprocess
import sys


def smallest_reduce(output):
    """Each rank prints 6 = (0 + 1 + 2 + 3) * 4 / 4."""
    found = sorted(line[line.find("rank "):] for line in output.splitlines() if "rank " in line)
    return found == [f"rank {rank}: 6" for rank in range(4)]


def loco_step(output):
    """LoCo sends what plain 4 bit sends, and is at least 4 times nearer."""
    def numbers(unit):
        return {name.split("] ")[-1].strip(): float(n)
                for name, n in re.findall(rf"(\S.*?) +([\d.]+) {unit}", output)}

    sent, off = numbers("bytes"), numbers("% off")
    return (
        sent["LoCo"] == sent["plain 4 bit"] <= 0.2657 * sent["bf16"]
        and 2 * sent["bf16"] == sent["f32"]
        and off["LoCo"] * 4 <= off["plain 4 bit"]
    )


def zero_step(output):
    """It compares itself with one process, and a rank has half the moments."""
    moments = re.search(r"moments of (\d+) of (\d+) parameters", output)
    return (
        moments is not None
        and 2 * int(moments[1]) == int(moments[2])
        and re.search(r"of one process's: fine$", output, re.MULTILINE) is not None
    )


def main(name, *command):
    expected = globals()[name]
    *launch, program = command
    run = subprocess.run([*launch, "-n", "4", program], capture_output=True, text=True, timeout=50)
    if run.returncode == 0 and expected(run.stdout):
        return 0
    print(f"{expected.__doc__} Got status {run.returncode} and\n{run.stdout}{run.stderr}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
