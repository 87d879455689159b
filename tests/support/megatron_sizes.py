"""Print, as JSON, the bytes that real megatron-core allocates for one rank of a layout; run as a script by test_memory.

torch's own "fake" process group stands for the other ranks, and tensors that ask for CUDA are made on the CPU: no
arithmetic happens, only allocation, which is what is measured.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # Megatron's own local layers: what they allocate is what TE's do


class OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        out = func(*args, **kwargs)
        # The distributed optimizer sorts parameters by the name of their type.
        return out.replace("torch.", "torch.cuda.", 1) if func is torch.Tensor.type and isinstance(out, str) else out


def measure(config: dict[str, Any], layout: dict[str, int]) -> dict[str, int]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    tensor, pipeline, expert, world = layout.get("tp", 1), layout.get("pp", 1), layout.get("ep", 1), layout["world"]
    dist.init_process_group("fake", rank=layout.get("rank", 0), world_size=world, store=FakeStore())
    parallel_state.initialize_model_parallel(
        tensor,
        pipeline,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=layout.get("etp"),
        create_gloo_process_groups=False,
    )
    experts = config.get("num_experts")
    transformer = TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        ffn_hidden_size=config["intermediate_size"],
        num_moe_experts=experts,
        moe_ffn_hidden_size=config.get("moe_intermediate_size"),
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        qk_layernorm=config["model_type"].startswith("qwen3"),
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=layout.get("etp", tensor),
        sequence_parallel=experts is not None and tensor > 1,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    # An MoE config insists on it (without, megatron-core ends in a NameError), torch's norms refuse it; sizes do not
    # depend on it.
    transformer.sequence_parallel = False
    model = GPTModel(
        transformer,
        get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm", qk_layernorm=transformer.qk_layernorm),
        vocab_size=-(-config["vocab_size"] // (128 * tensor)) * 128 * tensor,
        max_sequence_length=128,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config.get("tie_word_embeddings", False),
    ).bfloat16()
    parameters = sum(p.numel() for p in model.parameters())
    # One bucket: with several, Megatron pads each, and a rank's shard is no longer the even share that is estimated.
    ddp = DistributedDataParallel(
        transformer,
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True, bucket_size=None),
        model,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
        ),
        [ddp],
        use_gloo_process_groups=False,
    )
    buffers = ddp.buffers + ddp.expert_parallel_buffers
    groups = [
        group
        for one in optimizer.chained_optimizers
        for name in ("shard_fp32_from_float16_groups", "shard_fp32_groups")
        for group in getattr(one, name)
    ]
    found = {
        "parameters": parameters,
        "parameter bytes": sum(b.param_data.nbytes for b in buffers),
        "gradients": sum(b.grad_data.nbytes for b in buffers),
        "master parameters": sum(p.nbytes for group in groups for p in group if p is not None),
    }
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    with OnCpu():
        sys.stdout.write(
            "\n" + json.dumps([measure(config, layout) for config, layout in json.loads(sys.argv[1])]) + "\n"
        )
