"""Training with TransformerEngine: what each recipe costs and saves, and what it does to the loss.

A slice of a model has the sizes of its layers, fewer of them, and a smaller vocabulary, so that it trains in seconds
and its GEMMs are the real ones. All cases of a shape begin with the same weights and see the same tokens: a walk over a
random graph in which every token has four successors of unequal chances, which a model learns the longer the better.

It is NeMo's path without NeMo and Lightning: the contract is written into Megatron's three configs by the table that
renders verl's and SkyRL's overrides of them, and checked as the plugin checks it. ``FP8 weights`` are FP8 primary
weights, which the distributed optimizer gathers as bytes; on one GPU there is nobody to gather from, so what shows is
memory and the cost of casting.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.render.overrides import to_overrides
from nemo_fp8.render.te import te_environment

from .measuring import CONTRACTS, Run, Skipped


@dataclass(frozen=True)
class Shape:
    """A slice of a model: Megatron's arguments for it, and what it is fed."""

    model: dict[str, Any]
    vocabulary: int = 32768
    sequence: int = 4096
    batch: int = 2

    @property
    def flops(self) -> int:
        """Operations of a step: six for each weight and token, and causal attention."""
        m = self.model
        width, experts = m["num_attention_heads"] * m["kv_channels"], m.get("num_moe_experts", 0)
        attention = m["hidden_size"] * (2 * width + 2 * m["num_query_groups"] * m["kv_channels"])
        mlp = m["hidden_size"] * (3 * m["ffn_hidden_size"] * m.get("moe_router_topk", 1) + experts)
        weights = m["num_layers"] * (attention + mlp + self.sequence * width) + m["hidden_size"] * self.vocabulary
        return 6 * weights * self.sequence * self.batch


def _model(layers: int, hidden: int, ffn: int, heads: int, groups: int, channels: int) -> dict[str, Any]:
    sizes = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads}
    return sizes | {"num_query_groups": groups, "kv_channels": channels}


def _experts(model: dict[str, Any], experts: int, topk: int) -> dict[str, Any]:
    router = {"num_moe_experts": experts, "moe_router_topk": topk, "moe_ffn_hidden_size": model["ffn_hidden_size"]}
    router |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-3}
    return model | router | {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}


SHAPES = {
    "llama": Shape(_model(4, 4096, 14336, 32, 8, 128)),  # Llama-3.1-8B's layers
    "moe": Shape(_experts(_model(2, 2048, 768, 32, 4, 128), 128, 8)),  # Qwen3-30B-A3B's
}
SMALL = {
    "llama": Shape(_model(2, 128, 256, 4, 2, 32), 512, 64),
    "moe": Shape(_experts(_model(2, 128, 128, 4, 2, 32), 4, 2), 512, 64),
}
STEPS, WARM_UP, RATE = 200, 20, 3e-4
CHANCES = torch.tensor([0.5, 0.25, 0.15, 0.1])  # of a token's four successors


def measure(run: Run, name: str) -> None:
    """Measure one case: a shape, and a recipe with or without FP8 weights."""
    shape, _, case = name.partition(": ")
    recipe, _, weights = case.partition(", ")
    precision = CONTRACTS.get(recipe, Precision()).replace(fp8_param=bool(weights))
    os.environ |= te_environment(precision)  # TE reads it when it is imported
    train(run, precision, (SMALL if run.small else SHAPES)[shape])


def tokens(shape: Shape) -> torch.Tensor:
    """Return the tokens of every step, [steps, batch, sequence + 1]."""
    random = torch.Generator().manual_seed(7)
    alphabet, walkers = min(4096, shape.vocabulary), STEPS * shape.batch
    successors = torch.randint(alphabet, (alphabet, 4), generator=random)
    walk = torch.randint(alphabet, (shape.sequence + 1, walkers), generator=random)
    for here in range(shape.sequence):
        chosen = torch.multinomial(CHANCES, walkers, replacement=True, generator=random)
        walk[here + 1] = successors[walk[here], chosen]
    return walk.t().reshape(STEPS, shape.batch, -1).contiguous()


