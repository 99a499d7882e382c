"""hsdp between the replicas of FSDP2 models, and DTensors.

`replica_hook` -> `fsdp_parameter_groups`, `require_usable` -> FSDP2 reduces within a replica and calls
`_in_backward` -> `RowReducer`; `finish` ends the step. `shard_dtensor` and `snapshot_entries` are apart.
"""
