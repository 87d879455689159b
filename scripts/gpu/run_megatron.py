"""One training run of megatron-core under one precision, in a process of its own: what train.py starts, once for each
case.

    python3 scripts/gpu/run_megatron.py CASE SHAPE FILE [--steps 200] [--cpu] [--plain] [--wait]

It is NeMo's path without NeMo and Lightning, which are too large to carry: the contract is written into Megatron's
three configs by the table that renders Megatron-LM's command line, and nemo_fp8.train does the rest as the plugin does
it: it chooses the engine and holds it, checks the configs, repairs what delayed scaling breaks. The model is
megatron-core's GPTModel with its DDP, its distributed optimizer and its schedule.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "scripts" / "gpu"):
    sys.path.insert(0, str(folder))

import records  # noqa: E402
from common import plain, versions  # noqa: E402
from slices import CASES, MOST_STEPS, SHAPES, Case, Shape, fill, tokens  # noqa: E402
from watch import Watch, fp8_linears, is_fp8  # noqa: E402

from nemo_fp8.contract import Precision  # noqa: E402

WATCHED = (10, 100, 190)
WARM_UP, RATE = 20, 3e-4


# ---------------------------------------------------------------------- configs


def core_settings(precision: Precision) -> dict[str, dict[str, Any]]:
    """What a contract sets on each of Megatron's configs, by the table of its command line."""
    from nemo_fp8.render.megatron import FLAGS
    from nemo_fp8.render.nemo import to_nemo

    given, found = to_nemo(precision), defaultdict(dict)
    for flag in FLAGS.values():
        if flag.nemo in given:
            value = given[flag.nemo] == flag.value if flag.nemo == "precision" else given[flag.nemo]
            for target in flag.core:
                config, field = target.split(".")
                found[config][field] = value
    return found


def configs(case: Case, shape: Shape, cpu: bool, unfused: bool) -> tuple[Any, Any, Any]:
    """Megatron's model, DDP and optimizer configs."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    settings = core_settings(case.precision)
    fused = not (cpu or unfused)
    experts: dict[str, Any] = {}
    if shape.experts:
        experts = {
            "num_moe_experts": shape.experts,
            "moe_router_topk": shape.topk,
            "moe_ffn_hidden_size": shape.ffn,
            "moe_grouped_gemm": case.layers == "te" and not cpu,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-3,
        }
    model = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.channels,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        apply_rope_fusion=fused,
        **experts,
        **settings["TransformerConfig"],
    )
    ddp = {"use_distributed_optimizer": True, "check_for_nan_in_grad": False} | settings[
        "DistributedDataParallelConfig"
    ]
    optimizer = {
        "optimizer": "adam",
        "lr": RATE,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "clip_grad": 1.0,
        "params_dtype": torch.bfloat16,
    }
    return (
        model,
        DistributedDataParallelConfig(**ddp),
        OptimizerConfig(**optimizer, use_distributed_optimizer=True, **settings["OptimizerConfig"]),
    )


def layer_spec(case: Case, shape: Shape, cpu: bool) -> Any:
    """TE's layers, or TE's parts around Megatron's own linears; on a CPU, which has no TE, Megatron's own
    throughout."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    experts = {"num_experts": shape.experts or None}
    if case.layers == "te" and not cpu:
        return specs.get_gpt_layer_with_transformer_engine_spec(**experts, moe_grouped_gemm=bool(shape.experts))
    spec = specs.get_gpt_layer_local_spec(**experts, moe_grouped_gemm=False, normalization="RMSNorm")
    if cpu:
        return spec
    from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm

    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = TENorm
    layer.self_attention.submodules.core_attention = TEDotProductAttention
    return spec


# ---------------------------------------------------------------------- a run


