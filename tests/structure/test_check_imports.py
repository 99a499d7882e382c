"""Proves that check_imports finds what it is for: each case is a small package with one fault."""

import pathlib
import subprocess
import sys
import unittest

import check_imports
from tree import tree


def problems(files):
    with tree({f"{check_imports.PACKAGE}/{name}": text for name, text in files.items()}) as root:
        return check_imports.check(root)


def circle(*names):
    return [f"imports go one way only, but not among {', '.join(names)}"]


class Usage(unittest.TestCase):
    def test_a_repository_has_the_package(self):
        script = pathlib.Path(check_imports.__file__)
        with tree({"hsdp/__init__.py": ""}) as root:
            done = subprocess.run([sys.executable, script, root], capture_output=True, text=True, check=False)
        self.assertEqual((2, "check_imports: usage: check_imports.py REPOSITORY\n"), (done.returncode, done.stderr))


class Imports(unittest.TestCase):
    def test_what_is_allowed(self):
        self.assertEqual([], problems({
            "__init__.py": "import importlib\nfrom hsdp.reducer import Reducer\nfrom hsdp import torch\n",
            "reducer.py": "import torch\nfrom hsdp import _hsdp, framework\nfrom hsdp.errors import Error\n",
            "errors.py": "import math\n",
            "framework.py": "import importlib\nimportlib.import_module(f'hsdp.torch.{name}')\n",
            "torch/__init__.py": "",
            "torch/units/hooks.py": "from hsdp.reducer import Reducer\nfrom hsdp.torch import private\n",
            "torch/private.py": "",
        }))

    def test_a_circle_of_two(self):
        self.assertEqual(circle("hsdp.mesh", "hsdp.reducer"), problems({
            "mesh.py": "from hsdp.reducer import Reducer\n",
            "reducer.py": "from hsdp import mesh\n",
            "errors.py": "from hsdp.mesh import Mesh\n",
        }))

    def test_a_longer_one_by_every_kind_of_import(self):
        self.assertEqual(circle("hsdp.a", "hsdp.b", "hsdp.torch.c", "hsdp.zero"), problems({
            "a.py": "if TYPE_CHECKING:\n    from hsdp.b import B\n",
            "b.py": "def late():\n    import hsdp.torch.c\n",
            "torch/c.py": "from importlib import import_module\nimport_module('hsdp.zero')\n",
            "zero/__init__.py": "from hsdp.a import A\n",
        }))

    def test_two_are_two(self):
        self.assertEqual([*circle("hsdp.a", "hsdp.b"), *circle("hsdp.c", "hsdp.d")], problems({
            "a.py": "import hsdp.b, hsdp.c\n", "b.py": "import hsdp.a\n",
            "c.py": "import hsdp.d\n", "d.py": "import hsdp.c\n",
        }))

    def test_the_package_itself(self):
        self.assertEqual(circle("hsdp", "hsdp.a"), problems({
            "__init__.py": "from hsdp.a import A\n", "a.py": "from hsdp import B\n",
        }))

    def test_names_that_cannot_be_followed(self):
        self.assertEqual(["hsdp.a: expected the whole name of a module, got .b.B"], problems({
            "a.py": "from .b import B\n", "b.py": "",
        }))
        self.assertEqual(["hsdp.b: expected the whole name of a module, got f'hsdp.{name}'"], problems({
            "b.py": "importlib.import_module(f'hsdp.{name}')\n",
        }))
