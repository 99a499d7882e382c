"""Turns samples into medians, and medians into claims: a ratio, its target and a verdict."""

import dataclasses
import statistics
from typing import Callable, Dict, Iterator, List, Optional, Tuple

from programs import Key, Report

KIB = 1 << 10
MIB = 1 << 20
PEERS = ("impi", "openmpi", "mpich", "gloo")
STEP_PEERS = ("impi_step", "openmpi_step")
OPS = ("reduce_scatter", "all_reduce")
SIX = "6 layers of 2048 x 2048"
TORCH_CASES = {"six_2048": SIX, "twentyfour_256": "24 layers of 256 x 256"}
WINDOW_CASES = {"1x2": "1x2", "2x2": "2x2", "busy": "1x2, of 50 ms each"}
# The cases of torch_gather.py with a long forward, and the size of their messages of 256 Ki elements.
GATHER_CASES = {"f32": "1 MiB", "f16": "512 KiB"}
GATHER_BUCKETS = ("256k", "1m", "4m")
STAGE3_MESHES = ("1x4", "2x2")


@dataclasses.dataclass
class Claim:
    """Holds if `ratio` is at least, or with at_most at most, `target`."""

    name: str
    ratio: Optional[float]  # None: something needed was not measured
    target: float
    detail: str
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "not measured"
        held = self.ratio <= self.target if self.at_most else self.ratio >= self.target
        return "held" if held else "MISSED"

    @property
    def ratio_text(self) -> str:
        return "-" if self.ratio is None else f"{self.ratio:.2f}"


class Samples:
    """All times of a run. A variant with a wrong result is never quoted."""

    def __init__(self) -> None:
        self.times: Dict[Key, List[float]] = {}
        self.wrong: Dict[Key, int] = {}
        self.values: Dict[str, List[float]] = {}

    def add(self, report: Report) -> None:
        for key, time_us, checked in report.times:
            self.times.setdefault(key, []).append(time_us)
            if not checked:
                self.wrong[key] = self.wrong.get(key, 0) + 1
        for name, number in report.values.items():
            self.values.setdefault(name, []).append(number)

    def median(self, key: Key) -> Optional[float]:
        if key in self.wrong or key not in self.times:
            return None
        return statistics.median(self.times[key])

    def value(self, name: str) -> Optional[float]:
        return statistics.median(self.values[name]) if name in self.values else None

    def best(self, system: str, op: str, dtype: str, size: int,
             ranks: int) -> Optional[Tuple[float, str]]:
        """The time and name of a system's fastest variant whose results are right."""
        found = [(time, key.variant) for key in self.times
                 if (key.system, key.op, key.dtype, key.bytes, key.ranks) ==
                 (system, op, dtype, size, ranks)
                 for time in [self.median(key)] if time is not None]
        return min(found) if found else None

    def time(self, *case) -> Optional[float]:
        best = self.best(*case)
        return best[0] if best else None

    def fastest_peer(self, op: str, dtype: str, size: int,
                     ranks: int) -> Optional[Tuple[float, str]]:
        peers = STEP_PEERS if op == "step" else PEERS
        found = [(best[0], f"{peer}/{best[1]}") for peer in peers
                 for best in [self.best(peer, op, dtype, size, ranks)] if best]
        return min(found) if found else None


