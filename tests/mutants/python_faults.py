"""Finds the faults that can be planted in a Python source."""

from __future__ import annotations

import ast

from fault import MOVED, OPPOSITE, Fault

SWITCH = "_mutants.fault(NUMBER)"
_SIGNS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}


def with_switch(source: str) -> str:
    """Imports the switch of the planted faults without changing line numbers."""
    after = "from __future__ import annotations"
    assert after in source
    return source.replace(after, f"{after}; from hsdp import _mutants", 1)


def find_faults(file: str, source: str) -> list[Fault]:
    return _Finder(file, source).found if "from __future__ import annotations" in source else []


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: str) -> None:
        self.file = file
        self.source = source
        self.found: list[Fault] = []
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self.visit(ast.parse(source))

    def _place(self, line: int, column: int) -> int:
        """The index of a place in the source. Columns of syntax trees count bytes."""
        begin = self._lines[line - 1]
        text = self.source[begin : self._lines[line]]
        return begin + len(text.encode()[:column].decode())

    def _range(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._place(node.lineno, node.col_offset), self._place(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.expr) -> str:
        begin, end = self._range(node)
        return self.source[begin:end]

    def _add(self, node: ast.expr, kind: str, wrong: str) -> None:
        text = self._text(node)
        planted = f"(({wrong}) if {SWITCH} else ({text}))"
        self.found.append(Fault(self.file, *self._range(node), node.lineno, kind, text, wrong, planted))

    def _negate(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if "TYPE_CHECKING" not in self._text(node.test):
            self._add(node.test, "condition negated", f"not ({self._text(node.test)})")
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = _negate

    def visit_Compare(self, node: ast.Compare) -> None:
        sign = _SIGNS.get(type(node.ops[0]))
        if len(node.ops) == 1 and sign:
            left, right = f"({self._text(node.left)})", f"({self._text(node.comparators[0])})"
            self._add(node, "comparison turned", f"{left} {OPPOSITE[sign]} {right}")
            if sign in MOVED:
                self._add(node, "bound moved", f"{left} {MOVED[sign]} {right}")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add(node.value, "call left out", "None")
        if not isinstance(node.value, ast.Constant):  # a constant here is a docstring
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, "constant changed", str(not node.value))
        elif isinstance(node.value, int):
            self._add(node, "constant changed", str(node.value + 1))

    # Annotations are not run. Nothing can be planted within f-strings and match patterns.
    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_match_case(self, node: ast.match_case) -> None:
        for statement in node.body:
            self.visit(statement)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.visit(node.args)
        for statement in node.body:
            self.visit(statement)

    visit_FunctionDef = visit_AsyncFunctionDef = _function