def configs(precision: Precision, shape: Shape) -> tuple[Any, Any, Any]:
    """Return Megatron's model, DDP and optimizer configs."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    kinds = (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    settings = to_overrides(precision, {kind.__name__: kind.__name__ for kind in kinds})

    def config(kind: Any, **own: Any) -> Any:
        said = ((*key.split("."), value) for key, value in settings.items())
        return kind(**own, **{field: value for name, field, value in said if name == kind.__name__})

    dtype = {"bf16": True, "params_dtype": torch.bfloat16}
    model = config(
        TransformerConfig,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_dtype=torch.bfloat16,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        apply_rope_fusion=True,
        **dtype,
        **shape.model,
    )
    ddp = config(DistributedDataParallelConfig, use_distributed_optimizer=True, check_for_nan_in_grad=False)
    adam = {"optimizer": "adam", "lr": RATE, "weight_decay": 0.1, "adam_beta2": 0.95, "clip_grad": 1.0}
    return model, ddp, config(OptimizerConfig, use_distributed_optimizer=True, **adam, **dtype)


def train(run: Run, precision: Precision, shape: Shape) -> None:
    """Build, take the steps, measure; what there is is kept every twenty steps."""
    import transformer_engine.pytorch  # noqa: F401 - before Megatron, which asks whether it is there
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    from nemo_fp8.preflight.engine import choose_engine
    from nemo_fp8.preflight.machine import Machine
    from nemo_fp8.train import checks

    logging.getLogger("nemo_fp8").setLevel(logging.INFO)
    try:  # NeMo is no part of this path: whether it is installed, and which, decides nothing
        engine = choose_engine(precision, "auto", dataclasses.replace(Machine.here(), nemo=None))
    except PrecisionError as refused:
        raise Skipped(" ".join(str(refused).split())) from None
    walks = tokens(shape)[: 4 if run.small else STEPS]
    run.found = found = {"engine": engine, "tokens": shape.sequence * shape.batch, "flops": shape.flops, "ms": []}
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1234)  # every case draws the same weights
    experts = shape.model.get("num_moe_experts")
    config, ddp_config, optimizer_config = configs(precision, shape)
    checks.require_agreement(precision, checks.Run(config, ddp_config, optimizer_config))
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(experts, bool(experts)),
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.sequence,
        position_embedding_type="rope",
        rotary_base=500000,
        share_embeddings_and_output_weights=False,
    ).to("cuda")
    ddp = DistributedDataParallel(config=config, ddp_config=ddp_config, module=Float16Module(config, model))
    optimizer = get_megatron_optimizer(optimizer_config, [ddp])
    config.finalize_model_grads_func = finalize_model_grads
    weights = list(model.parameters())
    found |= {
        "parameters": sum(p.numel() for p in weights),
        "fp8_weights": sum(hasattr(p, "_quantizer") for p in weights),
        "memory_built": torch.cuda.memory_allocated(),
    }
    positions = torch.arange(shape.sequence, device="cuda")[None].expand(shape.batch, -1)

    def forward_step(data: Iterator[torch.Tensor], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        walk = next(data)
        each = chunk(walk[:, :-1].contiguous(), positions, None, labels=walk[:, 1:].contiguous())
        return each, lambda out: ((mean := out.float().mean()), {"loss": mean.detach().clone()})

    schedule = get_forward_backward_func()
    losses: list[torch.Tensor] = []
    for step, walk in enumerate(walks):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
        batch = walk.to("cuda")
        torch.cuda.synchronize()
        started = time.perf_counter()
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        (told,) = schedule(
            forward_step_func=forward_step, data_iterator=iter([batch]), model=[ddp], num_microbatches=1,
            seq_length=shape.sequence, micro_batch_size=shape.batch,
        )  # fmt: skip
        optimizer.step()
        torch.cuda.synchronize()
        found["ms"].append((time.perf_counter() - started) * 1e3)
        losses.append(told["loss"])
        if step % 20 == 19 or step == len(walks) - 1:
            found["losses"] = torch.stack(losses).tolist()
            found["memory_peak"] = torch.cuda.max_memory_allocated()
            run.keep()
