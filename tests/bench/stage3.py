#!/usr/bin/env python3
"""Runs torch_stage3.py, sliced parameters beside FSDP2, in shared memory and over a slow link.

There are four ranks in shared memory. Over the link there are two, each pinned to a core and in a separate
network namespace (shaped_link.py). Prints the tables of docs/benchmarks.md.

Usage: stage3.py --build build/bench [--rounds N]
"""

import sys
from typing import Dict

from programs import Report, markdown_table, run_part, run_torch, tool
from shaped_link import TorchOverLink

RANKS = 4
LEAST_ROUNDS = 9
MESHES = {"1x4": 1, "2x2": 2}  # the number of replicas of each mesh
OVER_LINK = {
    "coalesce": ["--layers=6", "--width=1024", "--rows=8"],
    "prefetch": ["--layers=12", "--width=1024", "--rows=4096"],  # compute takes twice as long as the gathers
}
SYSTEMS = {f"{system}{way}": name + words
           for system, name in (("ours", "hsdp"), ("fsdp2", "FSDP2"))
           for way, words in (("", ""), ("_kept", ", kept"), ("_until_step", ", until the step"))}
AHEAD = {"ours": "hsdp", "ours_not_ahead": "hsdp, prefetch_bytes=0", "fsdp2": "FSDP2",
         "fsdp2_ahead": "FSDP2, set_modules_to_*_prefetch"}


class Stage3(TorchOverLink):
    """Compares ShardedOptimizer at stage 3 with torch's FSDP2 over gloo."""

    def measure(self, rounds: int) -> Report:
        """Reports the values that torch_stage3.py prints."""
        asked = f"--rounds={max(rounds, LEAST_ROUNDS)}"
        report = Report()
        for replicas in MESHES.values():
            program = self._package.command("torch_stage3.py", {})
            command = [str(tool(self._build, "hsdp_run")), "-n", str(RANKS), *program, asked,
                       f"--replicate={replicas}"]
            if not run_torch("torch_stage3", command, report):
                return report
        program = self._package.command("torch_stage3.py", {"GLOO_SOCKET_IFNAME": "uplink"})
        self.run_over_link(report, "torch_stage3", [
            [*program, asked, f"--part={part}", *sizes] for part, sizes in OVER_LINK.items()])
        return report


def tables(values: Dict[str, float]) -> str:
    def value(mesh: str, name: str) -> float:
        return values[f"torch_stage3_{mesh}_{name}"]

    steps = [[mesh + title, f"{value(mesh, f'ours_{way}_added_ms'):.0f}",
              f"{value(mesh, f'fsdp2_{way}_added_ms'):.0f}", f"{value(mesh, f'{way}_ratio'):.1f}"]
             for mesh in MESHES for way, title in (("resharded", ""), ("kept", ", kept"))]
    once = [[title, f"{value('1x2', f'{system}_each_ms'):.0f}",
             f"{value('1x2', f'{system}_once_ms'):.0f}",
             f"{value('1x2', f'{system}_once_ratio'):.2f}"] for system, title in SYSTEMS.items()]
    ahead = [[title, f"{value('1x2', 'alone_ms'):.0f}", f"{value('1x2', f'{system}_passes_ms'):.0f}",
              f"{value('1x2', f'{system}_gathers_ms'):.0f}",
              f"{value('1x2', f'{system}_hidden'):.0%}"] for system, title in AHEAD.items()]
    return "\n".join([
        *markdown_table(["added to a step, ms", "hsdp", "FSDP2", "ratio"], steps), "",
        *markdown_table(["four passes, ms", "each reduced", "reduced once", "ratio"], once), "",
        *markdown_table(["passes, ms", "without gathers", "with them", "gathers alone", "hidden"],
                        ahead), ""])


if __name__ == "__main__":
    sys.exit(run_part(Stage3, tables, LEAST_ROUNDS))
