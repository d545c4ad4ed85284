"""Names of apex that amplab does not have under the same name, as two tables.

    HOMES      a module of apex            -> the module of amplab that has its names; also its compiled ones
    INSTEAD    a module, or a name in one  -> what to use instead, for the error that importing it raises

`apex_alias` reads both. Everything else of apex has the same name in amplab, with ``amplab`` for ``apex``.
"""

__all__ = ["HOMES", "INSTEAD", "refusal"]

HOMES = {
    "apex.amp.handle": "amplab.amp",
    "apex.amp.opt": "amplab.amp.apex.old_interface",
    "apex.parallel.optimized_sync_batchnorm": "amplab.parallel.sync_batchnorm",
    "amp_C": "amplab.multi_tensor_apply.amp_c",
    "apex_C": "amplab.multi_tensor_apply.apex_c",
}

_LISTS = (
    "register a function before amp.initialize instead of editing a list: amp.register_half_function(module, name) or "
    "amp.register_float_function(module, name), or pass a policy to amp.initialize"
)
_INSIDE = "use `from apex import amp`; this was an internal module of it"

INSTEAD = {
    "apex.amp.lists": _LISTS,
    "apex.amp.utils": _INSIDE,
    "apex.amp.wrap": _INSIDE,
    "apex.amp.compat": _INSIDE,
    "apex.amp.rnn_compat": _INSIDE,
    "apex.amp._initialize": _INSIDE,
    "apex.amp._process_optimizer": _INSIDE,
    "apex.contrib": (
        "use torch.nn.functional.cross_entropy(label_smoothing=...) for xentropy, scaled_dot_product_attention for "
        "fmha and multihead_attn, torch.nn.utils.clip_grad_norm_ for clip_grad, apex.normalization for layer_norm, "
        "apex.parallel.SyncBatchNorm for groupbn, apex.optimizers for optimizers, torch.sparse for sparsity"
    ),
    "apex.fused_dense": "use torch.nn.Linear, with torch.nn.GELU between two of them",
    "apex.mlp": "use torch.nn.Sequential of torch.nn.Linear and torch.nn.ReLU",
    "apex.optimizers.FP16_Optimizer": "use apex.fp16_utils.FP16_Optimizer, or amp.initialize(opt_level='O2')",
    "apex.parallel.multiproc": "start N processes with `torchrun --nproc-per-node=N --no-python amplab run script.py`",
    "apex.pyprof": "use torch.profiler.profile, or amplab.trace for what amp does",
    "apex.reparameterization": "use torch.nn.utils.parametrizations.weight_norm",
    "apex.RNN": "use torch.nn.RNN, torch.nn.LSTM and torch.nn.GRU, which run in float16 at O1",
    "apex.transformer": "use megatron.core of Megatron-LM, which contains it now",
    "fused_layer_norm_cuda": "use apex.normalization.FusedLayerNorm, or torch.nn.functional.layer_norm",
    "fused_rms_norm_cuda": "use apex.normalization.FusedRMSNorm, or torch.nn.functional.rms_norm",
    "fused_adam_cuda": "use apex.optimizers.FusedAdam",
    "fused_dense_cuda": "use torch.nn.Linear",
    "mlp_cuda": "use torch.nn.Sequential of torch.nn.Linear and torch.nn.ReLU",
    "syncbn": "use apex.parallel.SyncBatchNorm",
    "xentropy_cuda": "use torch.nn.functional.cross_entropy(label_smoothing=...)",
}


def refusal(name: str) -> str | None:
    """Return why ``name`` cannot be imported while amplab is in place of apex, and what to use instead.

    Args:
        name: dotted name of the import. ``from apex.x import y`` looks for ``amplab.x.y``, which is accepted too.

    Returns:
        A sentence that starts with apex's name and a colon; None if the name is not of apex.

    >>> refusal("apex.reparameterization").rpartition("; ")[2]
    'use torch.nn.utils.parametrizations.weight_norm.'
    >>> refusal("json") is None
    True
    """
    own = name.replace("amplab.", "apex.", 1) if name.startswith("amplab.") else name
    if own in INSTEAD:
        return f"{own}: amplab, which is in place of apex here, does not have it; {INSTEAD[own]}."
    if name.startswith("apex."):
        return (
            f"{own}: amplab, which is in place of apex here, does not have it; expected a module of amp, fp16_utils, "
            "multi_tensor_apply, normalization, optimizers or parallel."
        )
    return None
