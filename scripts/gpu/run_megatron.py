"""One training run of megatron-core under one precision, in a process of its own: what train.py starts, once for each case.

    python3 scripts/gpu/run_megatron.py CASE SHAPE FILE [--steps 200] [--cpu] [--plain] [--wait]

It is NeMo's path without NeMo and Lightning, which are too large to carry: the contract is written into Megatron's three configs by
the table that renders Megatron-LM's command line, and nemo_fp8.train does the rest as the plugin does it: it chooses the engine and
holds it, checks the configs, repairs what delayed scaling breaks. The model is megatron-core's GPTModel with its DDP, its
distributed optimizer and its schedule.

Layers are ``te`` (TE's fused linears, what NeMo uses) or ``parts``: TE's norms and attention around Megatron's own linears, which
are those that the emulation puts in FP8. BF16 runs in both, so that their distance is known before FP8 is compared.

All cases of a shape begin with the same weights and see the same tokens: a walk over a random graph in which every token has four
successors of unequal chances, which a model learns the longer the better.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import types
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "scripts" / "gpu"):
    sys.path.insert(0, str(folder))

from common import CONTRACTS, plain, versions  # noqa: E402

from nemo_fp8.contract import Precision  # noqa: E402


@dataclass(frozen=True)
class Shape:
    """A slice of a model: its layers' real sizes, fewer of them, a smaller vocabulary."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    channels: int
    vocabulary: int
    sequence: int
    batch: int
    experts: int = 0
    topk: int = 0

    @property
    def tokens(self) -> int:
        return self.sequence * self.batch

    @property
    def flops(self) -> int:
        """Of a step: six for each weight and token, and causal attention."""
        attention = self.hidden * self.channels * (self.heads + 2 * self.groups) + self.heads * self.channels * self.hidden
        mlp = 3 * self.hidden * self.ffn * max(1, self.topk) + self.hidden * self.experts
        weights = self.layers * (attention + mlp) + self.hidden * self.vocabulary
        return 6 * weights * self.tokens + 6 * self.layers * self.batch * self.sequence**2 * self.heads * self.channels


SHAPES = {
    "llama": Shape(4, 4096, 14336, 32, 8, 128, 32768, 4096, 2),  # Llama-3.1-8B's layers
    "moe": Shape(2, 2048, 768, 32, 4, 128, 32768, 4096, 2, 128, 8),  # Qwen3-30B-A3B's
    "tiny": Shape(2, 128, 256, 4, 2, 32, 512, 64, 2),
    "tiny_moe": Shape(2, 128, 128, 4, 2, 32, 512, 64, 2, 4, 2),
}
BF16 = Precision()


@dataclass(frozen=True)
class Case:
    """A precision, who runs it, in which layers."""

    precision: Precision
    engine: str = "te"
    layers: str = "te"


def _cases() -> dict[str, Case]:
    fp8 = {name: precision for name, precision in CONTRACTS.items() if name != "mxfp8"}
    cases = {"bf16": Case(BF16)} | {name: Case(precision) for name, precision in fp8.items()}
    gathered = ("delayed", "tensorwise", "blockwise pow2")
    cases |= {f"{name}, FP8 weights": Case(fp8[name].replace(fp8_param=True)) for name in gathered}
    cases["bf16 in parts"] = Case(BF16, "te", "parts")
    return cases | {f"{name}, emulated": Case(precision, "emulated", "parts") for name, precision in fp8.items()}


CASES = _cases()
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
    ddp = {"use_distributed_optimizer": True, "check_for_nan_in_grad": False} | settings["DistributedDataParallelConfig"]
    optimizer = {"optimizer": "adam", "lr": RATE, "weight_decay": 0.1, "adam_beta2": 0.95, "clip_grad": 1.0, "params_dtype": torch.bfloat16}
    return (
        model,
        DistributedDataParallelConfig(**ddp),
        OptimizerConfig(**optimizer, use_distributed_optimizer=True, **settings["OptimizerConfig"]),
    )


def layer_spec(case: Case, shape: Shape, cpu: bool) -> Any:
    """TE's layers, or TE's parts around Megatron's own linears; on a CPU, which has no TE, Megatron's own throughout."""
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


# ---------------------------------------------------------------------- weights and tokens


