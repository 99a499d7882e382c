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


def rank(number: int, *calls: str | dict[str, Any], ranks: int = 2) -> list[Line]:
    """The lines of a rank of communicator "c": names of calls, or their fields."""
    lines: list[Line] = []
    for call in calls:
        terms = {"call": call} if isinstance(call, str) else call
        lines.append({"kind": "call", "communicator": "c", "ranks": ranks, "rank": number,
                      "world_rank": 4 + number, "sequence": len(lines), "group": 1, "peer": None, "bytes": 8,
                      "dtype": 1, "operation": None, "in": False, "out": False, **terms})
    return lines


def send(to: int, **terms: Any) -> dict[str, Any]:
    return {"call": "send", "peer": to, **terms}


def receive(source: int, **terms: Any) -> dict[str, Any]:
    return {"call": "receive", "peer": source, **terms}


def gather(**terms: Any) -> dict[str, Any]:
    return {"call": "all_gather", **terms}


# What ranks 0 and 1 called, and what is wrong with it.
MATCHES: list[tuple[str, list[Line], list[Line], list[str]]] = [
    ("equal calls", *(rank(r, "all_gather", {"call": "broadcast", "peer": 1, "out": None}, send(1 - r),
                           receive(1 - r)) for r in (0, 1)), []),
    ("sends and receives between collectives", rank(0, send(1), "all_gather"),
     rank(1, "all_gather", receive(0)), []),
    ("the sequence decides and not the place in the file", rank(0, "all_reduce", "all_gather"),
     rank(1, "all_reduce", "all_gather")[::-1], []),
    ("another order is told once", rank(0, "all_reduce", "all_gather", "all_reduce"),
     rank(1, "all_gather", "all_reduce", "all_reduce"),
     ["communicator c, collective 1: all_reduce of 8 bytes, dtype 1 on rank 4, "
      "all_gather of 8 bytes, dtype 1 on rank 5"]),
    *((f"another {term}", rank(0, "all_gather"), rank(1, gather(**{term: value})),
       [f"communicator c, collective 1: all_gather of 8 bytes, dtype 1 on rank 4, {other} on rank 5"])
      for term, value, other in [
          ("bytes", 16, "all_gather of 16 bytes, dtype 1"), ("dtype", 7, "all_gather of 8 bytes, dtype 7"),
          ("peer", 1, "all_gather of 8 bytes from its rank 1, dtype 1"),
          ("operation", 2, "all_gather of 8 bytes, dtype 1, operation 2")]),
    ("a missing collective", rank(0, "all_gather", "all_gather"), rank(1, "all_gather"),
     ["communicator c: 2 collectives on rank 4, 1 on rank 5"]),
    ("a missing receive", rank(0, send(1)), rank(1, send(0), receive(0)),
     ["communicator c, from rank 5 to rank 4: 1 sends, 0 receives"]),
    ("a missing send", rank(0, receive(1)), rank(1), ["communicator c: no calls of 1 of its 2 ranks",
     "communicator c, from its rank 1 to rank 4: 0 sends, 1 receives"]),
    ("messages of other sizes", rank(0, send(1)), rank(1, receive(0, bytes=9)),
     ["communicator c, from rank 4 to rank 5, message 1: 8 bytes are sent, 9 received"]),
    ("a rank without a trace", rank(0, "ncclCommInitRankConfig", ranks=3),
     rank(2, "ncclCommInitRankConfig", ranks=3), ["communicator c: no calls of 1 of its 3 ranks"]),
    ("what differs before an abort", rank(0, "all_gather", "ncclCommAbort"),
     rank(1, gather(bytes=9), "ncclCommAbort"),
     ["communicator c, collective 1: all_gather of 8 bytes, dtype 1 on rank 4, "
      "all_gather of 9 bytes, dtype 1 on rank 5"]),
]
REGISTRATIONS: list[tuple[str, list[Line], list[Line], list[str]]] = [
    *((f"of a message, sent from {sent}", rank(0, send(1, **{"in": sent})), rank(1, receive(0, out=not sent)),
       ["communicator c, from rank 4 to rank 5, message 1 of 8 bytes: memory is "
        f"registered on rank {there} and not on rank {not_there}"])
      for sent, there, not_there in ((True, 4, 5), (False, 5, 4))),
    ("of a message on both ranks", rank(0, send(1, **{"in": True})), rank(1, receive(0, out=True)), []),
    *((f"of a collective, {what}", rank(0, gather(**{side: True})), rank(1, "all_gather"),
       [f"communicator c, collective 1, all_gather of 8 bytes, dtype 1: {what} memory is registered on "
        "rank 4 and not on rank 5"]) for side, what in (("in", "read"), ("out", "written"))),
    ("a rank without memory", rank(0, gather(**{"in": True})), rank(1, gather(**{"in": None})), []),
]


class Findings(unittest.TestCase):
    def test_what_is_a_violation_and_what_is_none(self) -> None:
        for rule, rows in (("match", MATCHES), ("registration", REGISTRATIONS)):
            for title, first, second, expected in rows:
                with self.subTest(title):
                    found = check(first + second).violations
                    self.assertEqual(found, [Finding(rule, text) for text in expected])

    def test_what_an_abort_cut_off_is_a_note(self) -> None:
        for end in ("ncclCommAbort", "ncclCommRevoke"):
            report = check(rank(0, send(1), "all_gather") + rank(1, end))
            self.assertEqual(report.violations, [])
            self.assertEqual(len(report.notes), 2)


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

    def text(self, lines: list[Line]) -> str:
        return "".join(json.dumps(line) + "\n" for line in lines)

    def test_no_violation(self) -> None:
        files = [self.text(rank(r, "all_gather")) for r in (0, 1)]
        self.assertEqual(self.run_on(*files), (0, "trace: 2 ranks, 2 calls, 0 violations\n"))

    def test_what_the_shim_found_counts(self) -> None:
        found = [{"kind": kind, "rule": "device", "text": f"a {kind}"} for kind in ("violation", "note")]
        status, output = self.run_on(self.text(rank(0, "all_gather", ranks=1) + found))
        self.assertEqual((status, output), (1, "note: device: a note\nviolation: device: a violation\n"
                                               "trace: 1 ranks, 1 calls, 1 violations\n"))

    def test_findings_go_to_a_file_too(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "found.json"
            self.run_on(self.text(rank(0, "all_gather")), arguments=("--json", str(file)))
            self.assertEqual(json.loads(file.read_text()), {
                "ranks": 1, "calls": 1, "notes": [], "violations": [
                    {"rule": "match", "text": "communicator c: no calls of 1 of its 2 ranks"}]})

    def test_lines_that_are_compared_with_nothing(self) -> None:
        alone = self.text(rank(0, "all_gather", ranks=1))
        unknown = self.text(rank(-1, gather(communicator="", world_rank=-1), ranks=0))
        for title, text, calls in (("one that was cut off", '{"kind": "ca', 1),
                                   ("a call on an unknown communicator", unknown, 2)):
            with self.subTest(title):
                self.assertEqual(self.run_on(alone + text),
                                 (0, f"trace: 1 ranks, {calls} calls, 0 violations\n"))

    def test_no_traces_are_bad_usage(self) -> None:
        for files, said in (((), "got none"), (("nonsense\n",), "expected traces")):
            status, output = self.run_on(*files)
            self.assertEqual(status, 2)
            self.assertIn(said, output)


if __name__ == "__main__":
    unittest.main()
