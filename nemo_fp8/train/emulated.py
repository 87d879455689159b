"""Megatron's parallel linears with their GEMMs in FP8, where TransformerEngine's are not to be had.

The linears are Megatron's own, with one method changed: inside an FP8 region ``_forward_impl`` is
:func:`nemo_fp8.numerics.linear.linear`, with the tensor-parallel communication around it that TE's linear has.
Everything else stays Megatron's: initialization, sharding, checkpoint layout, which layer is in a region at all.

The recipe comes from where TE would take it, the ``fp8`` fields of ``TransformerConfig``, and is reduced to a
contract. A setting that cannot be emulated is an error, never BF16 in silence. The router, the attention scores,
the norms, the embedding and the output layer are no such linears, and stay in the compute dtype as they do with TE.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

from nemo_fp8 import alignment
from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.delayed import DelayedState
from nemo_fp8.numerics.linear import Pair, linear, quantize_weight
from nemo_fp8.train import autocast, parameters
from nemo_fp8.train.megatron_cpu import sequential_experts
from nemo_fp8.train.patching import Patch, patched

logger = logging.getLogger("nemo_fp8")


@contextmanager
def emulated_fp8(contract: Precision | None = None) -> Iterator[None]:
    """Megatron's ``fp8`` settings are carried out by emulation until the context closes.

    ``contract`` says what Megatron's config has no field for: kinds of scales, modules to keep. Without one the config
    says it all. Inside another such context this one takes its place.
    """
    emulation = autocast.Emulation()

    def get_fp8_context(config: Any, layer_no: int = -1, is_init: bool = False) -> AbstractContextManager[Any]:
        if not (config.fp8_param if is_init else config.fp8) or is_first_last_bf16_layer(config, layer_no):
            return nullcontext()
        precision = contract or precision_of(config)
        group = _amax_group(config)
        return (autocast.primary_weights if is_init else autocast.region)(precision, group, emulation)

    with patched(_table(get_fp8_context), "Emulating FP8 in Megatron"):
        yield


def precision_of(config: Any) -> Precision:
    """The contract that a ``TransformerConfig`` stands for, or an error where it cannot be emulated."""
    if config.fp8_dot_product_attention or config.fp8_multi_head_attention:
        raise PrecisionError(
            "FP8 attention is not emulated.",
            "TransformerEngine computes attention scores in FP8 inside a fused kernel that has no counterpart here.",
            "Set fp8_dot_product_attention=False and fp8_multi_head_attention=False, or train on a GPU.",
        )
    counts = (config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16) if config.first_last_layers_bf16 else (0, 0)
    recipe = getattr(config.fp8_recipe, "value", config.fp8_recipe)
    history, algo = config.fp8_amax_history_len, config.fp8_amax_compute_algo
    return _precision(config.fp8, recipe, config.fp8_margin, history, algo, config.fp8_wgrad, config.fp8_param, *counts)


@lru_cache(maxsize=64)
def _precision(
    format: str, scaling: str, margin: int, history: int, algo: str, wgrad: bool, fp8_param: bool, first: int, last: int
) -> Precision:
    return Precision(
        name=f"Megatron's fp8={format}, fp8_recipe={scaling}",
        format=format,
        scaling=scaling,
        margin=margin,
        amax_history_len=history,
        amax_compute_algo=algo,
        wgrad=wgrad,
        fp8_param=bool(fp8_param),
        first_layers=first,
        last_layers=last,
    )


def _amax_group(config: Any) -> Any:
    """The ranks that agree on delayed scales, or None before there are ranks."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    return parallel_state.get_amax_reduction_group(with_context_parallel=True, tp_only_amax_red=config.tp_only_amax_red)


# ---------------------------------------------------------------------- linears


