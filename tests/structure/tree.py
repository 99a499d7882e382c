"""Files that a test checks."""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator


def write(root: pathlib.Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def tree(texts: dict[str, str]) -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory() as folder:
        write(pathlib.Path(folder), texts)
        yield pathlib.Path(folder)
