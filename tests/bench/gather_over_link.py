#!/usr/bin/env python3
"""Runs torch_gather.py over a slow link to measure how much of a parameter gather the next forward hides.

It starts two ranks, each pinned to a core and in a separate network namespace (shaped_link.py), and
prints the table of docs/benchmarks.md.

Usage: gather_over_link.py --build build/bench [--rounds N]
"""

import sys
from typing import Dict

from programs import Report, markdown_table, run_part
from shaped_link import TorchOverLink

LEAST_ROUNDS = 9  # iterations are compared to within 2 %
CASES = {"f32": "f32", "short": "f32, short forward", "f16": "f16"}
BUCKETS = {"256k": "256 Ki", "1m": "1'000'000", "4m": "all"}
COLUMNS = ("forward_ms", "gather_ms", "exposed_ms", "hidden", "in_step_ms", "overlapped_ms",
           "ratio")


class GatherOverLink(TorchOverLink):
    """Runs two ranks over a link of 1 Gbit/s."""

    def measure(self, rounds: int) -> Report:
        """Reports the values that torch_gather.py prints: torch_gather_<case>_<stage>_<bucket>_<name>."""
        program = [*self._package.command("torch_gather.py", {}),
                   f"--rounds={max(rounds, LEAST_ROUNDS)}"]
        report = Report()
        self.run_over_link(report, "torch_gather", [program])
        return report


def table(values: Dict[str, float]) -> str:
    heads = ["case", "stage", "elements a message", "forward, ms", "gather, ms", "exposed, ms",
             "hidden", "iteration, ms", "overlapped, ms", "overlapped / not"]
    rows = []
    for case, title in CASES.items():
        for stage in (1, 2):
            for bucket, elements in BUCKETS.items():
                forward, gather, exposed, hidden, in_step, overlapped, ratio = (
                    values[f"torch_gather_{case}_{stage}_{bucket}_{name}"] for name in COLUMNS)
                rows.append([title, str(stage), elements, f"{forward:.0f}", f"{gather:.1f}",
                             f"{exposed:.1f}", f"{hidden:.0%}", f"{in_step:.0f}",
                             f"{overlapped:.0f}", f"{ratio:.3f}"])
    return "\n".join(markdown_table(heads, rows))


if __name__ == "__main__":
    sys.exit(run_part(GatherOverLink, table, LEAST_ROUNDS))
