"""What reducing gradients adds to a training step in torch: ours, FSDP2 and DDP over gloo.

hsdp_run starts it on 4 ranks, which form a mesh of 2x2. Every step has four microbatches; all systems
take turns within every round. What reduction adds is the median over rounds of the step's time minus
that of the same step without reduction; the slowest rank counts. FSDP2 keeps its parameters whole
between steps, so its time includes no gathers. Prints `value NAME NUMBER` lines.

    hsdp_run -n 4 python torch_step.py [--rounds N] [--cases six_2048,...] [--systems ours_f32 ...]
    python torch_step.py --overhead
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hsdp

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
import beside_fsdp2 as example  # noqa: E402

ROWS = 8
CASES = {"six_2048": (6, 2048), "twentyfour_256": (24, 256)}
WINDOWS = {
    "window": {},
    "window_declared": {"backwards": example.MICROBATCHES},
    "window_grad": {"accumulate": "grad"},
    "window_grad_declared": {"accumulate": "grad", "backwards": example.MICROBATCHES},
}
SMALL_PARAMETERS = 1000


def ddp(model: nn.Module, inputs: torch.Tensor) -> example.Step:
    parallel = DistributedDataParallel(model)
    last = example.MICROBATCHES - 1

    def step() -> None:
        parallel.zero_grad()
        with parallel.no_sync():
            for m in range(last):
                example.backward(parallel, inputs, m)
        example.backward(parallel, inputs, last)

    return step


def in_window(
    reducer: hsdp.Reducer, model: nn.Module, inputs: torch.Tensor, **options: Any
) -> example.Step:
    """Reduces once per step, like DDP: a window of all backward passes."""
    reducer.attach(model)
    names = [parameter.name for parameter in reducer.parameters]

    def step() -> None:
        with hsdp.zero.coalesce_grad_reduction(reducer, **options):
            for m in range(example.MICROBATCHES):
                example.backward(model, inputs, m)
        for name in names:
            reducer.shard(name)

    return step


def measure_case(case: str, mesh: hsdp.Mesh, rounds: int, wanted: list[str]) -> None:
    layers, width = CASES[case]
    inputs = torch.randn(ROWS, width)
    model = partial(example.make_model, layers, width)

    def ours(dtype: str, first: str = "shard") -> example.Step:
        reducer = hsdp.Reducer(mesh, reduce_dtype=dtype)
        return example.reduced_by_hsdp(reducer, model(), inputs, first)

    def window(options: dict[str, Any]) -> example.Step:
        return in_window(hsdp.Reducer(mesh), model(), inputs, **options)

    make: dict[str, Callable[[], example.Step]] = {
        "none": lambda: example.without_reduction(model(), inputs),
        "ours_bf16": lambda: ours("bf16"),
        "ours_f32": lambda: ours("f32"),
        "ours_last_only": lambda: ours("f32", "none"),
        **{f"ours_{name}": partial(window, options) for name, options in WINDOWS.items()},
        "fsdp2_bf16": lambda: example.reduced_by_fsdp2(model(), inputs, torch.bfloat16)[0],
        "fsdp2_f32": lambda: example.reduced_by_fsdp2(model(), inputs, torch.float32)[0],
        "ddp": lambda: ddp(model(), inputs),
    }
    systems = {name: make[name]() for name in make if not wanted or name in ("none", *wanted)}
    seconds = example.time_steps(systems, rounds)
    if mesh.rank > 0:
        return
    for name in systems:
        print(f"value torch_{case}_{name}_step_ms {1e3 * statistics.median(seconds[name]):.3f}")
        if name != "none":
            added = example.added_ms(seconds, name)
            print(f"value torch_{case}_{name}_added_ms {added:.3f}", flush=True)


def small_parameters() -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.ones(16)) for _ in range(SMALL_PARAMETERS)])


def report_overhead(
    name: str, rounds: int, step: example.Step, other: example.Step,
    prepare: example.Step = lambda: None,
) -> None:
    """Prints how much longer `step` takes than `other` per small parameter; the two take turns."""
    added = []
    for number in range(rounds + 3):
        prepare()
        start = time.perf_counter()
        step()
        middle = time.perf_counter()
        other()
        end = time.perf_counter()
        if number >= 3:
            added.append((middle - start) - (end - middle))
    overhead = 1e6 * statistics.median(added) / SMALL_PARAMETERS
    print(f"value {name}_overhead_per_parameter_us {overhead:.3f}")


def sum_backward(model: nn.ParameterList) -> None:
    torch.cat(list(model)).sum().backward()


def measure_hand_over(rounds: int) -> None:
    """Prints what a microbatch costs per small parameter: its begin and end, minus those of a model with one
    parameter, and its backward pass, minus the same one without hooks. For comparison, also with a hook that
    does nothing, and with one that only drops the gradient.
    """
    models = {name: small_parameters() for name in ("alone", "empty_hook", "dropping_hook", "hook")}
    for empty, dropping in zip(models["empty_hook"], models["dropping_hook"], strict=True):
        empty.register_post_accumulate_grad_hook(lambda p: None)
        dropping.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    one = nn.ParameterList([nn.Parameter(torch.ones(16))])
    seconds: dict[str, list[float]] = {}

    def timed(name: str, call: example.Step) -> None:
        start = time.perf_counter()
        call()
        seconds.setdefault(name, []).append(time.perf_counter() - start)

    with hsdp.init_mesh() as mesh:
        whole, small = hsdp.Reducer(mesh), hsdp.Reducer(mesh)
        whole.attach(models["hook"])
        small.attach(one)
        for _ in range(rounds + 3):
            timed("begin", partial(whole.begin_microbatch, last=True))
            timed("begin_of_one", partial(small.begin_microbatch, last=True))
            for name, model in models.items():
                timed(name, partial(sum_backward, model))
            sum_backward(one)
            timed("end", whole.end_microbatch)
            timed("end_of_one", small.end_microbatch)
            whole.shard("0")
            small.shard("0")
            for name in ("alone", "empty_hook"):
                models[name].zero_grad()
    without = {name: "alone" for name in models} | {"begin": "begin_of_one", "end": "end_of_one"}
    for name, less in without.items():
        of_all = [a - (b if name != less else 0) for a, b in zip(seconds[name], seconds[less], strict=True)]
        each = 1e6 * statistics.median(of_all[3:]) / SMALL_PARAMETERS
        print(f"value torch_{name}_per_parameter_us {each:.3f}")


def measure_overhead(rounds: int) -> None:
    """Times a step of many tiny parameters on one rank, with the Reducer and without."""
    model, other = small_parameters(), small_parameters()
    with hsdp.init_mesh() as mesh:
        reducer = hsdp.Reducer(mesh)
        reducer.attach(model)

        def reduced() -> None:
            with reducer.microbatch(last=True):
                sum_backward(model)
            reducer.shard("0")

        def alone() -> None:
            sum_backward(other)
            other.zero_grad()

        report_overhead("torch", rounds, reduced, alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--systems", nargs="+", default=[], help="to measure; default: all")
    parser.add_argument("--overhead", action="store_true", help="of many small parameters, alone")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.overhead:
        measure_overhead(10 * asked.rounds)
        measure_hand_over(10 * asked.rounds)
        return
    with hsdp.init_mesh(replicate=2, shard=2) as mesh:
        example.join_gloo(mesh)
        for case in asked.cases.split(","):
            measure_case(case, mesh, asked.rounds, asked.systems)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
