"""The examples that need PyTorch, run as their users run them. They check their own results."""

from __future__ import annotations

import pathlib
import re
import shutil

import pytest
from page import python_blocks
from test_examples import EXAMPLES, run


def test_train_gpt(tmp_path: pathlib.Path) -> None:
    picture = tmp_path / "loss.png"
    output = run(4, EXAMPLES / "train_gpt.py", "--steps", "40", "--plot", str(picture))
    assert "on 2x2 ranks, 4 microbatches, bf16" in output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_train_gpt_loco(tmp_path: pathlib.Path) -> None:
    picture = tmp_path / "loco.png"
    for more in ([], ["--fsdp2"]):
        output = run(
            4, EXAMPLES / "train_gpt_loco.py", "--steps", "25", "--plot", str(picture), *more
        )
        assert re.search(r"LoCo +0\.2[67]", output), output
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_train_gpt_zero(tmp_path: pathlib.Path) -> None:
    """Killed on 2x2 ranks and gone on with on 1x2, a training has the curve of one that was not."""
    program = EXAMPLES / "train_gpt_zero.py"
    few = ("--steps", "24", "--save-every", "8")
    run(4, program, "--folder", str(tmp_path / "whole"), *few)
    folder = tmp_path / "killed"
    with pytest.raises(AssertionError, match="rank 3 of 4 was ended by signal 9"):
        run(4, program, "--folder", str(folder), "--die-at", "19", *few)
    output = run(2, program, "--folder", str(folder), *few)
    again = re.search(r"steps (8|16) to 24 on 1x2 ranks", output)
    assert again is not None
    whole, killed = (
        [float(line) for line in (tmp_path / name / "losses.txt").read_text().splitlines()]
        for name in ("whole", "killed")
    )
    assert len(whole) == len(killed) == 24
    assert killed[: int(again[1])] == whole[: int(again[1])]
    for one, other in zip(killed, whole, strict=True):
        assert abs(one - other) < 1e-3
    assert whole[-1] < 0.8 * whole[0]


def test_resume(tmp_path: pathlib.Path) -> None:
    """Killed and gone on with, a training has the bits of one that was not."""
    program = EXAMPLES / "resume.py"
    whole = run(4, program, "--folder", str(tmp_path / "whole"))
    folder = str(tmp_path / "killed")
    with pytest.raises(AssertionError, match="rank 3 of 4 was ended by signal 9"):
        run(4, program, "--folder", folder, "--die-at", "9")
    again = run(4, program, "--folder", folder)
    assert "steps 0 to 12 on 2x2 ranks" in whole and "steps 8 to 12 on 2x2 ranks" in again
    assert whole.rpartition(" ")[2] == again.rpartition(" ")[2]
    shutil.rmtree(tmp_path / "killed" / "12")
    assert "steps 8 to 12 on 2x1 ranks" in run(2, program, "--folder", folder)


def test_overlap_gather(tmp_path: pathlib.Path) -> None:
    picture = tmp_path / "overlap.png"
    output = run(2, EXAMPLES / "overlap_gather.py", "--width", "256", "--plot", str(picture))
    assert "the same bits as without overlap" in output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_cached_contrastive() -> None:
    output = run(2, EXAMPLES / "cached_contrastive.py", "--steps", "40")
    assert "by rank: 8, 14; its collectives: reduce_scatter_count 1, all_reduce_count 0" in output


def test_beside_fsdp2() -> None:
    output = run(4, EXAMPLES / "beside_fsdp2.py")
    assert "ok  bf16, beside FSDP2" in output


def test_the_loop_in_the_readme(tmp_path: pathlib.Path) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    (block,) = [block for block in python_blocks(readme) if "import torch" in block]
    (tmp_path / "program.py").write_text(block)
    lines = sorted(run(4, tmp_path / "program.py").splitlines())
    losses = {line.rpartition(" ")[2] for line in lines}
    assert [line[:10] for line in lines] == [f"[{r}] rank {r}" for r in range(4)]
    assert len(losses) == 1 and float(losses.pop()) < 8  # from 8, the variance of the sum
