"""Proves that check_notes finds what it is for."""

import unittest

import check_notes
from tree import tree


class CheckNotes(unittest.TestCase):
    def found(self, notes: str, source: str, *, other_page: str = "") -> list:
        with tree({"docs/notes/a.md": notes, "docs/notes/b.md": other_page, "hsdp/a.h": source}) as root:
            return check_notes.violations(root)

    def test_all_is_well(self) -> None:
        self.assertEqual(self.found("## Note: one way\n", "// Why [Note: one\n  // way].\n"), [])
        self.assertEqual(self.found("## Note: one\n", "// [Note: one] [Note: two]\n", other_page="## Note: two\n"), [])

    def test_a_note_that_nobody_cites(self) -> None:
        found = self.found("## Note: one\n## Note: two [Note: one]\n", "// [Note: one]\n")
        self.assertEqual(len(found), 1)
        self.assertIn("nobody cites 'two", found[0])

    def test_a_citation_without_a_note(self) -> None:
        found = self.found("## Note: one\n[Note: three]\n", "// [Note: one] [Note: two]\n")
        self.assertEqual(sorted(line.split(":")[0] for line in found), ["docs/notes/a.md", "hsdp/a.h"])

    def test_two_notes_of_one_title(self) -> None:
        self.assertEqual(len(self.found("## Note: one\n## Note: one\n", "// [Note: one]")), 1)
        self.assertEqual(len(self.found("## Note: one\n", "// [Note: one]", other_page="## Note: one\n")), 1)


if __name__ == "__main__":
    unittest.main()
