"""How a model's gradients reach a Reducer. One gradient takes this way:

`Reducer.attach` makes a `ModelAttachment`; `begin_microbatch` -> `ModelAttachment.microbatch_began` takes
p.grad out -> the backward pass calls the hook of `make_hook`, in C++ or `python_way` -> the Reducer packs it
(docs/design.md has the rest) -> `end_microbatch` -> `microbatch_ending` takes what no backward pass made ->
`gather_gradients` puts the mean into p.grad, in memory of `GatheredGradients`.

Before the first step: `trainable_parameters`, `described_parameters`, `broadcast_parameters`; in each:
`BufferSync.synchronise`.
"""
