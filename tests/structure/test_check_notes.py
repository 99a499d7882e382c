"""Proves that check_notes finds what it is for."""

import pathlib
import tempfile
import unittest

import check_notes


class CheckNotes(unittest.TestCase):
    def found(self, notes: str, source: str, *, other_page: str = "") -> list:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "docs" / "notes").mkdir(parents=True)
            (root / "hsdp").mkdir()
            (root / "docs" / "notes" / "a.md").write_text(notes, encoding="utf-8")
            (root / "docs" / "notes" / "b.md").write_text(other_page, encoding="utf-8")
            (root / "hsdp" / "a.h").write_text(source, encoding="utf-8")
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
