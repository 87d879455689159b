"""Load Hugging Face weights into FP8 parameters so that training starts from them, which Bridge 0.3.1 does not.

TransformerEngine quantizes a weight at its construction and keeps its values of that moment; the distributed optimizer
makes its FP32 master weights from these, and not from the weight:

    provider.provide()                    weight = quantize(initial values); the initial values are kept
    AutoBridge's hook                     weight.data.copy_(Hugging Face's): the codes are right
    optimizer                             masters = the kept values: uninitialised memory, or a random initialization
    first step                            the masters are written over the weights

So ``AutoBridge.to_megatron_provider(load_weights=True)`` trains on NaN or, worse, on random weights with a falling
loss; delayed scaling also keeps the amax of the first memory. ``load_exactly`` lets every hook fill plain tensors, and
takes kept values, amax and codes from those. After the last hook ``require_first_values`` compares each weight with its
kept values, so that whatever else writes into the weights is refused, too. The trade-off: while weights are loaded, FP8
weights exist a second time, in the compute dtype.

Bridge registers its hook for adapters later than all others. It loads a checkpoint, freezes it, and puts adapters
around its linears. Nothing ever quantizes a frozen weight again, so that delayed scaling would keep it under its first
scale, which is 1. So such a weight gets the scale of its own amax, and the values that TE keeps of it are let go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex

from nemo_fp8.extras import require

__needs__ = require("bridge")

import torch

from nemo_fp8.bridge.delayed_amaxes import keep_amaxes_of_training
from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.formats import FORMATS
from nemo_fp8.numerics.scales import delayed_scale
from nemo_fp8.train.kept import keep_modules

Models = list[Any]
Hook = Callable[[Models], Models]

# Relative distance of an FP8 weight from the values it was made of: 2.65 % for any scale, and with a scale of 1, which
# delayed scaling starts with, up to 10 %. An unrelated tensor of the same size is 1.4 away.
_FAR = 0.3
COVERED = {
    "_pre_wrap_hooks": "Bridge's hooks write weights into FP8 parameters, which loses them: each runs among plain "
    "tensors, and so does one that Bridge registers later, for adapters"
}
"""What is replaced on a provider, and not on its class: the reason."""
# What Megatron sets on a weight, and what a hook may read from it.
MEGATRONS = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce", "sequence_parallel")


def look_after_weights(provider: Any, precision: Precision) -> None:
    """Have a provider's model, once built: loaded exactly, out of FP8 where the contract keeps it, compared, and its
    amaxes kept to those of training, on which every rank can resume.

    Hooks that are registered later, as Bridge's for adapters, run after ours, and load exactly, too. Called again it
    changes nothing.
    """
    if not isinstance(_hooks(provider), _Hooks):
        load_exactly(provider)
        provider._pre_wrap_hooks = _Hooks([*_hooks(provider), _AfterLoading(precision)])


def load_exactly(provider: Any) -> Any:
    """Let every hook of a provider that writes weights write into plain tensors; return the provider."""
    provider._pre_wrap_hooks = [hook if isinstance(hook, _Exactly) else _Exactly(hook) for hook in _hooks(provider)]
    return provider


def loads_into_fp8(provider: Any) -> bool:
    """Return whether a hook of a provider would write into FP8 weights, were they some, without ``load_exactly``."""
    return any(not isinstance(hook, (_Exactly, _AfterLoading)) for hook in _hooks(provider))


def require_first_values(models: Models) -> None:
    """Raise PrecisionError if an FP8 weight is not what the optimizer will make its master weights of."""
    far = [
        name
        for name, weight, kept in _stored(models)
        if not _distance(weight.dequantize(dtype=torch.float32), kept.float()) < _FAR
    ]
    if far:
        raise PrecisionError(
            f"{len(far)} FP8 weights are not what the optimizer will train, {far[0]} among them.",
            "Values were written into them after their construction, and TransformerEngine kept those of the "
            "construction, of which the optimizer makes its master weights.",
            "Write weights in a hook of provider.register_pre_wrap_hook, around which nemo_fp8 repairs that, or set "
            "fp8_param_gather=False.",
        )


class _Exactly:
    """A hook around which FP8 weights are plain tensors."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    @torch.no_grad()
    def __call__(self, models: Models) -> Models:
        held = []
        for module in (module for model in models for module in model.modules()):
            for name, weight in list(module._parameters.items()):
                if (kept := _kept_values(weight)) is not None:
                    plain = torch.nn.Parameter(kept.to(weight.device), requires_grad=weight.requires_grad)
                    plain.__dict__.update({key: vars(weight)[key] for key in MEGATRONS if key in vars(weight)})
                    module._parameters[name] = plain
                    held.append((module, name, weight, kept, plain))
        models = self.hook(models) or models
        for module, name, weight, kept, plain in held:
            kept.copy_(plain.data)
            if isinstance(amax := getattr(weight._quantizer, "amax", None), torch.Tensor):
                amax.zero_()  # of the first values
            weight.copy_(plain.data)
            weight.requires_grad_(plain.requires_grad)
            module._parameters[name] = weight
        return models


