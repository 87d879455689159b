"""Attention of a run's second layer, and the same by TransformerEngine's module alone; the first may stay in BF16."""

import torch

NUMBER, LAYER, CALLS = 2, [], []


def watch(trainer, tiny):
    """Keep what that layer's attention is made of, is given, gives, and what gradients pass it."""
    from transformer_engine.pytorch import DotProductAttention

    make, run = DotProductAttention.__init__, DotProductAttention.forward

    def made(self, *args, **kwargs):
        make(self, *args, **kwargs)
        if kwargs["layer_number"] == NUMBER and not LAYER:
            LAYER.append((self, args, kwargs))

    def watched(self, q, k, v, *args, **kwargs):
        out = run(self, q, k, v, *args, **kwargs)
        if self is LAYER[0][0]:
            call = {name: x.detach().clone() for name, x in zip("qkvo", (q, k, v, out), strict=True)}
            for name, x in zip("qkvo", (q, k, v, out), strict=True):
                x.register_hook(lambda grad, name=f"d{name}": call.update({name: grad.clone()}))
            CALLS.append((call, args, kwargs))
        return out

    DotProductAttention.__init__, DotProductAttention.forward = made, watched


def alone(trainer, extra):
    """Compute all of it again, call by call: which tensors are the same to the bit, and whether BF16 would have been.

    A module that is alone has no linear behind it, whose backward renews delayed scales.
    """
    import transformer_engine.pytorch as te
    from megatron.core.parallel_state import get_amax_reduction_group
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    from nemo_fp8.render.te import te_recipe

    contract = trainer.precision_plugin.contract
    group = get_amax_reduction_group(with_context_parallel=True)

    def again(precision):
        module, found = te.DotProductAttention(*LAYER[0][1], **LAYER[0][2]), []
        for call, args, kwargs in CALLS:
            inputs = [call[name].clone().requires_grad_() for name in "qkv"]
            with te.autocast(enabled=True, recipe=te_recipe(precision), amax_reduction_group=group):
                out = module(*inputs, *args, **kwargs)
            out.backward(call["do"])
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
            given = dict(zip(("o", "dq", "dk", "dv"), (out, *(x.grad for x in inputs)), strict=True))
            found.append([name for name, x in given.items() if torch.equal(x, call[name])])
        return found

    extra["calls"], extra["equal"] = len(CALLS), again(contract)
    extra["equal in bf16"] = again(contract.replace(attention=False, multi_head_attention=False))
