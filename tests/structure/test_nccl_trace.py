"""What the comparison of traces finds, and what it leaves alone."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "gpu"))

from nccl_trace import Finding, check, main  # noqa: E402

Line = dict[str, Any]


class Rank:
    """The calls that one rank of communicator "c" makes."""

    def __init__(self, rank: int, ranks: int = 2) -> None:
        self.rank = rank
        self.ranks = ranks
        self.lines: list[Line] = []

    def add(self, call: str, **terms: Any) -> Rank:
        line: Line = {"kind": "call", "communicator": "c", "ranks": self.ranks, "rank": self.rank,
                      "world_rank": 4 + self.rank, "sequence": len(self.lines), "group": 1, "call": call,
                      "peer": None, "bytes": 8, "dtype": 1, "operation": None, "in": False, "out": False}
        self.lines.append({**line, **terms})
        return self


def violations(*ranks: Rank) -> list[Finding]:
    return check([line for rank in ranks for line in rank.lines]).violations


class Matches(unittest.TestCase):
    def test_equal_calls(self) -> None:
        ranks = [Rank(r).add("all_gather").add("broadcast", peer=1, out=None).add("send", peer=1 - r)
                 .add("receive", peer=1 - r) for r in (0, 1)]
        self.assertEqual(violations(*ranks), [])

    def test_sends_and_receives_may_lie_between_collectives_anywhere(self) -> None:
        self.assertEqual(violations(Rank(0).add("send", peer=1).add("all_gather"),
                                    Rank(1).add("all_gather").add("receive", peer=0)), [])

    def test_the_sequence_decides_and_not_the_place_in_the_file(self) -> None:
        swapped = Rank(1).add("all_reduce").add("all_gather")
        swapped.lines.reverse()
        self.assertEqual(violations(Rank(0).add("all_reduce").add("all_gather"), swapped), [])

    def test_another_order_is_told_once(self) -> None:
        found = violations(Rank(0).add("all_reduce").add("all_gather").add("all_reduce"),
                           Rank(1).add("all_gather").add("all_reduce").add("all_reduce"))
        self.assertEqual(found, [Finding(
            "match", "communicator c, collective 1: all_reduce of 8 bytes, dtype 1 on rank 4, "
                     "all_gather of 8 bytes, dtype 1 on rank 5")])

    def test_every_term_counts(self) -> None:
        for term, value in (("bytes", 16), ("peer", 1), ("dtype", 7), ("operation", 2)):
            found = violations(Rank(0).add("all_reduce"), Rank(1).add("all_reduce", **{term: value}))
            self.assertEqual([finding.rule for finding in found], ["match"], term)
            self.assertIn(str(value), found[0].text)

    def test_a_missing_collective(self) -> None:
        found = violations(Rank(0).add("all_gather").add("all_gather"), Rank(1).add("all_gather"))
        self.assertEqual(found, [Finding("match", "communicator c: 2 collectives on rank 4, 1 on rank 5")])

    def test_a_missing_receive_and_a_missing_send(self) -> None:
        found = violations(Rank(0).add("send", peer=1), Rank(1).add("send", peer=0).add("receive", peer=0))
        self.assertEqual(found, [
            Finding("match", "communicator c, from rank 5 to rank 4: 1 sends, 0 receives")])

    def test_messages_of_other_sizes(self) -> None:
        found = violations(Rank(0).add("send", peer=1), Rank(1).add("receive", peer=0, bytes=9))
        self.assertEqual(found, [Finding("match", "communicator c, from rank 4 to rank 5, message 1: "
                                                  "8 bytes are sent, 9 received")])

    def test_a_rank_without_a_trace(self) -> None:
        found = violations(Rank(0, 3).add("ncclCommInitRankConfig"), Rank(2, 3).add("ncclCommInitRankConfig"))
        self.assertEqual(found, [Finding("match", "communicator c: no calls of 1 of its 3 ranks")])

    def test_what_an_abort_cut_off_is_a_note(self) -> None:
        for end in ("ncclCommAbort", "ncclCommRevoke"):
            lines = (Rank(0).add("send", peer=1).add("all_gather").lines + Rank(1).add(end).lines)
            report = check(lines)
            self.assertEqual(report.violations, [])
            self.assertEqual(len(report.notes), 2)

    def test_what_differs_before_an_abort_is_a_violation(self) -> None:
        found = violations(Rank(0).add("all_gather").add("ncclCommAbort"),
                           Rank(1).add("all_gather", bytes=9).add("ncclCommAbort"))
        self.assertEqual([finding.rule for finding in found], ["match"])


class Registration(unittest.TestCase):
    def test_of_a_message(self) -> None:
        for sent in (True, False):
            found = violations(Rank(0).add("send", peer=1, **{"in": sent}),
                               Rank(1).add("receive", peer=0, out=not sent))
            there, not_there = (4, 5) if sent else (5, 4)
            self.assertEqual(found, [Finding(
                "registration", "communicator c, from rank 4 to rank 5, message 1 of 8 bytes: memory is "
                                f"registered on rank {there} and not on rank {not_there}")])
        self.assertEqual(violations(Rank(0).add("send", peer=1, **{"in": True}),
                                    Rank(1).add("receive", peer=0, out=True)), [])

    def test_of_a_collective(self) -> None:
        for side, what in (("in", "read"), ("out", "written")):
            found = violations(Rank(0).add("all_gather", **{side: True}), Rank(1).add("all_gather"))
            self.assertEqual([finding.rule for finding in found], ["registration"])
            self.assertIn(f"{what} memory is registered on rank 4 and not on rank 5", found[0].text)

    def test_a_rank_without_memory_agrees_with_all(self) -> None:
        self.assertEqual(violations(Rank(0).add("all_gather", **{"in": True}),
                                    Rank(1).add("all_gather", **{"in": None})), [])


class CommandLine(unittest.TestCase):
    def run_on(self, *files: str, arguments: tuple[str, ...] = ()) -> tuple[int, str]:
        with tempfile.TemporaryDirectory() as folder:
            for number, text in enumerate(files):
                (pathlib.Path(folder) / f"{number}.jsonl").write_text(text)
            output = io.StringIO()
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                try:
                    status = main([folder, *arguments])
                except SystemExit as error:
                    status = int(str(error.code))
            return status, output.getvalue()

    def text(self, rank: Rank) -> str:
        return "".join(json.dumps(line) + "\n" for line in rank.lines)

    def test_no_violation(self) -> None:
        files = [self.text(Rank(r).add("all_gather")) for r in (0, 1)]
        self.assertEqual(self.run_on(*files), (0, "trace: 2 ranks, 2 calls, 0 violations\n"))

    def test_what_the_shim_found_counts(self) -> None:
        found = [json.dumps({"kind": kind, "rule": "device", "text": f"a {kind}"}) + "\n"
                 for kind in ("violation", "note")]
        status, output = self.run_on(self.text(Rank(0, 1).add("all_gather")) + "".join(found))
        self.assertEqual((status, output), (1, "note: device: a note\nviolation: device: a violation\n"
                                               "trace: 1 ranks, 1 calls, 1 violations\n"))

    def test_findings_go_to_a_file_too(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "found.json"
            self.run_on(self.text(Rank(0).add("all_gather")), arguments=("--json", str(file)))
            self.assertEqual(json.loads(file.read_text()), {
                "ranks": 1, "calls": 1, "notes": [], "violations": [
                    {"rule": "match", "text": "communicator c: no calls of 1 of its 2 ranks"}]})

    def test_a_last_line_that_was_cut_off_is_left_out(self) -> None:
        self.assertEqual(self.run_on(self.text(Rank(0, 1).add("all_gather")) + '{"kind": "ca'),
                         (0, "trace: 1 ranks, 1 calls, 0 violations\n"))

    def test_calls_on_an_unknown_communicator_are_compared_with_nothing(self) -> None:
        unknown = self.text(Rank(-1, 0).add("all_gather", communicator="", world_rank=-1))
        status, output = self.run_on(self.text(Rank(0, 1).add("all_gather")) + unknown)
        self.assertEqual((status, output), (0, "trace: 1 ranks, 2 calls, 0 violations\n"))

    def test_no_traces_are_bad_usage(self) -> None:
        for files, said in (((), "got none"), (("nonsense\n",), "expected traces")):
            status, output = self.run_on(*files)
            self.assertEqual(status, 2)
            self.assertIn(said, output)


if __name__ == "__main__":
    unittest.main()