def size_text(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def quotient(a: Optional[float], b: Optional[float]) -> Optional[float]:
    return a / b if a is not None and b else None


def peer_ratio(samples: Samples, system: str, op: str, size: int, ranks: int) -> Optional[float]:
    """The time of the fastest peer divided by that of our `system`."""
    peer = samples.fastest_peer(op, "f32", size, ranks)
    return quotient(peer[0] if peer else None, samples.time(system, op, "f32", size, ranks))


def against_peers(samples: Samples, system: str, sizes: Dict[int, float]) -> Iterator[Claim]:
    for op in OPS:
        for size, target in sizes.items():
            peer = samples.fastest_peer(op, "f32", size, 4)
            ratio = peer_ratio(samples, system, op, size, 4)
            yield Claim(f"{op} {size_text(size)}, 4 ranks, {system.replace('ours_', '')} memory: "
                        "fastest peer / ours", ratio, target, peer[1] if peer else "no peer")


def against_roofline(samples: Samples, sizes: List[int]) -> Iterator[Claim]:
    for op in OPS:
        for size in sizes:
            case = (op, "f32", size, 4)
            yield Claim(f"{op} {size_text(size)}, 4 ranks: roofline / ours",
                        quotient(samples.time("roofline", *case),
                                 samples.time("ours_shared", *case)), 0.95, "shared memory")


def sixteen_bit(samples: Samples, size: int) -> Iterator[Claim]:
    for op, target in (("reduce_scatter", 1.5), ("all_reduce", 1.7)):
        for dtype in ("bf16", "f16"):
            wide = samples.time("ours_shared", op, "f32", size, 4)
            narrow = samples.time("ours_shared", op, dtype, size, 4)
            # The same bytes hold twice as many elements.
            ratio = quotient(wide, narrow)
            yield Claim(f"{op} {size_text(size)}, {dtype}: f32 / {dtype}, time per element",
                        ratio * 2 if ratio is not None else None, target, "4 ranks, shared")


def bytes_moved(op: str, size: int, ranks: int) -> float:
    """Of all ranks: every input is read once; sums are written once, or to every rank."""
    return float(size * ranks + size) if op == "reduce_scatter" else float(2 * size * ranks)


def four_against_two(samples: Samples, sizes: List[int]) -> Iterator[Claim]:
    for op in OPS:
        for size in sizes:
            per_byte = [quotient(samples.time("ours_shared", op, "f32", size, ranks),
                                 bytes_moved(op, size, ranks)) for ranks in (4, 2)]
            yield Claim(f"{op} {size_text(size)}: 4 ranks / 2 ranks, time per byte moved",
                        quotient(per_byte[0], per_byte[1]), 1.3, "shared memory", at_most=True)


def many_ranks(samples: Samples) -> Claim:
    """Many more ranks than cores: the time is mostly synchronization."""
    time_us = samples.time("ours_private", "all_reduce", "f32", MIB, 64)
    return Claim("all_reduce 1 MiB, 64 ranks, private memory: ms",
                 None if time_us is None else time_us / 1000, 20.0, "on two cores", at_most=True)


def step(samples: Samples, dtype: str, size: int) -> Iterator[Claim]:
    ours = samples.time("ours_step", "step", dtype, size, 4)
    peer = samples.fastest_peer("step", dtype, size, 4)
    yield Claim(f"Reducer step, {dtype} gradients: fastest peer / ours",
                quotient(peer[0] if peer else None, ours), 3.0, peer[1] if peer else "no peer")
    yield Claim(f"Reducer step, {dtype} gradients: roofline / ours",
                quotient(samples.time("roofline", "step", dtype, size, 4), ours), 0.7,
                "same reads and writes, no synchronisation")


def step_memory(samples: Samples) -> Iterator[Claim]:
    for source in ("stats", "process"):
        over = samples.value(f"step_memory_over_by_{source}_bytes")
        yield Claim(f"Reducer memory beyond gradients, carry, two buckets, by {source}: MiB",
                    None if over is None else over / MIB, 8.0, "most of any rank", at_most=True)


def snapshots(samples: Samples) -> Iterator[Claim]:
    check = samples.value("snapshot_hsdp_check_s")
    yield Claim("two snapshots of 1 GiB: h5diff / hsdp_check",
                quotient(samples.value("snapshot_h5diff_s"), check), 5.0, "page cache warm")
    yield Claim("two snapshots of 1 GiB: reading them / hsdp_check",
                quotient(samples.value("snapshot_read_s"), check), 0.5, "cat, page cache warm")
    peak = samples.value("hsdp_check_peak_bytes")
    yield Claim("hsdp_check on two snapshots of 1 GiB: peak memory, MiB",
                None if peak is None else peak / MIB, 256.0, "", at_most=True)
    yield Claim("handing a 1 GiB snapshot to the writer: time / plain copy",
                quotient(samples.value("snapshot_submit_us"), samples.value("snapshot_copy_us")),
                1.1, "both into fresh memory", at_most=True)


def torch_steps(samples: Samples) -> Iterator[Claim]:
    """What reduction and an optimizer add to a step: ours divided by theirs, on the same schedule."""
    def added(*names: str) -> Optional[float]:
        found = [samples.value(f"torch_{name}_added_ms") for name in names]
        times = [time for time in found if time is not None]
        # If a step was faster with reduction than without, what reduction adds is less than the noise.
        return min(times) if times and min(times) > 0 else None

    def claim(name: str, a: Optional[float], b: Optional[float], target: float) -> Claim:
        return Claim(name, quotient(a, b), target,
                     "" if None in (a, b) else f"{a:.0f} ms and {b:.1f} ms")

    for case, targets in (("six_2048", {"bf16": 8.0, "f32": 10.0}),
                          ("twentyfour_256", {"bf16": 25.0, "f32": 25.0})):
        title = f"reduction in a torch step, {TORCH_CASES[case]}"
        for dtype, target in targets.items():
            yield claim(f"{title}: fsdp2_{dtype} / ours", added(f"{case}_fsdp2_{dtype}"),
                        added(f"{case}_ours_{dtype}"), target)
        ways = (f"{case}_ours_{way}" for way in ("last_only", "window", "window_grad_declared"))
        yield claim(f"{title}: ddp / ours", added(f"{case}_ddp"), added(*ways), 5.0)
    for way in ("window", "window_declared", "window_grad", "window_grad_declared"):
        yield claim(f"reduction in a torch step, {SIX}: ours_f32 / {way}", added("six_2048_ours_f32"),
                    added(f"six_2048_ours_{way}"), 1.5)
    yield Claim("attached model of 1000 small parameters, one rank: us per parameter and step",
                samples.value("torch_overhead_per_parameter_us"), 10.0, "", at_most=True)
    yield claim(f"reduction and AdamW on slices, {SIX}, 2 ranks: DDP with ZeroRedundancyOptimizer / ours",
                added("zero_zero_redundancy"), added("zero_ours"), 4.0)
    yield claim(f"reduction and AdamW on whole parameters, {SIX}, 2 ranks: on slices / whole",
                added("zero_ours"), added("zero_whole"), 0.5)
    alone, shared = (samples.value(f"torch_zero_muon_{name}_step_ms") for name in ("ddp", "ours"))
    yield claim(f"step with Muon, {SIX}, 2 ranks: DDP / whole matrices", alone, shared, 1.5)
    yield Claim("ShardedOptimizer of 1000 small parameters, one rank: us per parameter and step",
                samples.value("torch_zero_overhead_per_parameter_us"), 2.0, "", at_most=True)


def slow_link(samples: Samples) -> Iterator[Claim]:
    """A step of 16 Mi elements with 1 Gbit/s between any two ranks: one backward pass with each replica
    hop, or four backward passes that are reduced one by one or as a window."""
    def time(name: str) -> Optional[float]:
        return samples.value(f"slow_link_1000_{name}_ms")

    def detail(name: str) -> str:
        sleeps = ", the link sleeps" if samples.value("slow_link_sleeps") else ""
        return "" if time(name) is None else f"1 Gbit/s, {time(name):.0f} ms{sleeps}"

    f32, bf16, plain4, loco = map(time, ("f32", "bf16", "plain4", "loco"))
    yield Claim("step over a slow link: f32 hop / LoCo", quotient(f32, loco), 6.0, detail("loco"))
    yield Claim("step over a slow link: bf16 hop / LoCo", quotient(bf16, loco), 3.0, detail("loco"))
    yield Claim("step over a slow link: LoCo / plain 4 bit", quotient(loco, plain4), 1.05,
                detail("loco"), at_most=True)
    # 1.7 is DeepSpeed's figure for stage 2. By the bytes sent, up to 4 is possible on 1x2 and 2.5 on 2x2.
    for case, way, target in (("1x2", "window", 3.0), ("2x2", "window", 1.7),
                              ("busy", "window", 1.5), ("busy", "declared", 1.7)):
        name = f"{case}_{way}"
        yield Claim(f"4 backward passes over a slow link, {WINDOW_CASES[case]}: one by one / {way}",
                    quotient(time(f"{case}_each"), time(name)), target, detail(name))


def gather_over_link(samples: Samples) -> Iterator[Claim]:
    """Parameters of 8 layers of 480 x 480, gathered by two ranks during the next forward."""
    def value(case: str, stage: int, bucket: str, name: str) -> Optional[float]:
        return samples.value(f"torch_gather_{case}_{stage}_{bucket}_{name}")

    for case, message in GATHER_CASES.items():
        for stage in (1, 2):
            name = f"parameter gather over a slow link, {case}, stage {stage}"
            hidden, forward, gather, exposed = (
                value(case, stage, "256k", of)
                for of in ("hidden", "forward_ms", "gather_ms", "exposed_ms"))
            detail = ""
            if None not in (hidden, forward, gather, exposed):
                detail = f"{gather:.0f} ms, {exposed:.1f} ms exposed; forward {forward:.0f} ms"
                if forward < gather:  # happens on a faster machine
                    hidden, detail = None, detail + ", too short"
            yield Claim(f"{name}, messages of {message}: share hidden", hidden, 0.8, detail)
            ratios = [(ratio, bucket) for bucket in GATHER_BUCKETS
                      for ratio in [value(case, stage, bucket, "ratio")] if ratio is not None]
            most, bucket = max(ratios) if ratios else (None, "")
            yield Claim(f"{name}: iteration overlapped / synchronous", most, 1.02,
                        f"largest of three message sizes, {bucket} elements" if bucket else "",
                        at_most=True)


def stage3(samples: Samples) -> Iterator[Claim]:
    """Six layers of 2048 x 2048 at stage 3, and gathers and reductions over a slow link."""
    for mesh in STAGE3_MESHES:
        for way, title in (("resharded", ""), ("kept", ", kept after the forward")):
            ours, theirs = (samples.value(f"torch_stage3_{mesh}_{system}_{way}_added_ms")
                            for system in ("ours", "fsdp2"))
            detail = "" if None in (ours, theirs) else f"{ours:.0f} ms, FSDP2 {theirs:.0f} ms"
            yield Claim(f"stage 3 adds to a step, {mesh}{title}: FSDP2 / ours",
                        samples.value(f"torch_stage3_{mesh}_{way}_ratio"), 8.0, detail)
    ours, theirs = (samples.value(f"torch_stage3_1x2_{system}_once_ratio")
                    for system in ("ours", "fsdp2"))
    yield Claim("stage 3 over a slow link, 4 passes each reduced / reduced once", ours, 1.3,
                "" if theirs is None else f"FSDP2 {theirs:.2f}")
    ours, theirs = (samples.value(f"torch_stage3_1x2_{system}_hidden")
                    for system in ("ours", "fsdp2"))
    yield Claim("stage 3 over a slow link: share of gathers hidden", ours, 0.8,
                "" if theirs is None else f"FSDP2 {theirs:.2f}")


def claims(samples: Samples, has: Callable[[int], bool]) -> List[Claim]:
    """`has` tells whether a size was measured."""
    shared = {64 * KIB: 1.5, MIB: 4.0, 16 * MIB: 4.0, 64 * MIB: 4.0, 256 * MIB: 3.5}
    private = {size: 2.0 for size in shared if size >= MIB}
    large = [size for size in shared if size >= 16 * MIB and has(size)]
    found: List[Claim] = []
    found += against_peers(samples, "ours_shared", {s: t for s, t in shared.items() if has(s)})
    found += against_roofline(samples, large)
    found += against_peers(samples, "ours_private", {s: t for s, t in private.items() if has(s)})
    if has(256 * MIB):
        found += sixteen_bit(samples, 256 * MIB)
        found.append(Claim(
            "all_reduce 256 MiB over TCP, 2 ranks: Open MPI / ours",
            quotient(samples.time("openmpi_tcp", "all_reduce", "f32", 256 * MIB, 2),
                     samples.time("ours_tcp", "all_reduce", "f32", 256 * MIB, 2)), 1.0,
            "loopback, btl tcp,self"))
    if has(MIB):
        found.append(many_ranks(samples))
    found += four_against_two(samples, large)
    found.append(Claim("idle waiting rank, percent of a core",
                       samples.value("idle_rank_cpu_percent"), 5.0, "a peer 2 s late",
                       at_most=True))
    for dtype in ("f32", "bf16"):
        found += step(samples, dtype, 256 * MIB)
    found += step_memory(samples)
    found += snapshots(samples)
    found += torch_steps(samples)
    found += slow_link(samples)
    found += gather_over_link(samples)
    found += stage3(samples)
    return found
