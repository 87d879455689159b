"""The public names of ``nemo_fp8`` with their types, for type checkers and editors.

Generated: ``tools/make_docs.py`` writes it from the tables of presets and settings, and ``make check`` holds
it to them.
"""

from typing import Literal, TypedDict, type_check_only

from nemo_run import Config
from torch import dtype
from typing_extensions import Unpack

from nemo_fp8.contract import Precision as Precision
from nemo_fp8.contract.presets import PRESETS as PRESETS
from nemo_fp8.contract.presets import preset as preset
from nemo_fp8.errors import PrecisionError as PrecisionError
from nemo_fp8.numerics.autocast import autocast as autocast
from nemo_fp8.numerics.capture import capture as capture
from nemo_fp8.preflight.agreement import check as check
from nemo_fp8.train.plugin import MixedPrecision as MixedPrecision

__version__: str

@type_check_only
class _Arguments(TypedDict, total=False):
    """What a factory takes, each of them optional: the arguments of NeMo's plugin, and the fields of the contract."""

    precision: Literal["bf16-mixed", "16-mixed", "32", "bf16", "fp16", "fp16-mixed", "16", 16, "fp32", 32]
    grad_reduce_in_fp32: bool
    fp8: Literal["hybrid", "e4m3"] | None
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
    fp8_margin: int
    fp8_amax_history_len: int
    fp8_amax_compute_algo: Literal["max", "most_recent"]
    fp8_wgrad: bool
    fp8_dot_product_attention: bool
    fp8_multi_head_attention: bool
    fp8_param_gather: bool
    fp8_params: bool
    fp8_param: bool
    num_layers_at_start_in_bf16: int
    num_layers_at_end_in_bf16: int
    fp16_loss_scale: float | None
    fp16_initial_loss_scale: float
    fp16_min_loss_scale: float
    fp16_loss_scale_window: int
    fp16_hysteresis: int
    params_dtype: dtype | str | None
    pipeline_dtype: dtype | str | None
    autocast_dtype: dtype | str | None
    autocast_enabled: bool
    first_last_layers_bf16: bool | None
    reuse_grad_buf_for_mxfp8_param_ag: bool | None
    fp4: None
    fp4_recipe: str
    compute: Literal["bf16", "fp16", "fp32"]
    grad_reduce: Literal["fp32", "compute"]
    format: Literal["hybrid", "e4m3", "e2m1"] | None
    scaling: Literal["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"] | None
    margin: int
    amax_history_len: int
    amax_compute_algo: Literal["max", "most_recent"]
    weight_scale: Literal["fp32", "pow2"] | None
    activation_scale: Literal["fp32", "pow2"] | None
    wgrad: bool
    attention: bool
    multi_head_attention: bool
    backward: Literal["quantized", "dequantized", "high_precision"]
    backward_scaling: Literal["mxfp8", "nvfp4"] | None
    weight_block: Literal["16x16", "1x16"]
    hadamard: bool
    stochastic_rounding: bool
    row_scaled: bool
    four_over_six: Literal["none", "weights", "activations", "all"]
    four_over_six_error: Literal["mae", "mse"]
    four_over_six_bound_256: Literal["none", "weights", "activations", "all"]
    first_layers: int
    last_layers: int
    keep: tuple[str, ...] | list[str]
    modules: tuple[tuple[str, str], ...]
    strict: bool
    loss_scale: float | None
    initial_loss_scale: float
    min_loss_scale: float
    loss_scale_window: int
    hysteresis: int
    rollout: Literal["compute", "fp8", "nvfp4"] | None
    rollout_block: Literal["128x128", "1x32", "1x16", "tensor"] | None
    activation_scheme: Literal["dynamic", "static", "none"]
    kv_cache: Literal["auto", "fp8"]
    deep_gemm: bool
    importance_sampling: bool | None
    engine: Literal["auto", "te", "emulated"]

@type_check_only
class _PluginConfig(Config[MixedPrecision]):
    """A ``run.Config`` of our plugin. At run time it is no class of its own."""

