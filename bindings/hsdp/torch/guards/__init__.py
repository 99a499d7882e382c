"""Everything that wraps or watches torch's own functions, so that nothing trains wrongly in silence.

`installation.watch` -> `_install` wraps each function once; its five lines are the list of them. What
they ask: `watched_gradients` has the attachments, and of each, `ResultState` what has happened to its result.
An optimizer's step -> `before_step` -> `require_gradients`, `require_result`; clipping -> `guard_clipping`;
zero_grad -> `guard_zero_grad`; a scaler -> `guard_scale`, then `unscale_result`.
"""
