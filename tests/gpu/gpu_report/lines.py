"""The lines by which a program reports to run.py: each is a verdict or a value.

    ok       0.01 s  buffer: zero
    FAILED   0.02 s  norms: large: got 1, want 2
    not run  kill: no GPU
    value hsdp_step 1.25 ms
"""

import dataclasses
import re
from typing import List, Optional, Sequence, Tuple

OK, FAILED, NOT_RUN = "ok", "FAILED", "not run"

_VERDICT = re.compile(r"^(?:(ok|FAILED)\s+([0-9.]+) s|not run)  (.+)$", re.M)
_VALUE = re.compile(r"^value (\S+) ([-+0-9.eE]+|nan|inf) (\S+)$", re.M)
_BANDWIDTH = re.compile(r"^  (\S.*?)\s+([0-9.]+) GB/s\s+([0-9.]+) %  ?(.*)$")
_COPY = re.compile(r"^arrays of ([0-9]+) MiB: device-to-device copy ([0-9.]+) GB/s")
_COLLECTIVE = re.compile(
    r"^(exact|native)\s+(16 MiB f32), ([0-9]+) ranks: reduce_scatter\s+([0-9.]+) ms, "
    r"all_reduce\s+([0-9.]+) ms", re.M
)
GOAL_PERCENT = 90.0
GOALS = {"host_time_per_parameter_and_step": 2.0}  # at most


@dataclasses.dataclass
class Check:
    """A check that held, failed, or did not run."""

    name: str
    verdict: str
    detail: str = ""
    seconds: Optional[float] = None

    def line(self) -> str:
        if self.verdict == NOT_RUN:
            return f"not run  {self.name}: {self.detail}"
        problem = f": {self.detail}" if self.detail else ""
        return f"{self.verdict:6} {self.seconds or 0.0:6.2f} s  {self.name}{problem}"


@dataclasses.dataclass
class Measurement:
    """A measured number; it never fails a run."""

    name: str
    value: float
    unit: str
    note: str = ""


def checks_in(output: str, names: Sequence[str] = ()) -> List[Check]:
    """Parses what check_device, torch_loop.py and drills.py print. `names` are the names that they may print; they
    tell a name that has a colon from its problem. Any other name ends at the first colon."""
    found = []
    for match in _VERDICT.finditer(output):
        name, detail = (match[3], "") if match[1] == OK else _split(match[3], names)
        found.append(Check(name, match[1] or NOT_RUN, detail, float(match[2]) if match[2] else None))
    return found


def _split(text: str, names: Sequence[str]) -> Tuple[str, str]:
    known = [name for name in names if text == name or text.startswith(f"{name}: ")]
    name = max(known, key=len) if known else text.split(": ")[0]
    return name, text[len(name) + 2:]


def bandwidths_in(output: str) -> List[Measurement]:
    """Parses what kernel_bandwidth_gpu prints: each kernel as a share of the copy of that size."""
    found: List[Measurement] = []
    size = ""
    for line in output.splitlines():
        match = _COPY.match(line)
        if match:
            size = f"{match[1]} MiB"
            found.append(Measurement(f"copy, {size}", float(match[2]), "GB/s"))
            continue
        match = _BANDWIDTH.match(line)
        if match:
            share = float(match[3])
            note = f"{match[2]} GB/s"
            if share < GOAL_PERCENT:
                note += f", below goal ({GOAL_PERCENT:g} %)"
            found.append(Measurement(f"{match[1]}, {size}", share, "% of copy", note))
    return found


def collective_times_in(output: str, mesh: str, shared: bool) -> List[Measurement]:
    """Parses the times of both reductions that rank 0 of check_nccl prints."""
    note = "ranks share a GPU: says nothing about its links" if shared else ""
    return [Measurement(f"{name} {match[1]}, {match[2]}, {mesh}", float(value), "ms", note)
            for match in _COLLECTIVE.finditer(output)
            for name, value in (("reduce_scatter", match[4]), ("all_reduce", match[5]))]


def values_in(output: str, mesh: str = "") -> List[Measurement]:
    """Parses the `value NAME NUMBER UNIT` lines. A given mesh becomes part of the names."""
    found = []
    for match in _VALUE.finditer(output):
        value, goal = float(match[2]), GOALS.get(match[1])
        note = "" if goal is None else f"goal: at most {goal:g} {match[3]}"
        if goal is not None and not value <= goal:
            note = f"below goal (at most {goal:g} {match[3]})"
        title = f"{match[1]}, {mesh}" if mesh else match[1]
        found.append(Measurement(title, value, match[3], note))
    return found
