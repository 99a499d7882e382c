"""This rank's slices of parameters, and what a ShardedOptimizer does with them. One step takes this way:

`ShardedOptimizer.step` -> `_take_gradients` -> `_must_skip` -> `_update`: `Masters.reread`, `_clip`,
`_run_inner` (`SharedStates.lend` and `take_back`) -> `_start_gather`: `Masters.load_parameters`,
`OverlappedGather.start` -> a reader of a parameter waits in `GatheredUnit.wait`.

At construction `hsdp.torch.optimized_parameters` finds what it optimizes, and says how slices are made.

A checkpoint has, of each parameter, the states and the "master" of this rank's slice as FlatSlices, and the
groups' settings: `put_slices` saves them, `loadable` reads them, `make_whole` gathers them.
"""