class _Later(_Exactly):
    """The same for a hook that is registered when all others are, and may freeze what it loads."""

    def __init__(self, hook: Hook, precision: Precision) -> None:
        super().__init__(hook)
        self.precision = precision

    def __call__(self, models: Models) -> Models:
        models = super().__call__(models)
        require_first_values(models)
        _settle_frozen(models, self.precision)
        return models


class _AfterLoading:
    """Ours, before those that are registered later: takes out of FP8 what the contract keeps, compares the rest with
    what masters are made of, and has delayed scaling keep the amaxes of training."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision

    def __call__(self, models: Models) -> Models:
        keep_modules(models, self.precision)
        require_first_values(models)
        _settle_frozen(models, self.precision)
        if self.precision.scaling == "delayed":
            keep_amaxes_of_training(models)
        return models


class _Hooks(list[Hook]):
    """The hooks of a provider that is looked after; a later one loads exactly, too.

    It has no attributes: Bridge's export copies a provider's, attribute by attribute, and fails at a frozen contract. A
    copy of the list appends hooks of ours, which stay as they are.
    """

    __slots__ = ()

    def append(self, hook: Hook) -> None:
        """Add a hook behind the others."""
        ours = isinstance(hook, _Exactly | _AfterLoading)
        super().append(hook if ours else _Later(hook, self._precision()))

    def insert(self, index: SupportsIndex, hook: Hook) -> None:
        """Add a hook before the others."""
        super().insert(index, _Exactly(hook))

    def _precision(self) -> Precision:
        return next(hook.precision for hook in self if isinstance(hook, _AfterLoading))


@torch.no_grad()
def _settle_frozen(models: Models, precision: Precision) -> None:
    """Give frozen FP8 weights their only scale, and let go of the values that masters would be made of."""
    for _, weight, kept in list(_stored(models)):
        if not weight.requires_grad:
            if precision.scaling == "delayed":
                amax, scale = weight._quantizer.amax, weight._quantizer.scale
                scale.copy_(delayed_scale(amax.reshape(scale.shape), scale, FORMATS["e4m3"], precision.margin))
                weight.copy_(kept.to(weight.device))
            weight.clear_high_precision_init_val()


def _hooks(provider: Any) -> list[Hook]:
    found: list[Hook] = getattr(provider, "_pre_wrap_hooks", None) or []
    return found


def _kept_values(weight: Any) -> torch.Tensor | None:
    """Return the values that TransformerEngine kept of an FP8 weight; None for any other."""
    read = getattr(weight, "get_high_precision_init_val", None)
    found: torch.Tensor | None = read() if read is not None else None
    return found


def _stored(models: Models) -> Iterator[tuple[str, Any, torch.Tensor]]:
    for model in models:
        for name, weight in model.named_parameters():
            if (kept := _kept_values(weight)) is not None:
                yield name, weight, kept


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the distance of two tensors, relative to the second; NaN if one of them holds NaN."""
    b = b.to(a.device)
    return float((a - b).norm() / b.norm().clamp_min(torch.finfo(torch.float32).tiny))