def canonical(name: str) -> str:
    """One name for one weight, whether its experts are grouped or a list."""
    return re.sub(r"local_experts\.(\d+)\.linear_fc(\d)\.weight", r"linear_fc\2.weight\1", name)


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """The same weights in every case, from the name of each; an FP8 weight keeps them for its master weight too."""
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            continue
        random = torch.Generator(weight.device).manual_seed(zlib.crc32(canonical(name).encode()))
        value = torch.randn(weight.shape, generator=random, device=weight.device).mul_(0.02).to(torch.bfloat16)
        weight.copy_(value)
        if hasattr(weight, "_high_precision_init_val"):  # TransformerEngine's
            weight._high_precision_init_val = value.cpu()
        elif hasattr(weight, "_held"):  # the emulation's
            weight._held.initial = value


def batches(shape: Shape, steps: int, device: str) -> Iterator[torch.Tensor]:
    """Tokens of every step, [batch, sequence + 1]."""
    random = torch.Generator().manual_seed(7)
    alphabet = min(4096, shape.vocabulary)
    successors = torch.randint(alphabet, (alphabet, 4), generator=random)
    for _ in range(steps):
        choices = torch.multinomial(torch.tensor([0.5, 0.25, 0.15, 0.1]), shape.batch * shape.sequence, replacement=True, generator=random)
        choices = choices.view(shape.sequence, shape.batch)
        tokens = [torch.randint(alphabet, (shape.batch,), generator=random)]
        for choice in choices:
            tokens.append(successors[tokens[-1], choice])
        yield torch.stack(tokens, 1).to(device)


# ---------------------------------------------------------------------- statistics


class Watch:
    """What flows through every linear in one forward and backward: amax and SNR of inputs, weights and output gradients.

    Measured by our numerics on the tensors themselves, for whoever multiplies them; beside it the scales that delayed scaling
    keeps, TE's or ours. The input of a linear that norms it first is not to be seen.
    """

    def __init__(self, model: torch.nn.Module, precision: Precision) -> None:
        self.precision = precision if precision.is_fp8 else CONTRACTS["tensorwise"]
        self.found: dict[str, dict[str, float]] = {}
        self.handles = [module.register_forward_hook(self._hook(name)) for name, module in fp8_linears(model).items()]

    def _hook(self, name: str) -> Callable[..., None]:
        def after(module: Any, args: tuple[Any, ...], output: Any) -> None:
            if f"{name}/weight" in self.found:
                return
            if not hasattr(module, "layer_norm_weight"):
                self._measure(f"{name}/input", args[0], "input")
            weight = module.weight
            self._measure(f"{name}/weight", weight.dequantize() if hasattr(weight, "dequantize") and _is_fp8(weight) else weight, "weight")
            out = output[0] if isinstance(output, tuple) else output
            out.register_hook(lambda grad: self._measure(f"{name}/grad", grad, "grad"))

        return after

    def _measure(self, key: str, x: torch.Tensor, role: str) -> None:
        from nemo_fp8.contract import Operand
        from nemo_fp8.numerics.quantize import quantize

        operand = self.precision.operand(role)
        assert operand is not None
        now = Operand(operand.format, operand.block, operand.scale)
        x = x.detach()
        statistics = quantize(x.reshape(-1, x.shape[-1]), now, statistics=True).statistics
        assert statistics is not None
        whole = statistics.total()
        self.found[key] = {name: float(getattr(whole, name)) for name in ("amax", "snr_db", "underflow_percent")}

    def close(self, model: torch.nn.Module) -> dict[str, dict[str, float]]:
        for handle in self.handles:
            handle.remove()
        for name, module in fp8_linears(model).items():
            for role, scale in delayed_scales(module).items():
                self.found.setdefault(f"{name}/{role}", {})["scale"] = scale
        return self.found