def train(
    case: Case, shape: Shape, walks: torch.Tensor, cpu: bool, unfused: bool, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Build, train a step on each row of ``walks``, measure. ``keep`` is given what there is, from time to time."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    from nemo_fp8.preflight.machine import Machine
    from nemo_fp8.train import checks, repairs
    from nemo_fp8.train.engine import choose_engine, hold_cpu

    device, steps = "cpu" if cpu else "cuda", len(walks)
    found: dict[str, Any] = {
        "tokens": shape.tokens,
        "flops": shape.flops,
        "steps": steps,
        "losses": [],
        "ms": [],
        "statistics": {},
    }
    with ExitStack() as contexts:
        # NeMo is no part of this path: whether it is installed, and which, decides nothing.
        machine = dataclasses.replace(Machine.here(), nemo=None)
        engine = choose_engine(case.precision, "emulated" if cpu else case.engine, machine)
        hold_cpu(contexts, case.precision)
        store = contexts.enter_context(tempfile.TemporaryDirectory())
        torch.distributed.init_process_group(
            "gloo" if cpu else "nccl", init_method=f"file://{store}/store", rank=0, world_size=1
        )
        contexts.callback(torch.distributed.destroy_process_group)
        parallel_state.initialize_model_parallel()
        contexts.callback(parallel_state.destroy_model_parallel)
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        config, ddp_config, optimizer_config = configs(case, shape, cpu, unfused)
        checks.require_agreement(case.precision, checks.Run(config, ddp_config, optimizer_config))
        model = GPTModel(
            config=config,
            transformer_layer_spec=layer_spec(case, shape, cpu),
            vocab_size=shape.vocabulary,
            max_sequence_length=shape.sequence,
            position_embedding_type="rope",
            rotary_base=500000,
            share_embeddings_and_output_weights=False,
        ).to(device)
        fill(model)
        ddp = DistributedDataParallel(config=config, ddp_config=ddp_config, module=Float16Module(config, model))
        optimizer = get_megatron_optimizer(optimizer_config, [ddp])
        config.finalize_model_grads_func = finalize_model_grads
        found |= {
            "engine": engine,
            "parameters": sum(p.numel() for p in model.parameters()),
            "fp8_weights": sum(is_fp8(p) for p in model.parameters()),
            "fp8_linears": len(fp8_linears(model)),
            "memory_built": _memory(cpu),
        }
        print(
            f"built: {found['parameters']:,} parameters, {found['fp8_weights']} of them FP8; engine {engine}",
            flush=True,
        )
        keep(found)

        mask = torch.ones(shape.sequence, shape.sequence, dtype=torch.bool).triu(1)[None, None] if cpu else None
        positions = torch.arange(shape.sequence, device=device)[None].expand(shape.batch, -1)

        def forward_step(data: Iterator[torch.Tensor], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            walk = next(data)
            each = chunk(walk[:, :-1].contiguous(), positions, mask, labels=walk[:, 1:].contiguous())

            def loss(out: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                mean = out.float().mean()
                return mean, {"loss": mean.detach().clone()}

            return each, loss

        schedule = get_forward_backward_func()
        settings = {"num_microbatches": 1, "seq_length": shape.sequence, "micro_batch_size": shape.batch}
        losses: list[torch.Tensor] = []
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
            batch = [walks[step].to(device)]
            watch = Watch(ddp, case.precision) if step in WATCHED or (step == steps - 1 and step < WATCHED[0]) else None
            _wait(cpu)
            started = time.perf_counter()
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            (told,) = schedule(forward_step_func=forward_step, data_iterator=iter(batch), model=[ddp], **settings)
            optimizer.step()
            repairs.after_step(case.precision, ddp, optimizer)
            _wait(cpu)
            found["ms"].append((time.perf_counter() - started) * 1e3)
            losses.append(told["loss"])
            if watch is not None:
                found["statistics"][str(step)] = watch.close(ddp)
                found["ms"][-1] = None  # a watched step measures more than itself
            if step % 20 == 19 or step == steps - 1:
                found["losses"] = torch.stack(losses).tolist()
                found["memory_peak"] = _memory(cpu, peak=True)
                keep(found)
                print(
                    f"step {step + 1}: loss {found['losses'][-1]:.4f}, "
                    f"{median(t for t in found['ms'] if t is not None):.1f} ms",
                    flush=True,
                )
    found["done"] = True
    return found


def _memory(cpu: bool, peak: bool = False) -> int | None:
    if cpu:
        return None
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def _wait(cpu: bool) -> None:
    if not cpu:
        torch.cuda.synchronize()


def without_unified_memory() -> None:
    """megatron-core 0.15 compiles an allocator of managed memory when it is imported, for inference; training has no
    use for it."""
    module = types.ModuleType("megatron.core.inference.unified_memory")
    module.has_unified_memory, module.create_unified_mempool = False, lambda: None  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=MOST_STEPS)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--plain", action="store_true", help="without Megatron's fusions")
    parser.add_argument("--wait", action="store_true", help="import everything, then wait for a line on stdin")
    options = parser.parse_args()
    without_unified_memory()
    if not options.cpu:
        import transformer_engine.pytorch  # noqa: F401 - before Megatron, which asks for its version
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401

    import nemo_fp8.train.engine  # noqa: F401

    shape = SHAPES[options.shape]
    walks, software = tokens(shape, options.steps), versions()
    if options.wait and not sys.stdin.readline():
        return  # nobody wants it any more

    def keep(found: dict[str, Any]) -> None:
        records.write(options.file, plain(found | {"versions": software}))

    keep(train(CASES[options.case], shape, walks, options.cpu, options.plain, keep))
    sys.stdout.flush()
    os._exit(0)  # NCCL and TE may take long to say goodbye


if __name__ == "__main__":
    main()
