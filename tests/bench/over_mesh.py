#!/usr/bin/env python3
"""Runs torch_over_mesh.py, with optimizer state over the whole mesh, over a slow link and in shared memory.

Over the link there are two ranks, each pinned to a core and in a separate network namespace (shaped_link.py);
in shared memory the mesh is 2x2. Prints the table of docs/benchmarks.md.

Usage: over_mesh.py --build build/bench [--rounds N]
"""

import sys
from typing import Dict

from programs import Report, markdown_table, run_part, run_torch, tool
from shaped_link import TorchOverLink

LEAST_ROUNDS = 9


class OverMesh(TorchOverLink):
    """Compares shard_over="mesh" with "shard" and with torch's ZeroRedundancyOptimizer."""

    def measure(self, rounds: int) -> Report:
        """Reports the values that torch_over_mesh.py prints."""
        program = [*self._package.command("torch_over_mesh.py", {}),
                   f"--rounds={max(rounds, LEAST_ROUNDS)}"]
        report = Report()
        command = [str(tool(self._build, "hsdp_run")), "-n", "4", *program, "--part=memory"]
        if not run_torch("torch_over_mesh", command, report):
            return report
        self.run_over_link(report, "torch_over_mesh", [[*program, "--part=link"]])
        return report


def table(values: Dict[str, float]) -> str:
    def value(name: str) -> float:
        return values[f"torch_over_mesh_{name}"]

    rows = [
        *([f"iteration over 1 Gbit/s, {rows}, ms", f"{value(f'{case}_shard_ms'):.0f}",
           f"{value(f'{case}_mesh_ms'):.0f}", f"{value(f'{case}_ratio'):.2f}"]
          for case, rows in (("link", "512 rows"), ("long", "2048 rows"))),
        ["update alone, ms", f"{value('link_shard_update_ms'):.1f}", f"{value('link_mesh_update_ms'):.1f}",
         f"{1 / value('link_update_ratio'):.2f}"],
        *([f"of the gather hidden, {rows}", "",
           f"{value(f'{case}_hidden'):.0%} of {value(f'{case}_gather_ms'):.0f} ms", ""]
          for case, rows in (("link", "512 rows"), ("long", "2048 rows"))),
        ["added in shared memory, 2x2, ms", f"{value('shard_added_ms'):.0f}",
         f"{value('mesh_added_ms'):.0f}", f"{value('mesh_added_ms') / value('shard_added_ms'):.2f}"],
        ["DDP with ZeroRedundancyOptimizer adds, times", f"{value('shard_times'):.1f}",
         f"{value('mesh_times'):.1f}", ""],
    ]
    return "\n".join(markdown_table(["", '"shard"', '"mesh"', "mesh / shard"], rows))


if __name__ == "__main__":
    sys.exit(run_part(OverMesh, table, LEAST_ROUNDS))