def fp8_linears(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The linears of the decoder that FP8 runs in, by canonical name."""
    found = {}
    for name, module in model.named_modules():
        if ".layers." in name and re.search(r"linear_(qkv|proj|fc1|fc2)$", name) and hasattr(module, "weight"):
            found[name[name.index("layers.") :]] = module
    return found


def delayed_scales(module: Any) -> dict[str, float]:
    """The scales of delayed scaling that a linear keeps for its next step."""
    emulated = getattr(module, "_delayed", None)
    if emulated is not None:
        (x, w), (g,) = emulated.forward.scale.tolist(), emulated.backward.scale.tolist()
        return {"input": x, "weight": w, "grad": g}
    meta = getattr(module, "fp8_meta", None) or {}
    forward, backward = (getattr(meta.get(key), "scale", None) for key in ("scaling_fwd", "scaling_bwd"))
    if forward is None or backward is None:
        return {}
    return {"input": float(forward[0]), "weight": float(forward[1]), "grad": float(backward[0])}


def _is_fp8(weight: torch.Tensor) -> bool:
    return any(hasattr(weight, name) for name in ("_scale_inv", "_rowwise_scale_inv", "_held"))


# ---------------------------------------------------------------------- a run


def train(case: Case, shape: Shape, steps: int, cpu: bool, unfused: bool, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Build, train, measure. ``keep`` is given what there is, from time to time."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    from nemo_fp8.train import checks, repairs
    from nemo_fp8.train.engine import choose_engine, hold_engine

    device = "cpu" if cpu else "cuda"
    found: dict[str, Any] = {"tokens": shape.tokens, "flops": shape.flops, "steps": steps, "losses": [], "ms": [], "statistics": {}}
    with ExitStack() as contexts:
        engine = choose_engine(case.precision, "emulated" if cpu else case.engine)
        hold_engine(contexts, case.precision, engine)
        store = contexts.enter_context(tempfile.TemporaryDirectory())
        torch.distributed.init_process_group("gloo" if cpu else "nccl", init_method=f"file://{store}/store", rank=0, world_size=1)
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
            "fp8_weights": sum(_is_fp8(p) for p in model.parameters()),
            "fp8_linears": len(fp8_linears(model)),
            "memory_built": _memory(cpu),
        }
        print(f"built: {found['parameters']:,} parameters, {found['fp8_weights']} of them FP8; engine {engine}", flush=True)
        keep(found)

        mask = torch.ones(shape.sequence, shape.sequence, dtype=torch.bool).triu(1)[None, None] if cpu else None
        positions = torch.arange(shape.sequence, device=device)[None].expand(shape.batch, -1)

        def forward_step(data: Iterator[torch.Tensor], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            tokens = next(data)
            each = chunk(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())

            def loss(out: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                mean = out.float().mean()
                return mean, {"loss": mean.detach().clone()}

            return each, loss

        data, schedule = batches(shape, steps, device), get_forward_backward_func()
        settings = {"num_microbatches": 1, "seq_length": shape.sequence, "micro_batch_size": shape.batch}
        losses: list[torch.Tensor] = []
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
            tokens = [next(data)]
            watch = Watch(ddp, case.precision) if step in WATCHED or (step == steps - 1 and step < WATCHED[0]) else None
            _wait(cpu)
            started = time.perf_counter()
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            (told,) = schedule(forward_step_func=forward_step, data_iterator=iter(tokens), model=[ddp], **settings)
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
                    f"step {step + 1}: loss {found['losses'][-1]:.4f}, {median(t for t in found['ms'] if t is not None):.1f} ms", flush=True
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
    """megatron-core 0.15 compiles an allocator of managed memory when it is imported, for inference; training has no use for it."""
    module = types.ModuleType("megatron.core.inference.unified_memory")
    module.has_unified_memory, module.create_unified_mempool = False, lambda: None  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--plain", action="store_true", help="without Megatron's fusions")
    parser.add_argument("--wait", action="store_true", help="import everything, then wait for a line on stdin")
    options = parser.parse_args()
    without_unified_memory()
    if not options.cpu:
        import transformer_engine.pytorch  # noqa: F401 - before Megatron, which asks for its version
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401

    import nemo_fp8.train.emulated  # noqa: F401

    if options.wait and not sys.stdin.readline():
        return  # nobody wants it any more

    def keep(found: dict[str, Any]) -> None:
        partial = options.file.with_suffix(".partial")
        partial.write_text(json.dumps(plain(found | {"versions": versions()})))
        partial.replace(options.file)

    keep(train(CASES[options.case], SHAPES[options.shape], options.steps, options.cpu, options.plain, keep))
    sys.stdout.flush()
    os._exit(0)  # NCCL and TE may take long to say goodbye


if __name__ == "__main__":
    main()
