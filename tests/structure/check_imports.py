#!/usr/bin/env python3
"""Checks that the files of the Python package import each other in one direction only.

Usage: check_imports.py REPOSITORY
Exit status: 0 when no file is on a circle, 1 after printing each circle, 2 on bad usage.

Imports within functions and under TYPE_CHECKING count, and so do modules that import_module() names. The door to
torch's layer alone may put such a name together: what lies behind it imports the rest.
"""

import ast
import pathlib
import sys
from typing import Dict, Iterator, List, Set, Tuple

from check_floors import run

PACKAGE = pathlib.Path("bindings", "hsdp")
DOOR = "hsdp.framework"


def module_name(path: pathlib.Path, root: pathlib.Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(module: str, tree: ast.AST) -> Iterator[str]:
    """The names that a module imports: of modules, or of what is in one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            if isinstance(node.args[0], ast.Constant):
                yield node.args[0].value
            elif module != DOOR:
                yield ast.unparse(node.args[0])


def graph_of(root: pathlib.Path) -> Tuple[Dict[str, Set[str]], List[str]]:
    """Which modules of the package each one imports, and what cannot be followed."""
    names = {module_name(path, root): path for path in sorted(root.rglob("*.py"))}
    graph: Dict[str, Set[str]] = {}
    unknown = []
    for module, path in names.items():
        graph[module] = set()
        for name in imported(module, ast.parse(path.read_text(encoding="utf-8"), str(path))):
            outer = name.rpartition(".")[0]
            if not name.replace(".", "").isidentifier() or name.startswith("."):
                unknown.append(f"{module}: expected the whole name of a module, got {name}")
            elif name in names:
                graph[module].add(name)
            elif outer in names and name != "hsdp._hsdp":  # which is compiled
                graph[module].add(outer)
    return graph, unknown


def circles(graph: Dict[str, Set[str]]) -> List[List[str]]:
    """Modules that import each other, directly or through others."""

    def reached(start: str) -> Set[str]:
        seen: Set[str] = set()
        left = [start]
        while left:
            fresh = graph[left.pop()] - seen
            seen |= fresh
            left += fresh
        return seen

    reach = {name: reached(name) for name in graph}
    return [list(one) for one in sorted({
        tuple(sorted(other for other in reach[name] if name in reach[other]))
        for name in graph if name in reach[name]
    })]


def check(repository: pathlib.Path) -> List[str]:
    graph, found = graph_of(repository / PACKAGE)
    return found + [f"imports go one way only, but not among {', '.join(one)}" for one in circles(graph)]


if __name__ == "__main__":
    sys.exit(run("check_imports", sys.argv[1:], PACKAGE, check, "no file of the package is on a circle"))