def bf16_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'bf16_mixed' as a Config for ``trainer.plugins``.

    precision: bf16_mixed
    compute: Layers compute and keep parameters in BF16; gradients are reduced in FP32. Master weights are FP32.
    fprop: input and weight in BF16.
    dgrad: output gradient and weight in BF16.
    wgrad: output gradient and input in BF16.
    rollout: Generation in BF16, with a BF16 KV cache.

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def fp16_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'fp16_mixed' as a Config for ``trainer.plugins``.

    precision: fp16_mixed
    compute: Layers compute and keep parameters in FP16; gradients are reduced in FP16. Master weights are FP32.
    fprop: input and weight in FP16.
    dgrad: output gradient and weight in FP16.
    wgrad: output gradient and input in FP16.
    loss scale: Starts at 4.29497e+09, doubles after 1000 clean steps, halves after 2 overflows, never below 1.
    rollout: Generation in FP16, with a FP16 KV cache.

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def bf16_with_fp8_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'bf16_with_fp8_mixed' as a Config for ``trainer.plugins``.

    precision: bf16_with_fp8_mixed
    compute: Layers compute and keep parameters in BF16; gradients are reduced in FP32. Master weights are FP32.
    fprop: input in E4M3 with an FP32 scale for the whole tensor, found from earlier steps; weight in E4M3 with an
        FP32 scale for the whole tensor, found from earlier steps.
    dgrad: output gradient in E5M2 with an FP32 scale for the whole tensor, found from earlier steps; weight in E4M3
        with an FP32 scale for the whole tensor, found from earlier steps.
    wgrad: output gradient in E5M2 with an FP32 scale for the whole tensor, found from earlier steps; input in E4M3
        with an FP32 scale for the whole tensor, found from earlier steps.
    scales: A tensor's scale comes from the largest of the last 1024 amaxes; amaxes are shared by all ranks of the
        reduction group.
    weights: Kept in FP8 as primary weights; the distributed optimizer gathers one byte an element.
    attention: Attention scores and their product with V in BF16.
    kept: In BF16: embeddings, norms, routers and the output head.
    rollout: Generation with input in E4M3 with an FP32 scale for every 128 values along the contracted dimension;
        weight in E4M3 with an FP32 scale for each 128x128 block; a BF16 KV cache.

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def fp16_with_fp8_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'fp16_with_fp8_mixed' as a Config for ``trainer.plugins``.

    precision: fp16_with_fp8_mixed
    compute: Layers compute and keep parameters in FP16; gradients are reduced in FP16. Master weights are FP32.
    fprop: input in E4M3 with an FP32 scale for the whole tensor, found from earlier steps; weight in E4M3 with an
        FP32 scale for the whole tensor, found from earlier steps.
    dgrad: output gradient in E5M2 with an FP32 scale for the whole tensor, found from earlier steps; weight in E4M3
        with an FP32 scale for the whole tensor, found from earlier steps.
    wgrad: output gradient in E5M2 with an FP32 scale for the whole tensor, found from earlier steps; input in E4M3
        with an FP32 scale for the whole tensor, found from earlier steps.
    scales: A tensor's scale comes from the largest of the last 1024 amaxes; amaxes are shared by all ranks of the
        reduction group.
    weights: Kept in FP8 as primary weights; the distributed optimizer gathers one byte an element.
    attention: Attention scores and their product with V in FP16.
    kept: In FP16: embeddings, norms, routers and the output head.
    loss scale: Starts at 4.29497e+09, doubles after 1000 clean steps, halves after 2 overflows, never below 1.
    rollout: Generation with input in E4M3 with an FP32 scale for every 128 values along the contracted dimension;
        weight in E4M3 with an FP32 scale for each 128x128 block; a FP16 KV cache.
    note: An overflowing loss scale leaves inf in the amax history; the plugin lowers the start to 65536 and clears
        what overflowed.

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def bf16_with_mxfp8_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'bf16_with_mxfp8_mixed' as a Config for ``trainer.plugins``.

    precision: bf16_with_mxfp8_mixed
    compute: Layers compute and keep parameters in BF16; gradients are reduced in FP32. Master weights are FP32.
    fprop: input in E4M3 with an E8M0 exponent for every 32 values along the contracted dimension; weight in E4M3
        with an E8M0 exponent for every 32 values along the contracted dimension.
    dgrad: output gradient in E4M3 with an E8M0 exponent for every 32 values along the contracted dimension; weight
        in E4M3 with an E8M0 exponent for every 32 values along the contracted dimension.
    wgrad: output gradient in E4M3 with an E8M0 exponent for every 32 values along the contracted dimension; input
        in E4M3 with an E8M0 exponent for every 32 values along the contracted dimension.
    weights: Kept in FP8 as primary weights; gathered in BF16, since MX needs a cast for each direction.
    attention: Attention scores and their product with V in BF16.
    kept: In BF16: embeddings, norms, routers and the output head.
    rollout: Generation with input in E4M3 with an E8M0 exponent for every 32 values along the contracted dimension;
        weight in E4M3 with an E8M0 exponent for every 32 values along the contracted dimension; a BF16 KV cache.
    note: fp8_param saves no bytes on the wire with mxfp8.

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def fp16_with_mxfp8_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'fp16_with_mxfp8_mixed' as a Config for ``trainer.plugins``.

    precision: fp16_with_mxfp8_mixed
    compute: Layers compute and keep parameters in FP16; gradients are reduced in FP16. Master weights are FP32.
    fprop: input in E4M3 with an E8M0 exponent for every 32 values along the contracted dimension; weight in E4M3
        with an E8M0 exponent for every 32 values along the contracted dimension.
    dgrad: output gradient in E4M3 with an E8M0 exponent for every 32 values along the contracted dimension; weight
        in E4M3 with an E8M0 exponent for every 32 values along the contracted dimension.
    wgrad: output gradient in E4M3 with an E8M0 exponent for every 32 values along the contracted dimension; input
        in E4M3 with an E8M0 exponent for every 32 values along the contracted dimension.
    weights: Kept in FP8 as primary weights; gathered in FP16, since MX needs a cast for each direction.
    attention: Attention scores and their product with V in FP16.
    kept: In FP16: embeddings, norms, routers and the output head.
    loss scale: Starts at 4.29497e+09, doubles after 1000 clean steps, halves after 2 overflows, never below 1.
    rollout: Generation with input in E4M3 with an E8M0 exponent for every 32 values along the contracted dimension;
        weight in E4M3 with an E8M0 exponent for every 32 values along the contracted dimension; a FP16 KV cache.
    note: fp8_param saves no bytes on the wire with mxfp8.

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def bf16_with_fp8_current_scaling_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'bf16_with_fp8_current_scaling_mixed' as a Config for ``trainer.plugins``.

    precision: bf16_with_fp8_current_scaling_mixed
    compute: Layers compute and keep parameters in BF16; gradients are reduced in FP32. Master weights are FP32.
    fprop: input in E4M3 with an FP32 scale for the whole tensor; weight in E4M3 with an FP32 scale for the whole
        tensor.
    dgrad: output gradient in E5M2 with an FP32 scale for the whole tensor; weight in E4M3 with an FP32 scale for
        the whole tensor.
    wgrad: output gradient in E5M2 with an FP32 scale for the whole tensor; input in E4M3 with an FP32 scale for the
        whole tensor.
    weights: Kept in FP8 as primary weights; the distributed optimizer gathers one byte an element.
    attention: Attention scores and their product with V in BF16.
    kept: In BF16: the first 1 and the last 1 decoder layers; embeddings, norms, routers and the output head.
    rollout: Generation with input in E4M3 with an FP32 scale for every 128 values along the contracted dimension;
        weight in E4M3 with an FP32 scale for each 128x128 block; a BF16 KV cache.

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def fp16_with_fp8_current_scaling_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'fp16_with_fp8_current_scaling_mixed' as a Config for ``trainer.plugins``.

    precision: fp16_with_fp8_current_scaling_mixed
    compute: Layers compute and keep parameters in FP16; gradients are reduced in FP16. Master weights are FP32.
    fprop: input in E4M3 with an FP32 scale for the whole tensor; weight in E4M3 with an FP32 scale for the whole
        tensor.
    dgrad: output gradient in E5M2 with an FP32 scale for the whole tensor; weight in E4M3 with an FP32 scale for
        the whole tensor.
    wgrad: output gradient in E5M2 with an FP32 scale for the whole tensor; input in E4M3 with an FP32 scale for the
        whole tensor.
    weights: Kept in FP8 as primary weights; the distributed optimizer gathers one byte an element.
    attention: Attention scores and their product with V in FP16.
    kept: In FP16: the first 1 and the last 1 decoder layers; embeddings, norms, routers and the output head.
    loss scale: Starts at 4.29497e+09, doubles after 1000 clean steps, halves after 2 overflows, never below 1.
    rollout: Generation with input in E4M3 with an FP32 scale for every 128 values along the contracted dimension;
        weight in E4M3 with an FP32 scale for each 128x128 block; a FP16 KV cache.

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def nemotron_h_bf16_with_fp8_current_scaling_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'nemotron_h_bf16_with_fp8_current_scaling_mixed' as a Config for ``trainer.plugins``.

    precision: nemotron_h_bf16_with_fp8_current_scaling_mixed
    compute: Layers compute and keep parameters in BF16; gradients are reduced in FP32. Master weights are FP32.
    fprop: input in E4M3 with an FP32 scale for the whole tensor; weight in E4M3 with an FP32 scale for the whole
        tensor.
    dgrad: output gradient in E5M2 with an FP32 scale for the whole tensor; weight in E4M3 with an FP32 scale for
        the whole tensor.
    wgrad: output gradient in E5M2 with an FP32 scale for the whole tensor; input in E4M3 with an FP32 scale for the
        whole tensor.
    weights: Kept in FP8 as primary weights; the distributed optimizer gathers one byte an element.
    attention: Attention scores and their product with V in BF16.
    kept: In BF16: the first 2 and the last 2 decoder layers; embeddings, norms, routers and the output head.
    rollout: Generation with input in E4M3 with an FP32 scale for every 128 values along the contracted dimension;
        weight in E4M3 with an FP32 scale for each 128x128 block; a BF16 KV cache.

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def nanov2_bf16_with_fp8_current_scaling_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'nanov2_bf16_with_fp8_current_scaling_mixed' as a Config for ``trainer.plugins``.

    precision: nanov2_bf16_with_fp8_current_scaling_mixed
    compute: Layers compute and keep parameters in BF16; gradients are reduced in FP32. Master weights are FP32.
    fprop: input in E4M3 with a power-of-2 scale for every 128 values along the contracted dimension; weight in E4M3
        with a power-of-2 scale for each 128x128 block.
    dgrad: output gradient in E5M2 with a power-of-2 scale for every 128 values along the contracted dimension;
        weight in E4M3 with a power-of-2 scale for each 128x128 block.
    wgrad: output gradient in E5M2 with a power-of-2 scale for every 128 values along the contracted dimension;
        input in E4M3 with a power-of-2 scale for every 128 values along the contracted dimension.
    weights: Kept in FP8 as primary weights; the distributed optimizer gathers one byte an element.
    attention: Attention scores and their product with V in BF16.
    kept: In BF16: the first 2 and the last 2 decoder layers; embeddings, norms, routers and the output head.
    rollout: Generation with input in E4M3 with a power-of-2 scale for every 128 values along the contracted
        dimension; weight in E4M3 with a power-of-2 scale for each 128x128 block; a BF16 KV cache.
    note: The name says tensorwise, the value is blockwise: NeMo 2.7.3 and Megatron-Bridge ship it so, and the value
        is kept for compatibility.
    note: Gradients in E5M2, as NeMo ships it; TransformerEngine's own block default and NeMo RL use E4M3
        (format='e4m3').

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def bf16_with_fp8_subchannel_scaling_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'bf16_with_fp8_subchannel_scaling_mixed' as a Config for ``trainer.plugins``.

    precision: bf16_with_fp8_subchannel_scaling_mixed
    compute: Layers compute and keep parameters in BF16; gradients are reduced in FP32. Master weights are FP32.
    fprop: input in E4M3 with a power-of-2 scale for every 128 values along the contracted dimension; weight in E4M3
        with a power-of-2 scale for each 128x128 block.
    dgrad: output gradient in E5M2 with a power-of-2 scale for every 128 values along the contracted dimension;
        weight in E4M3 with a power-of-2 scale for each 128x128 block.
    wgrad: output gradient in E5M2 with a power-of-2 scale for every 128 values along the contracted dimension;
        input in E4M3 with a power-of-2 scale for every 128 values along the contracted dimension.
    weights: Kept in BF16 and cast to FP8 once per global batch.
    attention: Attention scores and their product with V in BF16.
    kept: In BF16: embeddings, norms, routers and the output head.
    rollout: Generation with input in E4M3 with a power-of-2 scale for every 128 values along the contracted
        dimension; weight in E4M3 with a power-of-2 scale for each 128x128 block; a BF16 KV cache.
    note: Gradients in E5M2, as NeMo ships it; TransformerEngine's own block default and NeMo RL use E4M3
        (format='e4m3').

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def fp16_with_fp8_subchannel_scaling_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'fp16_with_fp8_subchannel_scaling_mixed' as a Config for ``trainer.plugins``.

    precision: fp16_with_fp8_subchannel_scaling_mixed
    compute: Layers compute and keep parameters in FP16; gradients are reduced in FP16. Master weights are FP32.
    fprop: input in E4M3 with a power-of-2 scale for every 128 values along the contracted dimension; weight in E4M3
        with a power-of-2 scale for each 128x128 block.
    dgrad: output gradient in E5M2 with a power-of-2 scale for every 128 values along the contracted dimension;
        weight in E4M3 with a power-of-2 scale for each 128x128 block.
    wgrad: output gradient in E5M2 with a power-of-2 scale for every 128 values along the contracted dimension;
        input in E4M3 with a power-of-2 scale for every 128 values along the contracted dimension.
    weights: Kept in FP16 and cast to FP8 once per global batch.
    attention: Attention scores and their product with V in FP16.
    kept: In FP16: embeddings, norms, routers and the output head.
    loss scale: Starts at 4.29497e+09, doubles after 1000 clean steps, halves after 2 overflows, never below 1.
    rollout: Generation with input in E4M3 with a power-of-2 scale for every 128 values along the contracted
        dimension; weight in E4M3 with a power-of-2 scale for each 128x128 block; a FP16 KV cache.
    note: Gradients in E5M2, as NeMo ships it; TransformerEngine's own block default and NeMo RL use E4M3
        (format='e4m3').

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def bf16_with_fp8_delayed_scaling_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'bf16_with_fp8_delayed_scaling_mixed' as a Config for ``trainer.plugins``.

    precision: bf16_with_fp8_delayed_scaling_mixed
    compute: Layers compute and keep parameters in BF16; gradients are reduced in FP32. Master weights are FP32.
    fprop: input in E4M3 with an FP32 scale for the whole tensor, found from earlier steps; weight in E4M3 with an
        FP32 scale for the whole tensor, found from earlier steps.
    dgrad: output gradient in E5M2 with an FP32 scale for the whole tensor, found from earlier steps; weight in E4M3
        with an FP32 scale for the whole tensor, found from earlier steps.
    wgrad: output gradient in E5M2 with an FP32 scale for the whole tensor, found from earlier steps; input in E4M3
        with an FP32 scale for the whole tensor, found from earlier steps.
    scales: A tensor's scale comes from the largest of the last 1024 amaxes; amaxes are shared by all ranks of the
        reduction group.
    weights: Kept in FP8 as primary weights; the distributed optimizer gathers one byte an element.
    attention: Attention scores and their product with V in BF16.
    kept: In BF16: embeddings, norms, routers and the output head.
    rollout: Generation with input in E4M3 with an FP32 scale for every 128 values along the contracted dimension;
        weight in E4M3 with an FP32 scale for each 128x128 block; a BF16 KV cache.

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def fp16_with_fp8_delayed_scaling_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'fp16_with_fp8_delayed_scaling_mixed' as a Config for ``trainer.plugins``.

    precision: fp16_with_fp8_delayed_scaling_mixed
    compute: Layers compute and keep parameters in FP16; gradients are reduced in FP16. Master weights are FP32.
    fprop: input in E4M3 with an FP32 scale for the whole tensor, found from earlier steps; weight in E4M3 with an
        FP32 scale for the whole tensor, found from earlier steps.
    dgrad: output gradient in E5M2 with an FP32 scale for the whole tensor, found from earlier steps; weight in E4M3
        with an FP32 scale for the whole tensor, found from earlier steps.
    wgrad: output gradient in E5M2 with an FP32 scale for the whole tensor, found from earlier steps; input in E4M3
        with an FP32 scale for the whole tensor, found from earlier steps.
    scales: A tensor's scale comes from the largest of the last 1024 amaxes; amaxes are shared by all ranks of the
        reduction group.
    weights: Kept in FP8 as primary weights; the distributed optimizer gathers one byte an element.
    attention: Attention scores and their product with V in FP16.
    kept: In FP16: embeddings, norms, routers and the output head.
    loss scale: Starts at 4.29497e+09, doubles after 1000 clean steps, halves after 2 overflows, never below 1.
    rollout: Generation with input in E4M3 with an FP32 scale for every 128 values along the contracted dimension;
        weight in E4M3 with an FP32 scale for each 128x128 block; a FP16 KV cache.
    note: An overflowing loss scale leaves inf in the amax history; the plugin lowers the start to 65536 and clears
        what overflowed.

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def bf16_with_fp8_delayed_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'bf16_with_fp8_delayed_mixed' as a Config for ``trainer.plugins``.

    precision: bf16_with_fp8_delayed_mixed
    compute: Layers compute and keep parameters in BF16; gradients are reduced in FP32. Master weights are FP32.
    fprop: input in E4M3 with an FP32 scale for the whole tensor, found from earlier steps; weight in E4M3 with an
        FP32 scale for the whole tensor, found from earlier steps.
    dgrad: output gradient in E5M2 with an FP32 scale for the whole tensor, found from earlier steps; weight in E4M3
        with an FP32 scale for the whole tensor, found from earlier steps.
    wgrad: output gradient in E5M2 with an FP32 scale for the whole tensor, found from earlier steps; input in E4M3
        with an FP32 scale for the whole tensor, found from earlier steps.
    scales: A tensor's scale comes from the largest of the last 1024 amaxes; amaxes are shared by all ranks of the
        reduction group.
    weights: Kept in FP8 as primary weights; the distributed optimizer gathers one byte an element.
    attention: Attention scores and their product with V in BF16.
    kept: In BF16: embeddings, norms, routers and the output head.
    rollout: Generation with input in E4M3 with an FP32 scale for every 128 values along the contracted dimension;
        weight in E4M3 with an FP32 scale for each 128x128 block; a BF16 KV cache.

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def fp16_with_fp8_delayed_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'fp16_with_fp8_delayed_mixed' as a Config for ``trainer.plugins``.

    precision: fp16_with_fp8_delayed_mixed
    compute: Layers compute and keep parameters in FP16; gradients are reduced in FP16. Master weights are FP32.
    fprop: input in E4M3 with an FP32 scale for the whole tensor, found from earlier steps; weight in E4M3 with an
        FP32 scale for the whole tensor, found from earlier steps.
    dgrad: output gradient in E5M2 with an FP32 scale for the whole tensor, found from earlier steps; weight in E4M3
        with an FP32 scale for the whole tensor, found from earlier steps.
    wgrad: output gradient in E5M2 with an FP32 scale for the whole tensor, found from earlier steps; input in E4M3
        with an FP32 scale for the whole tensor, found from earlier steps.
    scales: A tensor's scale comes from the largest of the last 1024 amaxes; amaxes are shared by all ranks of the
        reduction group.
    weights: Kept in FP8 as primary weights; the distributed optimizer gathers one byte an element.
    attention: Attention scores and their product with V in FP16.
    kept: In FP16: embeddings, norms, routers and the output head.
    loss scale: Starts at 4.29497e+09, doubles after 1000 clean steps, halves after 2 overflows, never below 1.
    rollout: Generation with input in E4M3 with an FP32 scale for every 128 values along the contracted dimension;
        weight in E4M3 with an FP32 scale for each 128x128 block; a FP16 KV cache.
    note: An overflowing loss scale leaves inf in the amax history; the plugin lowers the start to 65536 and clears
        what overflowed.

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def bf16_with_fp8_tensorwise_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'bf16_with_fp8_tensorwise_mixed' as a Config for ``trainer.plugins``.

    precision: bf16_with_fp8_tensorwise_mixed
    compute: Layers compute and keep parameters in BF16; gradients are reduced in FP32. Master weights are FP32.
    fprop: input in E4M3 with an FP32 scale for the whole tensor; weight in E4M3 with an FP32 scale for the whole
        tensor.
    dgrad: output gradient in E5M2 with an FP32 scale for the whole tensor; weight in E4M3 with an FP32 scale for
        the whole tensor.
    wgrad: output gradient in E5M2 with an FP32 scale for the whole tensor; input in E4M3 with an FP32 scale for the
        whole tensor.
    weights: Kept in FP8 as primary weights; the distributed optimizer gathers one byte an element.
    attention: Attention scores and their product with V in BF16.
    kept: In BF16: the first 1 and the last 1 decoder layers; embeddings, norms, routers and the output head.
    rollout: Generation with input in E4M3 with an FP32 scale for every 128 values along the contracted dimension;
        weight in E4M3 with an FP32 scale for each 128x128 block; a BF16 KV cache.

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def fp16_with_fp8_tensorwise_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'fp16_with_fp8_tensorwise_mixed' as a Config for ``trainer.plugins``.

    precision: fp16_with_fp8_tensorwise_mixed
    compute: Layers compute and keep parameters in FP16; gradients are reduced in FP16. Master weights are FP32.
    fprop: input in E4M3 with an FP32 scale for the whole tensor; weight in E4M3 with an FP32 scale for the whole
        tensor.
    dgrad: output gradient in E5M2 with an FP32 scale for the whole tensor; weight in E4M3 with an FP32 scale for
        the whole tensor.
    wgrad: output gradient in E5M2 with an FP32 scale for the whole tensor; input in E4M3 with an FP32 scale for the
        whole tensor.
    weights: Kept in FP8 as primary weights; the distributed optimizer gathers one byte an element.
    attention: Attention scores and their product with V in FP16.
    kept: In FP16: the first 1 and the last 1 decoder layers; embeddings, norms, routers and the output head.
    loss scale: Starts at 4.29497e+09, doubles after 1000 clean steps, halves after 2 overflows, never below 1.
    rollout: Generation with input in E4M3 with an FP32 scale for every 128 values along the contracted dimension;
        weight in E4M3 with an FP32 scale for each 128x128 block; a FP16 KV cache.

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def bf16_with_fp8_blockwise_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'bf16_with_fp8_blockwise_mixed' as a Config for ``trainer.plugins``.

    precision: bf16_with_fp8_blockwise_mixed
    compute: Layers compute and keep parameters in BF16; gradients are reduced in FP32. Master weights are FP32.
    fprop: input in E4M3 with a power-of-2 scale for every 128 values along the contracted dimension; weight in E4M3
        with a power-of-2 scale for each 128x128 block.
    dgrad: output gradient in E5M2 with a power-of-2 scale for every 128 values along the contracted dimension;
        weight in E4M3 with a power-of-2 scale for each 128x128 block.
    wgrad: output gradient in E5M2 with a power-of-2 scale for every 128 values along the contracted dimension;
        input in E4M3 with a power-of-2 scale for every 128 values along the contracted dimension.
    weights: Kept in BF16 and cast to FP8 once per global batch.
    attention: Attention scores and their product with V in BF16.
    kept: In BF16: embeddings, norms, routers and the output head.
    rollout: Generation with input in E4M3 with a power-of-2 scale for every 128 values along the contracted
        dimension; weight in E4M3 with a power-of-2 scale for each 128x128 block; a BF16 KV cache.
    note: Gradients in E5M2, as NeMo ships it; TransformerEngine's own block default and NeMo RL use E4M3
        (format='e4m3').

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def fp16_with_fp8_blockwise_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'fp16_with_fp8_blockwise_mixed' as a Config for ``trainer.plugins``.

    precision: fp16_with_fp8_blockwise_mixed
    compute: Layers compute and keep parameters in FP16; gradients are reduced in FP16. Master weights are FP32.
    fprop: input in E4M3 with a power-of-2 scale for every 128 values along the contracted dimension; weight in E4M3
        with a power-of-2 scale for each 128x128 block.
    dgrad: output gradient in E5M2 with a power-of-2 scale for every 128 values along the contracted dimension;
        weight in E4M3 with a power-of-2 scale for each 128x128 block.
    wgrad: output gradient in E5M2 with a power-of-2 scale for every 128 values along the contracted dimension;
        input in E4M3 with a power-of-2 scale for every 128 values along the contracted dimension.
    weights: Kept in FP16 and cast to FP8 once per global batch.
    attention: Attention scores and their product with V in FP16.
    kept: In FP16: embeddings, norms, routers and the output head.
    loss scale: Starts at 4.29497e+09, doubles after 1000 clean steps, halves after 2 overflows, never below 1.
    rollout: Generation with input in E4M3 with a power-of-2 scale for every 128 values along the contracted
        dimension; weight in E4M3 with a power-of-2 scale for each 128x128 block; a FP16 KV cache.
    note: Gradients in E5M2, as NeMo ships it; TransformerEngine's own block default and NeMo RL use E4M3
        (format='e4m3').

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def bf16_with_nvfp4_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'bf16_with_nvfp4_mixed' as a Config for ``trainer.plugins``.

    precision: bf16_with_nvfp4_mixed
    compute: Layers compute and keep parameters in BF16; gradients are reduced in FP32. Master weights are FP32.
    fprop: input in E2M1 with an E4M3 scale for every 16 values along the contracted dimension; weight in E2M1 with
        an E4M3 scale for each 16x16 block.
    dgrad: output gradient in E2M1 with an E4M3 scale for every 16 values along the contracted dimension, rounded by
        chance; weight in E2M1 with an E4M3 scale for each 16x16 block.
    wgrad: output gradient in E2M1 with an E4M3 scale for every 16 values along the contracted dimension, rounded by
        chance, after a random Hadamard transform; input in E2M1 with an E4M3 scale for every 16 values along the
        contracted dimension, after a random Hadamard transform.
    scales: Scales of blocks lie beneath an FP32 scale for each tensor, with which the largest block has the largest
        scale.
    weights: Kept in BF16 and cast to NVFP4 once per global batch.
    attention: Attention scores and their product with V in BF16.
    kept: In BF16: embeddings, norms, routers and the output head.
    rollout: Generation with input in E2M1 with an E4M3 scale for every 16 values along the contracted dimension,
        beneath an FP32 scale for each token; weight in E2M1 with an E4M3 scale for every 16 values along the
        contracted dimension; a BF16 KV cache.

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """

def nemotron_3_super_bf16_with_nvfp4_mixed(**changes: Unpack[_Arguments]) -> _PluginConfig:
    """Return the precision 'nemotron_3_super_bf16_with_nvfp4_mixed' as a Config for ``trainer.plugins``.

    precision: nemotron_3_super_bf16_with_nvfp4_mixed
    compute: Layers compute and keep parameters in BF16; gradients are reduced in FP32. Master weights are FP32.
    fprop: input in E2M1 with an E4M3 scale for every 16 values along the contracted dimension; weight in E2M1 with
        an E4M3 scale for each 16x16 block.
    dgrad: output gradient in E2M1 with an E4M3 scale for every 16 values along the contracted dimension, rounded by
        chance; weight in E2M1 with an E4M3 scale for each 16x16 block.
    wgrad: output gradient in E2M1 with an E4M3 scale for every 16 values along the contracted dimension, rounded by
        chance, after a random Hadamard transform; input in E2M1 with an E4M3 scale for every 16 values along the
        contracted dimension, after a random Hadamard transform.
    scales: Scales of blocks lie beneath an FP32 scale for each tensor, with which the largest block has the largest
        scale.
    weights: Kept in BF16 and cast to NVFP4 once per global batch.
    attention: Attention scores and their product with V in BF16.
    kept: In BF16: the last 14 decoder layers; embeddings, norms, routers and the output head.
    rollout: Generation with input in E2M1 with an E4M3 scale for every 16 values along the contracted dimension,
        beneath an FP32 scale for each token; weight in E2M1 with an E4M3 scale for every 16 values along the
        contracted dimension; a BF16 KV cache.

    Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit.
    """