class _Fp8Linear:
    """What the column- and the row-parallel linear have in common: FP8 inside a region, Megatron's own GEMM outside."""

    config: Any
    weight: torch.nn.Parameter
    is_first_microbatch = True
    """Megatron sets it at the start of each global batch: the weight has changed, and is to be quantized again."""
    save_original_input = False
    """Megatron sets it where it discards this linear's input and computes it again; the codes that are kept here need neither."""
    keep = False
    """Stay in the compute dtype, whatever the region says."""
    _weight: Pair | None = None
    _delayed: DelayedState | None = None
    _pending: dict[str, torch.Tensor] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        primary = autocast.current_primary_weights()
        if primary is None or self.weight is None:
            return
        least = alignment.PRIMARY[str(primary.precision.scaling)]
        if any(n % least for n in self.weight.shape):
            _say_primary_misfit(kwargs.get("tp_comm_buffer_name") or "a linear", tuple(self.weight.shape), least, primary.precision)
            return
        self._state(primary)
        self.weight = parameters.fp8_parameter(self.weight, primary.precision, self._delayed, primary.group)

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        **other: Any,
    ) -> torch.Tensor:
        region = autocast.current_region()
        if region is None or self.keep or not self._fits(weight, region.precision):
            return super()._forward_impl(  # type: ignore[misc, no-any-return]
                input,
                weight,
                bias=bias,
                allreduce_dgrad=allreduce_dgrad,
                sequence_parallel=sequence_parallel,
                tp_group=tp_group,
                **other,
            )
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        delayed = self._state(region)
        with nullcontext() if delayed is None else autocast.counting(delayed.forward):
            return linear(
                input,
                weight,
                bias,
                precision=region.precision,
                delayed=delayed,
                weight_quantized=self._quantized(weight, region.precision),
                after_backward=region.after_backward(),
            )

    def _quantized(self, weight: torch.Tensor, precision: Precision) -> Pair:
        """The weight in FP8, quantized once for each global batch, or after the optimizer's step by the optimizer."""
        if isinstance(weight, parameters.Fp8Tensor):
            return weight.pair()
        if self._weight is None or self.is_first_microbatch:
            self._weight = quantize_weight(weight, precision, self._delayed)
            self.is_first_microbatch = False
        return self._weight

    def _state(self, region: autocast.Region) -> DelayedState | None:
        """The delayed state, made when this linear first runs under delayed scaling, from a checkpoint's if there was one."""
        if region.precision.scaling != "delayed":
            return None
        if self._delayed is None:
            self._delayed = DelayedState(region.precision, self.weight.device)
            if self._pending is not None:
                self._delayed.load_state_dict(self._pending)
                self._pending = None
        # A linear outlives the emulation that it was built in: a second fit of the same model opens another one.
        region.emulation.remember(self._delayed, region.group)
        return self._delayed

    def _fits(self, weight: torch.Tensor, precision: Precision) -> bool:
        """Whether the format can hold this weight's shape; if not, it stays in the compute dtype, or is refused."""
        least = alignment.GEMM[str(precision.scaling)]
        if not any(n % least for n in weight.shape):
            return True
        if precision.strict:
            raise PrecisionError(
                f"A weight of shape {tuple(weight.shape)} under {precision.scaling} scaling.",
                f"Its GEMMs take dimensions that are multiples of {least}.",
                f"Choose sizes that stay multiples of {least} after the tensor-parallel split, or strict=False to keep such layers.",
            )
        logger.warning("A weight of shape %s stays out of FP8: not a multiple of %d.", tuple(weight.shape), least)
        self.keep = True
        return False

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Scales first: an FP8 primary weight is quantized as it is loaded, and under delayed scaling with the scale it had."""
        self.set_extra_state(state_dict.get(f"{prefix}_extra_state"))
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    # Delayed scaling has state; a checkpoint carries it where TE's linears carry theirs.

    def get_extra_state(self) -> dict[str, torch.Tensor] | None:
        """Scales and amax histories, or None where there are none."""
        return self._pending if self._delayed is None else self._delayed.state_dict()

    def set_extra_state(self, state: dict[str, torch.Tensor] | None) -> None:
        """Scales and amax histories of a checkpoint; one without any (another recipe, BF16) leaves the state alone."""
        if state is None:
            return
        if self._delayed is None:
            self._pending = state
        else:
            self._delayed.load_state_dict(state)


@lru_cache(maxsize=256)
def _say_primary_misfit(name: str, shape: tuple[int, ...], least: int, precision: Precision) -> None:
    """Say once of each kind of linear that its weight cannot be an FP8 primary weight; refuse it under a strict contract.

    ``name`` is what Megatron calls the linear while it builds it: qkv, proj, fc1, fc2.
    """
    if precision.strict:
        raise PrecisionError(
            f"{name}: a primary weight of shape {shape} cannot be kept in FP8 under {precision.scaling} scaling.",
            f"Both sides of a primary weight are multiples of {least}, since its blocks are cast share by share.",
            f"Choose sizes that stay multiples of {least} after the tensor-parallel split, fp8_param_gather=False, or strict=False.",
        )
    logger.warning("%s: a weight of shape %s is kept in %s and not in FP8: not a multiple of %d.", name, shape, precision.compute, least)


class Fp8ColumnParallelLinear(_Fp8Linear, ColumnParallelLinear):
    """``y = x @ w.T`` with the rows of ``w`` spread over the tensor-parallel ranks, in FP8 inside a region."""


class Fp8RowParallelLinear(_Fp8Linear, RowParallelLinear):
    """``y = x @ w.T`` with the columns of ``w`` spread over the tensor-parallel ranks, in FP8 inside a region."""


# ---------------------------------------------------------------------- Megatron's names


def _checkpoint(
    forward_func: Callable[..., Any],
    distribute_saved_activations: bool,
    get_rng_state_tracker: object,
    tp_group: object,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Activation recompute, in the same FP8 region and with the same scales."""
    return random.checkpoint(autocast.Recompute(forward_func), distribute_saved_activations, *args, **kwargs)


