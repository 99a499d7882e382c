"""What the documentation site makes of links and of headers."""

from __future__ import annotations

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "docs" / "site"))

from doxygen_comments import with_doxygen_comments  # noqa: E402
from repository_links import linked_sources, note_pages, with_site_links  # noqa: E402


# A page, its text, and what the site makes of it.
LINKS = [
    ("loss.md", "[a](../examples/demo.sh) [b](../README.md#limits) [c](zero.md#x)",
     "[a](source/examples/demo.sh.md) [b](index.md#limits) [c](zero.md#x)"),
    ("tasks/x.md", "[a](../../LICENSE)", "[a](../source/LICENSE.md)"),
    ("index.md", "![p](docs/data_flow.svg) [a](docs/loss.md#x) [b](examples/demo)",
     "![p](data_flow.svg) [a](loss.md#x) [b](source/examples/demo.md)"),
    # A public header leads to its reference.
    ("zero.md", "[`zero/adamw.h`](../zero/adamw.h) [b](../zero/adamw.cpp)",
     "[`zero/adamw.h`](cpp/zero/adamw.h.md) [b](source/zero/adamw.cpp.md)"),
    # What is not in the repository stays as it is, and so does code.
    *(("loss.md", text, text) for text in (
        "[a](../examples/none.py)", "[a](../../outside.md)", "[a](../build/x)", "[a](https://b.c/d)",
        "`a[i](../LICENSE)`", "```cpp\nf[i](../LICENSE);\n```")),
]


class Links(unittest.TestCase):
    def test_they_lead_to_pages_of_the_site(self) -> None:
        for page, text, expected in LINKS:
            with self.subTest(text):
                self.assertEqual(with_site_links(text, page), expected)

    def test_a_folder_brings_its_files(self) -> None:
        found = linked_sources("[a](../examples/demo) [b](zero.md)", "loss.md")
        self.assertIn("examples/demo", found)
        self.assertIn("examples/demo/claims.h", found)
        self.assertTrue(all(path.startswith("examples/demo") for path in found))

    def test_notes_have_their_pages(self) -> None:
        pages = note_pages()
        self.assertEqual(pages["dropped step"], "notes/reducer.md")
        self.assertEqual(pages["p.grad is taken out"], "notes/python.md")


# Lines of a header, and what they become.
COMMENTS = {
    "the block at the top is of the file": (
        "// A mesh.\n#pragma once", "/// \\file\n///\n/// A mesh.\n#pragma once"),
    "above and behind a declaration": (
        "{\n  // Above.\n  int a;    // behind,\n            // going on\n  // Next.\n  int b;",
        "{\n  /// Above.\n  int a;  ///< behind,\n            ///< going on\n  /// Next.\n  int b;"),
    "what describes nothing is left out": (
        "int a;\n// Alone.\n\n}  // namespace hsdp", "int a;\n\n}  // namespace hsdp"),
    "nothing in prose is markup": (
        "int a;\n// <what> @a \\b 1% *c* --d `e<f>`.\nint b;",
        "int a;\n/// \\<what\\> \\@a \\\\b 1\\% \\*c\\* \\--d `e<f>`.\nint b;"),
    "indented lines are code": (
        "int a;\n// So:\n//   f(*p);\n// Then.\nint b;",
        "int a;\n/// So:\n///\n///     f(*p);\n///\n/// Then.\nint b;"),
    "labels begin paragraphs": (
        "int a;\n// All.\n// Threads: one at a time,\n//   always.\n// Errors: none.\nint b;",
        "int a;\n/// All.\n///\n/// **Threads:** one at a time,\n/// always.\n///\n"
        "/// **Errors:** none.\nint b;"),
}


class HeaderComments(unittest.TestCase):
    def test_they_become_those_of_doxygen(self) -> None:
        for title, (header, expected) in COMMENTS.items():
            with self.subTest(title):
                self.assertEqual("\n".join(with_doxygen_comments(header.splitlines())), expected)


if __name__ == "__main__":
    unittest.main()
