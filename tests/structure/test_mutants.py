"""Faults that make mutants plants: found, planted, and active by their number alone."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

MUTANTS = pathlib.Path(__file__).resolve().parents[1] / "mutants"
sys.path.insert(0, str(MUTANTS))

import cpp_faults  # noqa: E402
import python_faults  # noqa: E402
from fault import plant  # noqa: E402

CPP = """#include <cstdio>

// if (n < 1) { this is no code }
constexpr int kFixed = 3;

void say(const char* text) { std::puts(text); }

int main() {
  int n = kFixed;
  if (n < 3 || n > 4) {
    say("if (out < range)");
  }
  for (int i = 0; i < 2; ++i) {
    say("turn");
  }
  if (const int m = n; m == 3) say("three");
}
"""
PYTHON = '''"""if n < 1: this is no code"""

from __future__ import annotations

n: int = 3
if n < 3:
    print("below")
print(f"{n + 1}")
for i in range(2):
    print("turn")
'''


def said(command: list[str], fault: int, folder: str, **environment: str) -> str:
    env = {**os.environ, **environment, "HSDP_FAULT": str(fault), "HSDP_FAULTS_REACHED": folder}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


class Mutants(unittest.TestCase):
    def test_faults_in_cpp(self) -> None:
        faults = cpp_faults.find_faults("a.cpp", CPP)
        self.assertEqual(
            [(f.line, f.kind, f.wrong) for f in faults],
            [(10, "condition negated", "!(n < 3 || n > 4)"),
             (10, "comparison turned", "n >= 3"), (10, "bound moved", "n <= 3"),
             (10, "comparison turned", "n <= 4"), (10, "bound moved", "n >= 4"),
             (13, "comparison turned", "i >= 2"), (13, "bound moved", "i <= 2"),
             (16, "comparison turned", "m != 3"),
             (11, "call left out", ""), (14, "call left out", ""),
             (10, "constant changed", "3 + 1"), (10, "constant changed", "4 + 1"),
             (13, "constant changed", "0 + 1"), (13, "constant changed", "2 + 1"),
             (16, "constant changed", "3 + 1")],
        )
        chosen = {1: faults[2], 2: faults[6], 3: faults[7], 4: faults[9]}
        with tempfile.TemporaryDirectory() as folder:
            source, program = pathlib.Path(folder, "a.cpp"), pathlib.Path(folder, "a")
            source.write_text(cpp_faults.INCLUDE + plant(CPP, chosen))
            compiler = ["c++", "-std=c++20", "-I", str(MUTANTS.parents[1])]
            subprocess.run([*compiler, str(source), "-o", str(program)], check=True)
            reached = pathlib.Path(folder, "reached")
            reached.mkdir()
            outputs = [said([str(program)], fault, str(reached)) for fault in range(5)]
            self.assertEqual({path.name for path in reached.iterdir()}, {"1", "2", "3", "4"})
        usual = "turn\nturn\nthree\n"
        wrong = [f"if (out < range)\n{usual}", "turn\nturn\nturn\nthree\n", "turn\nturn\n", "three\n"]
        self.assertEqual(outputs, [usual, *wrong])

    def test_faults_in_python(self) -> None:
        faults = python_faults.find_faults("a.py", PYTHON)
        self.assertEqual(
            [(f.line, f.kind, f.wrong) for f in faults],
            [(5, "constant changed", "4"), (6, "condition negated", "not (n < 3)"),
             (6, "comparison turned", "(n) >= (3)"), (6, "bound moved", "(n) <= (3)"),
             (6, "constant changed", "4"), (7, "call left out", "None"), (8, "call left out", "None"),
             (9, "constant changed", "3"), (10, "call left out", "None")],
        )
        chosen = {1: faults[3], 2: faults[7], 3: faults[8]}
        with tempfile.TemporaryDirectory() as folder:
            package = pathlib.Path(folder, "hsdp")
            package.mkdir()
            (package / "__init__.py").touch()
            (package / "_mutants.py").write_text((MUTANTS / "_mutants.py").read_text())
            (package / "a.py").write_text(python_faults.with_switch(plant(PYTHON, chosen)))
            reached = pathlib.Path(folder, "reached")
            reached.mkdir()
            command = [sys.executable, "-m", "hsdp.a"]
            outputs = [said(command, fault, str(reached), PYTHONPATH=folder) for fault in range(4)]
            self.assertEqual({path.name for path in reached.iterdir()}, {"1", "2", "3"})
        usual = "4\nturn\nturn\n"
        self.assertEqual(outputs, [usual, f"below\n{usual}", "4\nturn\nturn\nturn\n", "4\n"])


if __name__ == "__main__":
    unittest.main()