class _CheckpointWithoutOutput(random.CheckpointWithoutOutput):
    """Recompute of single modules. Megatron's own calls TE whenever ``fp8`` is anything but None, False included."""

    def __init__(self, fp8: object = False) -> None:
        super().__init__(fp8=None)

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        return super().checkpoint(autocast.Recompute(run_function), *args)


def _column(self: object) -> type:
    return Fp8ColumnParallelLinear


def _row(self: object) -> type:
    return Fp8RowParallelLinear


_CORE = "megatron.core."
_HOLDERS_OF_CONTEXT = (
    "fp8_utils",
    "models.common.model_chunk_schedule_plan",
    "models.vision.multimodal_projector",
    "pipeline_parallel.combined_1f1b",
    "ssm.mamba_block",
    "transformer.multi_token_prediction",
    "transformer.transformer_block",
)


def _table(get_fp8_context: Callable[..., Any]) -> tuple[Patch, ...]:
    backend = _CORE + "models.backends:LocalSpecProvider"
    region = "without TransformerEngine it is a context that does nothing, and FP8 is BF16 in silence"
    recompute = "it asks TransformerEngine for the FP8 state of the first forward"
    return (
        *parameters.TABLE,
        Patch(
            _CORE + "transformer.transformer_config", "is_te_min_version", parameters.is_te_min_version, "it refuses FP8 experts without TE"
        ),
        *(Patch(_CORE + module, "get_fp8_context", get_fp8_context, region) for module in _HOLDERS_OF_CONTEXT),
        Patch(backend, "column_parallel_linear", _column, "the local layers' linears know no FP8"),
        Patch(backend, "row_parallel_linear", _row, "the local layers' linears know no FP8"),
        Patch(backend, "grouped_mlp_modules", sequential_experts, "grouped GEMMs know no FP8, and would be BF16 in silence"),
        Patch(
            "nemo.collections.llm.gpt.model.base",
            "HAVE_TE",
            False,
            "where TE is installed its layers are taken, which no emulation reaches",
        ),
        Patch(_CORE + "extensions.transformer_engine", "te_checkpoint", _checkpoint, recompute),
        Patch(_CORE + "transformer.transformer_block", "te_checkpoint", _checkpoint, recompute),
        Patch(_CORE + "transformer.moe.moe_layer", "te_checkpoint", _checkpoint, recompute, optional=True),
        Patch(_CORE + "tensor_parallel", "CheckpointWithoutOutput", _CheckpointWithoutOutput, recompute),
        Patch(_CORE + "tensor_parallel.random", "CheckpointWithoutOutput", _CheckpointWithoutOutput, recompute),
    )
