"""Some steps of Megatron's GPT on TransformerEngine's layers, in one process, without NeMo; not a name of Megatron's is
replaced.

    PYTHONPATH=FOLDER_OF_A_MEGATRON python megatron_alone.py '[{"recipe": "delayed"}, ...]'

prints as JSON the version of Megatron, whether NeMo was imported, and of every run its losses and the linears that ran
in FP8, or how it was refused; of FP8 weights, too, how many there are, what they and their scales are in the end, and
how many casts of a single row made a transpose.
"""

import hashlib
import json
import os
import subprocess
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[3]
VOCABULARY, LENGTH, STEPS = 128, 32, 4
EXPERTS = {
    "num_moe_experts": 4,
    "moe_grouped_gemm": True,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
}


def run_alone(jobs, env, *apart):
    """What this file, run by a process of its own, says of these jobs; packages in the folders ``apart`` come first."""
    path = {"PYTHONPATH": os.pathsep.join([*apart, str(ROOT)]), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, json.dumps(jobs)]
    run = subprocess.run(command, env=os.environ | path | env, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def main():
    import torch
    from megatron.core import __version__, parallel_state

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    runs = [train_or_say(**job) for job in json.loads(sys.argv[1])]
    nemo = any(name.split(".")[0] in ("nemo", "lightning") for name in sys.modules)
    sys.stdout.write(json.dumps({"version": __version__, "nemo": nemo, "runs": runs}) + "\n")


def train_or_say(row_casts=False, **job):
    """``row_casts`` casts master weights to FP8 as our plugin has it done."""
    with ExitStack() as held:
        if row_casts:
            from nemo_fp8.contract import Precision
            from nemo_fp8.train.row_casts import hold_row_casts

            hold_row_casts(held, Precision(format="hybrid", scaling=job["recipe"], fp8_param=True))
        return _train_or_say(**job)


def _train_or_say(**job):
    try:
        return train(**job)
    except (AssertionError, RuntimeError, ValueError) as error:
        traceback.print_exc()
        return {"refused": str(error), "losses": [], "fp8": []}


def train(recipe="bf16", experts=False, fp8_param=False, keep=None):
    """``keep`` is a pattern of names that stay in BF16, by Megatron's recipes for single modules."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    from nemo_fp8.te_cpu.quantized import watching_casts

    FP8GlobalStateManager.reset()
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    settings = {}
    if recipe == "nvfp4":
        settings = {"fp4": "e2m1", "fp4_recipe": recipe}
    elif recipe != "bf16":
        settings = {"fp8": "hybrid" if recipe == "delayed" else "e4m3", "fp8_recipe": recipe, "fp8_param": fp8_param}
    settings |= {"fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"} if recipe == "delayed" else {}
    settings |= EXPERTS | {"moe_router_padding_for_fp8": recipe != "bf16"} if experts else {}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        ffn_hidden_size=256,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        add_bias_linear=False,
        normalization="RMSNorm",
        quant_recipe=keeping(keep) if keep else None,
        **settings,
    )
    spec = get_gpt_layer_with_transformer_engine_spec(**{"num_experts": 4, "moe_grouped_gemm": True} if experts else {})
    model = Float16Module(config, GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH))
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, fp8_param_gather=fp8_param
    )
    model = DistributedDataParallel(config, ddp, model)
    adam = OptimizerConfig(
        optimizer="adam", lr=3e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(adam, [model])
    tokens = (torch.arange(LENGTH + 1) + torch.arange(4)[:, None] * 7) % VOCABULARY
    losses, turned = [], []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        for module in model.modules():
            if hasattr(module, "is_first_microbatch"):
                module.is_first_microbatch = True
        positions = torch.arange(LENGTH).expand(4, LENGTH)
        loss = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous()).float().mean()
        loss.backward()
        finalize_model_grads([model])
        with watching_casts(lambda quantizer, x, out: turned.append(is_turned_row(x, out))):
            optimizer.step()
        losses.append(loss.item())
    linears = {
        name: module for name, module in model.named_modules() if hasattr(module, "fp8_meta") and hasattr(module, "fp8")
    }
    stored = [parameter for parameter in model.parameters() if hasattr(parameter, "_quantizer")]
    return {
        "losses": losses,
        "fp8": [name for name, linear in linears.items() if "linear_" in name and linear.fp8],
        "stored": len(stored),
        "bits": [fingerprint(weight) for weight in stored],
        "turned": sum(turned),
    }


def is_turned_row(x, out):
    return x.numel() == x.shape[-1] and getattr(out, "_transpose", None) is not None


def fingerprint(weight):
    """What a weight's codes, scales and amax are."""
    kept = [*weight.get_metadata().values(), getattr(weight._quantizer, "amax", None)]
    said = [str(value.flatten().tolist()) for value in kept if hasattr(value, "tolist")]
    return hashlib.sha256("".join(said).encode()).hexdigest()


def keeping(pattern):
    from megatron.core.quantization.quant_config import GlobMatcher, RecipeConfig

    bf16 = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    return RecipeConfig([GlobMatcher(pattern, "bf16")], {"bf16": bf16})


if __name__ == "__main__":
    main()
