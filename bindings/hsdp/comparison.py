"""Compares two snapshots: are they the same gradients?"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from hsdp import _hsdp
from hsdp.snapshot import SnapshotInfo


@dataclasses.dataclass(frozen=True)
class ErrorHistogram:
    """`counts[i]` elements have 2^(first_exponent + i) <= |a-b| < 2^(first_exponent + i + 1)."""

    first_exponent: int
    counts: tuple[int, ...]
    zero_count: int


@dataclasses.dataclass(frozen=True)
class ParameterDifference:
    """How far one parameter's gradient in `a` is from that in `b`.

    The measures leave out pairs with a NaN or an infinity, which are counted separately.
    """

    name: str
    shape: tuple[int, ...]
    #: the coarsest of the wire dtypes and the stored dtypes
    coarsest_dtype: str
    #: for relative_l2 and max_relative, in the default verdict
    limit: float
    #: max|a-b|
    max_absolute: float
    #: max|a-b| / max|b|
    max_relative: float
    #: |a-b| / |b|
    relative_l2: float
    #: in ulps of the coarsest dtype
    max_ulp: float
    cosine: float
    max_b: float
    nonfinite_a: int
    nonfinite_b: int
    nonfinite_mismatches: int
    #: elements out of tolerance; 0 for the default verdict
    failing: int
    #: of the worst element, in the flattened parameter; -1: none
    worst_index: int
    worst_replica: int
    worst_a: float
    worst_b: float
    #: "same", "different" or "not judged"
    verdict: str
    #: (max, root mean square) of |a-b| along the flattened parameter, with `detail`
    heat: tuple[tuple[float, float], ...]
    histogram: ErrorHistogram


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two snapshots side by side. `print(comparison)` shows a table, worst parameter first."""

    path_a: str
    path_b: str
    a: SnapshotInfo
    b: SnapshotInfo
    #: "relative" (the default verdict), "tolerance", "ulp" or "bitwise"
    criterion: str
    #: "same", "different" or "not judged" (a quantized run without a tolerance)
    verdict: str
    #: worst first
    parameters: tuple[ParameterDifference, ...]

    @property
    def same(self) -> bool:
        """Whether the verdict is "same"."""
        return self.verdict == "same"

    def __str__(self) -> str:
        width = max([len("parameter"), *(len(p.name) for p in self.parameters)])
        lines = [
            f"{self.path_a} and {self.path_b}: {self.verdict}",
            f"{'parameter':<{width}}  {'max abs':>9}  {'max rel':>9}  {'rel L2':>9}  "
            f"{'max ULP':>9}  verdict",
        ]
        lines += [
            f"{p.name:<{width}}  {p.max_absolute:9.3g}  {p.max_relative:9.3g}  "
            f"{p.relative_l2:9.3g}  {p.max_ulp:9.4g}  {p.verdict}"
            for p in self.parameters
        ]
        return "\n".join(lines)


def compare_snapshots(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    ulp: float | None = None,
    bitwise: bool = False,
    detail: bool = False,
) -> Comparison:
    """Compares two snapshots, which may differ in mesh shape, layout and dtype.

    By default, relative L2 and max|a-b| / max|b| of every parameter must be at most 2^-20, or 2^-6 if
    gradients travelled in bf16, or 2^-9 in f16. `rtol` and `atol` instead require |a-b| <= atol + rtol
    |b| for every element; `ulp` at most that many units in the last place of the coarser dtype;
    `bitwise` equal bits. `detail` adds histograms and heat strips. Memory stays bounded whatever the
    size.

    Raises UsageError for contradictory options, and SnapshotError if the snapshots cannot be compared:
    damaged files, different sets of parameters, unequal replicas.
    """
    limits = {"rtol": rtol, "atol": atol, "ulp": ulp}
    options: dict[str, Any] = {
        name: None if limit is None else float(limit) for name, limit in limits.items()
    }
    options |= {"bitwise": bool(bitwise), "detail": bool(detail)}
    path_a, path_b = os.fspath(a), os.fspath(b)
    found = _hsdp.compare_snapshots(path_a, path_b, options)
    return Comparison(
        path_a,
        path_b,
        SnapshotInfo(**found["a"]),
        SnapshotInfo(**found["b"]),
        found["criterion"],
        found["verdict"],
        tuple(_difference(row) for row in found["parameters"]),
    )


def _difference(row: dict[str, Any]) -> ParameterDifference:
    histogram = ErrorHistogram(**row.pop("histogram"))
    return ParameterDifference(**row, histogram=histogram)
