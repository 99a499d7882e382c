"""The switch of the faults planted in Python, like switch.h for C++."""

import os
import pathlib

_ACTIVE = int(os.environ.get("HSDP_FAULT", "0"))
_REACHED = os.environ.get("HSDP_FAULTS_REACHED")
_seen: "set[int]" = set()


def fault(number: int) -> bool:
    if _REACHED and number not in _seen:
        _seen.add(number)
        pathlib.Path(_REACHED, str(number)).touch()
    return number == _ACTIVE
