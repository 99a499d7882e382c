"""Pictures of a comparison, with matplotlib (`pip install hsdp[plot]`)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hsdp.comparison import Comparison
from hsdp.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FLOOR = 1e-12


def _pyplot() -> Any:
    try:
        from matplotlib import figure
    except ImportError as error:
        raise UsageError(
            "plot: expected the package matplotlib, got none; install it with "
            "pip install hsdp[plot]"
        ) from error
    return figure


def comparison(
    compared: Comparison, path: str | os.PathLike[str] | None = None, most: int = 20
) -> Figure:
    """Draws a comparison: the errors of its `most` worst parameters beside their limits and, when
    it was made with `detail=True`, where in them the errors lie.

    Returns the matplotlib Figure, and saves it when `path` is given (its ending says the format).
    Raises UsageError when matplotlib is missing.
    """
    rows = compared.parameters[:most]
    detailed = any(row.heat for row in rows)
    height = 1.6 + 0.28 * max(len(rows), 1)
    drawing: Figure = _pyplot().Figure(figsize=(11 if detailed else 7, height), layout="constrained")
    axes = drawing.subplots(1, 2 if detailed else 1, squeeze=False, sharey=True)[0]
    _draw_errors(axes[0], compared, rows)
    if detailed:
        _draw_heat(axes[1], rows)
    drawing.suptitle(f"{compared.path_a} and {compared.path_b}: {compared.verdict}", fontsize=10)
    if path is not None:
        drawing.savefig(os.fspath(path))
    return drawing


def _draw_errors(axes: Any, compared: Comparison, rows: Any) -> None:
    places = range(len(rows))
    colors = ["#b5482f" if row.verdict == "different" else "#33658a" for row in rows]
    axes.barh(places, [max(row.relative_l2, _FLOOR) for row in rows], color=colors, height=0.6)
    axes.plot([max(row.max_relative, _FLOOR) for row in rows], places, "k.", label="max|a-b| / max|b|")
    if compared.criterion == "relative":
        axes.plot([row.limit for row in rows], places, "|", color="#d9a441", ms=12, label="limit")
    axes.set_xscale("log")
    axes.set_yticks(places, [row.name for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("relative L2 error (bar)")
    axes.legend(fontsize=8, loc="lower right")


def _draw_heat(axes: Any, rows: Any) -> None:
    for place, row in enumerate(rows):
        if not row.heat:
            continue
        scale = row.max_b or 1.0
        strip = [[cell[0] / scale for cell in row.heat]]
        axes.imshow(
            strip, aspect="auto", cmap="magma", extent=(0, 1, place + 0.4, place - 0.4), vmin=0
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("where: first to last element of the flattened parameter")
