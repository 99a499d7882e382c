"""Which sources clang-tidy looks at."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

from tree import write

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "cmake"))

import clang_tidy  # noqa: E402

FILES = {
    ".clang-tidy": "",
    "hsdp/a.cpp": '#include "hsdp/a.h"\n',
    "hsdp/a.h": "",
    "hsdp/alone.h": "",
    "hsdp/b.cpp": '#include "hsdp/alone.h"\n',
    "tests/a_test.cpp": "",
}
SOURCES = ["hsdp/a.cpp", "hsdp/b.cpp"]


class ChosenSources(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        root = pathlib.Path(folder.name).resolve()
        self.root, self.record = root, root / ".ci" / "clang_tidy_clean"
        for name, value in {"ROOT": root, "RECORD": self.record}.items():
            self.addCleanup(setattr, clang_tidy, name, getattr(clang_tidy, name))
            setattr(clang_tidy, name, value)
        commands = [{"file": str(root / name)} for name in FILES if name.endswith(".cpp")]
        self.change(FILES | {"build/compile_commands.json": json.dumps(commands), ".gitignore": "build\n"})
        self.git("init", "-q")
        self.commit()
        self.change({".ci/clang_tidy_clean": self.git("rev-parse", "HEAD")})

    def change(self, texts: dict[str, str]) -> None:
        write(self.root, texts)

    def git(self, *command: str) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        done = subprocess.run(["git", *author, *command], cwd=self.root, capture_output=True, text=True,
                              check=True)
        return done.stdout

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-qm", "x")

    def chosen(self, everything: bool = False) -> list[str]:
        return clang_tidy.chosen_sources(self.root / "build", everything)

    def test_nothing_where_nothing_changed(self) -> None:
        self.assertEqual(self.chosen(), [])
        self.change({"tests/a_test.cpp": "int x;\n"})
        self.assertEqual(self.chosen(), [])

    def test_a_changed_source_and_that_of_a_changed_header(self) -> None:
        for committed in (False, True):
            for changed, looked_at in {"hsdp/a.cpp": "hsdp/a.cpp", "hsdp/a.h": "hsdp/a.cpp",
                                       "hsdp/alone.h": "hsdp/b.cpp"}.items():
                with self.subTest(changed=changed, committed=committed):
                    self.setUp()
                    self.change({changed: FILES[changed] + "int x;\n"})
                    if committed:
                        self.commit()
                    self.assertEqual(self.chosen(), [looked_at])

    def test_everything_where_what_changed_is_not_known(self) -> None:
        self.assertEqual(self.chosen(everything=True), SOURCES)
        self.change({".clang-tidy": "Checks: '*'\n"})
        self.assertEqual(self.chosen(), SOURCES)
        self.change({".clang-tidy": "", ".ci/clang_tidy_clean": 40 * "0"})
        self.assertEqual(self.chosen(), SOURCES)
        self.record.unlink()
        self.assertEqual(self.chosen(), SOURCES)


if __name__ == "__main__":
    unittest.main()
