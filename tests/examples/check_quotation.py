"""Checks that README.md quotes the smallest example exactly."""

import difflib
import pathlib
import re
import sys


def main(readme, source):
    blocks = re.findall(r"^```cpp\n(.*?)^```$", pathlib.Path(readme).read_text(encoding="utf-8"),
                        re.DOTALL | re.MULTILINE)
    program = pathlib.Path(source).read_text(encoding="utf-8")
    if program in blocks:
        return 0
    quoted = blocks[0] if blocks else ""
    sys.stderr.writelines(difflib.unified_diff(quoted.splitlines(True), program.splitlines(True),
                                               readme, source))
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
