"""The examples that need PyTorch, run as their users run them. They check their own results."""

from __future__ import annotations

import pathlib
import re
import shutil

import pytest
from page import ROOT, python_blocks
from warm_python import Run, output_of

pytest_plugins = ["warm_python"]
EXAMPLES = ROOT / "examples"


def test_train_gpt(run: Run, tmp_path: pathlib.Path) -> None:
    picture = tmp_path / "loss.png"
    output = run(4, EXAMPLES / "train_gpt.py", "--steps", "20", "--plot", str(picture))
    assert "on 2x2 ranks, 4 microbatches, bf16" in output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_train_gpt_loco(run: Run, tmp_path: pathlib.Path) -> None:
    picture = tmp_path / "loco.png"
    for more in ([], ["--fsdp2"]):
        output = run(
            4, EXAMPLES / "train_gpt_loco.py", "--steps", "10", "--plot", str(picture), *more
        )
        assert re.search(r"LoCo +0\.2[67]", output), output
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_train_gpt_zero(run: Run, tmp_path: pathlib.Path) -> None:
    """Killed on 2x2 ranks and continued on 1x2, a training has the same curve as one without interruption."""
    program = EXAMPLES / "train_gpt_zero.py"
    few = ("--steps", "18", "--save-every", "6")
    run(4, program, "--folder", str(tmp_path / "whole"), *few)
    folder = tmp_path / "killed"
    with pytest.raises(AssertionError, match="rank 3 of 4 was ended by signal 9"):
        run(4, program, "--folder", str(folder), "--die-at", "14", *few)
    output = run(2, program, "--folder", str(folder), *few)
    again = re.search(r"steps (6|12) to 18 on 1x2 ranks", output)
    assert again is not None
    whole, killed = (
        [float(line) for line in (tmp_path / name / "losses.txt").read_text().splitlines()]
        for name in ("whole", "killed")
    )
    assert len(whole) == len(killed) == 18
    assert killed[: int(again[1])] == whole[: int(again[1])]
    for one, other in zip(killed, whole, strict=True):
        assert abs(one - other) < 1e-3
    assert whole[-1] < 0.8 * whole[0]


def test_resume(run: Run, tmp_path: pathlib.Path) -> None:
    """Fewer ranks continue. The page kills the training and compares its bits with one that was not
    killed."""
    program = EXAMPLES / "resume.py"
    assert "steps 0 to 12 on 2x2 ranks" in run(4, program, "--folder", str(tmp_path))
    shutil.rmtree(tmp_path / "12")
    assert "steps 8 to 12 on 2x1 ranks" in run(2, program, "--folder", str(tmp_path))


def test_overlap_gather(run: Run, tmp_path: pathlib.Path) -> None:
    picture = tmp_path / "overlap.png"
    output = run(2, EXAMPLES / "overlap_gather.py", "--width", "256", "--plot", str(picture))
    assert "the same bits as without overlap" in output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_mesh_wide(run: Run) -> None:
    output = run(4, EXAMPLES / "mesh_wide.py", "--width", "128", "--steps", "2")
    assert "the same bits" in output


def test_cached_contrastive(run: Run) -> None:
    output = run(2, EXAMPLES / "cached_contrastive.py", "--steps", "20")
    assert "by rank: 8, 14; its collectives: reduce_scatter_count 1, all_reduce_count 0" in output


def test_beside_fsdp2(run: Run) -> None:
    output = run(4, EXAMPLES / "beside_fsdp2.py")
    assert "ok  bf16, beside FSDP2" in output


def test_fsdp2_hook(python: pathlib.Path) -> None:
    torchrun = [str(python.with_name("torchrun")), "--standalone", "--nproc-per-node", "4"]
    assert "on 2x2 ranks: loss" in output_of(*torchrun, str(EXAMPLES / "fsdp2_hook.py"))


def test_the_loop_in_the_readme(run: Run, tmp_path: pathlib.Path) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    (block,) = [block for block in python_blocks(readme) if "import torch" in block]
    (tmp_path / "program.py").write_text(block)
    lines = sorted(run(4, tmp_path / "program.py").splitlines())
    losses = {line.rpartition(" ")[2] for line in lines}
    assert [line[:10] for line in lines] == [f"[{r}] rank {r}" for r in range(4)]
    assert len(losses) == 1 and float(losses.pop()) < 8  # 8, the variance of the sum, at the start
