"""One rank of a test's job: run_rank.py FILE FUNCTION ARGUMENTS FOLDER.

Calls FUNCTION of FILE and leaves what it returns in FOLDER, as JSON. All ranks make the same torch
models, but where the test seeds them otherwise.
"""

import importlib.util
import json
import os
import pathlib
import sys


def main() -> None:
    file, function, arguments, folder = sys.argv[1:5]
    sys.path.insert(0, str(pathlib.Path(file).parent))
    spec = importlib.util.spec_from_file_location(pathlib.Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[pathlib.Path(file).stem] = module
    spec.loader.exec_module(module)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    result = getattr(module, function)(*json.loads(arguments))
    path = pathlib.Path(folder) / f"{os.environ['RANK']}.json"
    path.write_text(json.dumps(result))


main()
