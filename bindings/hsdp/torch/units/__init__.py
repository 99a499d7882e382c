"""Stage 3: parameters that are gathered before use and released after.

`plan_units` says what is released -> `slice_units` and `gathered_units` make it -> `PassHooks` around each pass:
`_before_forward` or `_backward_begins` -> `_need` -> `ShardedUnit.gather`; `_after_forward` or
`_backward_over` -> `_let_go` -> `release`.

Who waits for whom: `gather` for the slices of all ranks of the shard group; `arrive` of a slice for the other
replicas' parts of it (`ReplicaParts`); `end` and `begin_update` serve other ranks until all are through.
"""
