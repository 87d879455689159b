"""One step of a mixture of experts on two ranks, with and without Megatron's overlap of their exchange of tokens.

torchrun starts it; rank 0 prints as JSON the losses of the microbatches and the norm of the gradients, of both.
"""

import json
import sys

import transformer_engine  # noqa: F401  # before Megatron, as everywhere

VOCABULARY, LENGTH, MICROBATCHES = 128, 32, 3


def main():
    import torch
    from megatron.core import parallel_state

    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    found = [step(overlap) for overlap in (False, True)]
    if torch.distributed.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")


def step(overlap):
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import get_attr_wrapped_model

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
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
        num_moe_experts=4,
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=2,
        fp8="e4m3",
        fp8_recipe="blockwise",
        moe_router_padding_for_fp8=True,
        overlap_moe_expert_parallel_comm=overlap,
        finalize_model_grads_func=finalize_model_grads,
    )
    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=4, moe_grouped_gemm=True)
    model = Float16Module(config, GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH))
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    chance = torch.Generator().manual_seed(torch.distributed.get_rank())
    batches = [torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=chance) for _ in range(MICROBATCHES)]

    def forward(batch, model, return_schedule_plan=False):
        tokens = next(batch)
        asked = tokens[:, :-1].contiguous(), torch.arange(LENGTH).expand(2, LENGTH), None
        call = get_attr_wrapped_model(model, "build_schedule_plan") if return_schedule_plan else model
        return call(*asked, labels=tokens[:, 1:].contiguous()), mean

    def mean(loss):
        return loss.float().mean(), {"loss": loss.detach().float().mean().item()}

    model.zero_grad_buffer()
    told = forward_backward_no_pipelining(
        forward_step_func=forward,
        data_iterator=[iter(batches)],
        model=[model],
        num_microbatches=MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=2,
        forward_only=False,
    )
    norm = sum(p.main_grad.double().square().sum() for p in model.parameters()).sqrt().item()
    return {"losses": [one["loss"] for one in told], "norm": norm}


if __name__ == "__main__":
    main()
