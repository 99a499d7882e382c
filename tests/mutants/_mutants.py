"""The switch of faults planted in Python, where switch.h is that of faults in C++."""

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
