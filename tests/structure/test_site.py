"""What the documentation site makes of links and of headers."""

from __future__ import annotations

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "docs" / "site"))

from doxygen_comments import with_doxygen_comments  # noqa: E402
from repository_links import linked_sources, with_site_links  # noqa: E402


class Links(unittest.TestCase):
    def test_from_docs_to_other_folders(self) -> None:
        self.assertEqual(
            with_site_links("[a](../examples/demo.sh) [b](../README.md#limits) [c](zero.md#x)", "loss.md"),
            "[a](source/examples/demo.sh.md) [b](index.md#limits) [c](zero.md#x)",
        )

    def test_from_a_folder_of_docs(self) -> None:
        self.assertEqual(with_site_links("[a](../../LICENSE)", "tasks/x.md"), "[a](../source/LICENSE.md)")

    def test_from_the_readme(self) -> None:
        self.assertEqual(
            with_site_links("![p](docs/data_flow.svg) [a](docs/loss.md#x) [b](examples/demo)", "index.md"),
            "![p](data_flow.svg) [a](loss.md#x) [b](source/examples/demo.md)",
        )

    def test_a_public_header_leads_to_its_reference(self) -> None:
        self.assertEqual(
            with_site_links("[`zero/adamw.h`](../zero/adamw.h) [b](../zero/adamw.cpp)", "zero.md"),
            "[`zero/adamw.h`](cpp/zero/adamw.h.md) [b](source/zero/adamw.cpp.md)",
        )

    def test_what_is_not_in_the_repository_stays(self) -> None:
        links = "[a](../examples/none.py)", "[a](../../outside.md)", "[a](../build/x)", "[a](https://b.c/d)"
        for link in links:
            self.assertEqual(with_site_links(link, "loss.md"), link)

    def test_code_stays(self) -> None:
        for code in ("`a[i](../LICENSE)`", "```cpp\nf[i](../LICENSE);\n```"):
            self.assertEqual(with_site_links(code, "loss.md"), code)

    def test_a_folder_brings_its_files(self) -> None:
        found = linked_sources("[a](../examples/demo) [b](zero.md)", "loss.md")
        self.assertIn("examples/demo", found)
        self.assertIn("examples/demo/claims.h", found)
        self.assertTrue(all(path.startswith("examples/demo") for path in found))


class HeaderComments(unittest.TestCase):
    def assert_becomes(self, header: str, expected: str) -> None:
        self.assertEqual("\n".join(with_doxygen_comments(header.splitlines())), expected)

    def test_the_block_at_the_top_is_of_the_file(self) -> None:
        self.assert_becomes("// A mesh.\n#pragma once", "/// \\file\n///\n/// A mesh.\n#pragma once")

    def test_above_and_behind_a_declaration(self) -> None:
        self.assert_becomes(
            "{\n  // Above.\n  int a;    // behind,\n            // going on\n  // Next.\n  int b;",
            "{\n  /// Above.\n  int a;  ///< behind,\n            ///< going on\n  /// Next.\n  int b;",
        )

    def test_what_describes_nothing_is_left_out(self) -> None:
        self.assert_becomes("int a;\n// Alone.\n\n}  // namespace hsdp", "int a;\n\n}  // namespace hsdp")

    def test_nothing_in_prose_is_markup(self) -> None:
        self.assert_becomes(
            "int a;\n// <what> @a \\b 1% *c* --d `e<f>`.\nint b;",
            "int a;\n/// \\<what\\> \\@a \\\\b 1\\% \\*c\\* \\--d `e<f>`.\nint b;",
        )

    def test_indented_lines_are_code(self) -> None:
        self.assert_becomes(
            "int a;\n// So:\n//   f(*p);\n// Then.\nint b;",
            "int a;\n/// So:\n///\n///     f(*p);\n///\n/// Then.\nint b;",
        )

    def test_labels_begin_paragraphs(self) -> None:
        self.assert_becomes(
            "int a;\n// All.\n// Threads: one at a time,\n//   always.\n// Errors: none.\nint b;",
            "int a;\n/// All.\n///\n/// **Threads:** one at a time,\n/// always.\n///\n"
            "/// **Errors:** none.\nint b;",
        )


if __name__ == "__main__":
    unittest.main()
