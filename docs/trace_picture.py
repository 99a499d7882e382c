#!/usr/bin/env python3
"""Draws docs/trace.svg: two steps of four ranks, as a trace has them. Rank 2 comes late to the second.

Usage: hsdp_run -n 4 python docs/trace_picture.py docs/trace.svg    with hsdp on PYTHONPATH
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import time
from typing import Any

import numpy as np

import hsdp

LATE, DELAY_S = 2, 0.004
TRACKS = {"pack": "#33658a", "shard hop": "#86bbd8", "replica hop": "#f6ae2d", "word": "#b5482f"}
NAMES = {name.replace(" ", "_"): name for name in TRACKS}
LEFT, WIDTH, ROW, GAP, TOP = 150, 620, 13, 12, 30


def record(path: pathlib.Path) -> None:
    """Layers of a model, whose gradients come one after another."""
    with hsdp.init_mesh(replicate=2, shard=2) as mesh, hsdp.Reducer(mesh, bucket_bytes=1 << 20) as reducer:
        layers = [f"layer {i}" for i in range(4)]
        for layer in layers:
            reducer.register(layer, 1 << 18)
        gradient = np.ones(1 << 18, np.float32)

        def step(delay_s: float) -> None:
            for m in range(2):
                with reducer.microbatch(last=m == 1):
                    for layer in layers:
                        is_late = m == 0 and layer == layers[0] and mesh.rank == LATE
                        time.sleep(0.0005 + is_late * delay_s)
                        reducer.gradient_ready(layer, gradient)
            reducer.shard(layers[0])

        for _ in range(5):
            step(0)
        with reducer.trace(path):
            step(0)
            step(DELAY_S)


def draw(trace: Any) -> str:
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"].split()[0] in NAMES]
    ranks = sorted({e["pid"] for e in slices})
    titles = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    begin = min(e["ts"] for e in slices)
    end = max(e["ts"] + e["dur"] for e in slices)
    scale = WIDTH / (end - begin)
    height_of_rank = len(TRACKS) * ROW + GAP

    def x(ts: float) -> float:
        return round(LEFT + (ts - begin) * scale, 1)

    def y(rank: int, name: str) -> int:
        return TOP + ranks.index(rank) * height_of_rank + list(TRACKS).index(name) * ROW

    height = TOP + len(ranks) * height_of_rank + 20
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="10">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for i, (name, color) in enumerate(TRACKS.items()):
        at = LEFT + 110 * i
        out.append(f'<rect x="{at}" y="8" width="10" height="10" fill="{color}"/>')
        out.append(f'<text x="{at + 14}" y="17">{name}</text>')
    for rank in ranks:
        top = y(rank, "pack")
        out.append(f'<text x="8" y="{top + ROW}">{titles[rank]}</text>')
        out.append(f'<path d="M8 {top - GAP / 2:g}H{LEFT + WIDTH}" stroke="#ccc"/>')
    starts = {}
    for e in slices:
        name = NAMES[e["name"].split()[0]]
        left, top = x(e["ts"]), y(e["pid"], name)
        starts[e["pid"], e["tid"], e["ts"]] = (left, top + ROW / 2)
        width = max(round(e["dur"] * scale, 1), 0.5)
        out.append(
            f'<rect x="{left}" y="{top}" width="{width}" height="{ROW - 2}" fill="{TRACKS[name]}" '
            f'stroke="#fff" stroke-width=".3"><title>{e["name"]}</title></rect>'
        )
    ways: dict[int, list[tuple[float, float]]] = {}
    for e in trace["traceEvents"]:
        if e["ph"] in "stf":
            ways.setdefault(e["id"], []).append(starts[e["pid"], e["tid"], e["ts"]])
    for way in ways.values():
        points = "L".join(f"{a:g} {b:g}" for a, b in way)
        out.append(f'<path d="M{points}" fill="none" stroke="#222" stroke-width=".4"/>')
    for ms in range(0, int((end - begin) / 1e3) + 1, 2):
        at = x(begin + ms * 1e3)
        out.append(f'<text x="{at}" y="{height - 6}">{ms} ms</text>')
        out.append(f'<path d="M{at} {TOP - 6}V{height - 18}" stroke="#ccc" stroke-width=".5"/>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.json"
        record(path)
        if path.exists():  # on rank 0
            pathlib.Path(sys.argv[1]).write_text(draw(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
