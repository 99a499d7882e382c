"""Around ZeRO: backward passes that are reduced once, and parameters that are gathered under what
comes next. docs/zero.md says when they pay.
"""

from __future__ import annotations

from hsdp.zero.coalesced_window import CoalescedWindow, coalesce_grad_reduction
from hsdp.zero.parameter_gather import GatherStats, ParameterGather

__all__ = ["CoalescedWindow", "GatherStats", "ParameterGather", "coalesce_grad_reduction"]
