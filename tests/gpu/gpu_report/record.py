"""The report of what each stage found, as JSON and as text."""

import dataclasses
import json
import pathlib
from typing import Any, Dict, List, Optional

from gpu_report.lines import FAILED, NOT_RUN, OK, Check, Measurement

FORMAT = 1
SUMMARY_WIDTH = 90


@dataclasses.dataclass
class Stage:
    """A part of the run: its checks, its measurements, and the log of its output."""

    name: str
    seconds: float = 0.0
    log: str = ""
    checks: List[Check] = dataclasses.field(default_factory=list)
    measurements: List[Measurement] = dataclasses.field(default_factory=list)
    notes: List[str] = dataclasses.field(default_factory=list)

    @property
    def verdict(self) -> str:
        """FAILED if any check failed, not run if none ran, else ok."""
        verdicts = {check.verdict for check in self.checks}
        if FAILED in verdicts:
            return FAILED
        return NOT_RUN if verdicts == {NOT_RUN} else OK

    def add_not_run(self, names: List[str], why: str) -> None:
        self.checks += [Check(name, NOT_RUN, why) for name in names]


class Report:
    """All stages, and the facts about the machine."""

    def __init__(self, date: str, commit: str) -> None:
        self.date = date
        self.commit = commit
        self.machine: Dict[str, Any] = {}
        self.stages: List[Stage] = []

    def count(self, verdict: str) -> int:
        return sum(check.verdict == verdict for stage in self.stages for check in stage.checks)

    def as_json(self) -> str:
        stages = [{**dataclasses.asdict(stage), "verdict": stage.verdict} for stage in self.stages]
        document = {
            "format": FORMAT, "date": self.date, "commit": self.commit, "machine": self.machine,
            "totals": {verdict: self.count(verdict) for verdict in (OK, FAILED, NOT_RUN)},
            "stages": stages,
        }
        return json.dumps(document, indent=1) + "\n"

    def as_text(self) -> str:
        lines = [f"hsdp on GPUs, {self.date}, commit {self.commit}", "", "machine"]
        lines += _facts(self.machine)
        said = None
        for stage in self.stages:
            reason = _common_reason(stage)
            lines += ["", *_stage_lines(stage, again=reason is not None and reason == said)]
            said = reason
        lines += ["", "summary"]
        width = max(len(stage.name) for stage in self.stages) if self.stages else 0
        said = ""
        for stage in self.stages:
            text = _verdict_text(stage)
            short = text if len(text) <= SUMMARY_WIDTH else f"{text[:SUMMARY_WIDTH]}..."
            again = text == said and _common_reason(stage) is not None
            lines.append(f"  {stage.name:{width}}  {f'{NOT_RUN}: as above' if again else short}")
            said = text
        totals = ", ".join(f"{self.count(v)} {v}" for v in (OK, FAILED, NOT_RUN))
        return "\n".join([*lines, f"  {totals}", ""])

    def write(self, folder: pathlib.Path) -> None:
        """Writes the report so that each file is complete at any moment."""
        for name, text in (("report.json", self.as_json()), ("report.txt", self.as_text())):
            part = folder / f"{name}.part"
            part.write_text(text, encoding="utf-8")
            part.replace(folder / name)


def _facts(facts: Dict[str, Any]) -> List[str]:
    lines = []
    for name, value in facts.items():
        rows: List[str] = []
        if isinstance(value, dict):
            rows = [f"{key}={text}" for key, text in value.items()]
        elif isinstance(value, list):
            rows = value
        else:
            rows = str(value).splitlines()
        for index, row in enumerate(rows or ["none"]):
            lines.append(f"  {name if index == 0 else '':12}  {row}".rstrip())
    return lines


def _common_reason(stage: Stage) -> Optional[str]:
    reasons = {check.detail for check in stage.checks}
    return reasons.pop() if stage.verdict == NOT_RUN and len(reasons) == 1 else None


def _verdict_text(stage: Stage) -> str:
    reason = _common_reason(stage)
    if reason is not None:
        return f"{NOT_RUN}: {reason}"
    failed = sum(check.verdict == FAILED for check in stage.checks)
    left_out = sum(check.verdict == NOT_RUN for check in stage.checks)
    below = sum("below goal" in measured.note for measured in stage.measurements)
    words = [f"{failed} of {len(stage.checks)} checks"] if failed else []
    words += [f"{left_out} not run"] if left_out else []
    words += [f"{below} below goal"] if below else []
    return stage.verdict + (f": {', '.join(words)}" if words else "")


def _stage_lines(stage: Stage, again: bool) -> List[str]:
    log = f", log {stage.log}" if stage.log else ""
    verdict = f"{NOT_RUN}: as above" if again else _verdict_text(stage)
    lines = [f"{stage.name}: {verdict} ({stage.seconds:.0f} s{log})"]
    reason = _common_reason(stage)
    said = ""
    for check in stage.checks:
        again = check.verdict == NOT_RUN and check.detail == said
        lines.append(f"  {NOT_RUN}  {check.name}{'' if reason else ': as above'}" if reason or again
                     else f"  {check.line()}")
        said = check.detail if check.verdict == NOT_RUN else ""
    for measured in stage.measurements:
        note = f"  {measured.note}" if measured.note else ""
        lines.append(f"  {measured.name:44} {measured.value:10.2f} {measured.unit}{note}")
    return lines + [f"  note: {note}" for note in stage.notes]
