"""The checks of each script. run.py lists them even if neither torch nor hsdp is installed."""

from typing import Any, Dict, Tuple

DRILLS = ["kill", "stop", "out of memory", "capture"]
# By check: a function of torch_loop.py, and its arguments besides the mesh and the device.
LOOPS = {
    "whole numbers, fp32": ("whole_numbers", "float32", "f32"),
    "whole numbers, bf16 wire": ("whole_numbers", "float32", "bf16"),
    "whole numbers, bf16 model": ("whole_numbers", "bfloat16", "bf16"),
    "an MLP by the rules": ("by_the_rules",),
    "found_inf": ("found_inf",),
}
Pair = Tuple[str, Dict[str, Any], Dict[str, Any]]
STAGE_3 = {"stage": 3, "persistence_threshold": 0}
# By check: the model's dtype, and the options of the two loops of sharded_loop.py, which must give the same bits.
PAIRS: Dict[str, Pair] = {
    "gather while step returns": (
        "float32", {"overlap_param_gather": True}, {"overlap_param_gather": False}
    ),
    "stage 3 as stage 2, fp32": ("float32", STAGE_3, {}),
    "stage 3 as stage 2, bf16": ("bfloat16", STAGE_3, {}),
    "stage 3 that keeps units": (
        "bfloat16", {**STAGE_3, "reshard_after_forward": False, "reshard_after_backward": False}, {}
    ),
    "stage 3 that clips": ("float32", {**STAGE_3, "max_grad_norm": 0.01}, {"max_grad_norm": 0.01}),
}
OFFLOADED: Dict[str, Pair] = {
    "stage 3 with offload, fp32": ("float32", {**STAGE_3, "offload": "host"}, {"offload": "host"}),
    "stage 3 with offload, bf16": ("bfloat16", {**STAGE_3, "offload": "host"}, {"offload": "host"}),
}
# Compares updates on the host and on the GPU, whose divisions may round differently.
NEAR: Dict[str, Pair] = {"offload beside none": ("float32", {"offload": "host"}, {})}
WINDOW, LOCO = "a window, sums on the host", "LoCo as on the host"
OTHERS = {"AdamW as in one process": "one_process", WINDOW: "window", LOCO: "loco"}
SHARDED = [*PAIRS, *OFFLOADED, *NEAR, *OTHERS]


def titles(script: str, mesh: str) -> Dict[str, str]:
    """Maps the title of each check of a script on a mesh to the name of the check."""
    kind, names = {
        "torch_loop": ("torch", [*LOOPS]), "sharded_loop": ("sharded", SHARDED), "drills": ("drill", DRILLS)
    }[script]
    return {f"{kind} {mesh}: {name}": name for name in names}
