"""Tiny models of Megatron-Bridge's own providers, and the ConfigContainer of a run with mock data over gloo."""

LENGTH, VOCABULARY = 32, 512
SIZES = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 256}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_grouped_gemm": True,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 128,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}
# What LlamaModelProvider sets by itself.
_LLAMAS = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "share_embeddings_and_output_weights": False,
}


def provider(kind="gpt", **settings):
    """A provider of ``kind``: gpt, llama or qwen3."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.llama.llama_provider import LlamaModelProvider
    from megatron.bridge.models.qwen.qwen_provider import Qwen3ModelProvider
    from torch.nn.functional import silu

    made, own = {
        "gpt": (GPTModelProvider, _LLAMAS | {"activation_func": silu}),
        "llama": (LlamaModelProvider, {}),
        "qwen3": (Qwen3ModelProvider, {"kv_channels": 32}),
    }[kind]
    return made(**SIZES | {"seq_length": LENGTH, "vocab_size": VOCABULARY} | own | settings)


def config(
    model,
    precision,
    steps=4,
    *,
    of=None,
    save=None,
    load=None,
    ddp=None,
    checkpoint=None,
    validate=0,
    adapters=None,
    base=None,
):
    """The ConfigContainer of a run of ``steps`` steps out of ``of``, with mock data and the distributed optimizer.

    It validates every ``validate`` steps. With ``adapters``, settings of Bridge's LoRA, it trains those alone, on the
    checkpoint in the folder ``base``.
    """
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.training import config as c

    return c.ConfigContainer(
        model=model,
        mixed_precision=precision,
        train=c.TrainingConfig(
            train_iters=steps,
            micro_batch_size=2,
            global_batch_size=4,
            eval_iters=1 if validate else 0,
            eval_interval=validate or 1000,
        ),
        optimizer=c.OptimizerConfig(
            optimizer="adam", lr=1e-3, min_lr=1e-4, weight_decay=0.0, clip_grad=1.0, use_distributed_optimizer=True
        ),
        scheduler=c.SchedulerConfig(
            lr_decay_style="constant",
            lr_warmup_iters=0,
            lr_decay_iters=of or steps,
            start_weight_decay=0.0,
            end_weight_decay=0.0,
            weight_decay_incr_style="constant",
            override_opt_param_scheduler=True,
        ),
        ddp=c.DistributedDataParallelConfig(use_distributed_optimizer=True, **ddp or {}),
        dataset=c.MockGPTDatasetConfig(
            seq_length=LENGTH,
            random_seed=1234,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            num_workers=0,
            dataloader_type="single",
        ),
        tokenizer=c.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),  # and one for the end
        logger=c.LoggerConfig(log_interval=1, log_timers_to_tensorboard=False),
        checkpoint=c.CheckpointConfig(
            save=save,
            load=load,
            save_interval=10**6 if save else None,
            ckpt_format="torch_dist",
            **{"pretrained_checkpoint": base} | (checkpoint or {}),
        ),
        peft=None if adapters is None else LoRA(**adapters),
        dist=c.DistributedInitConfig(distributed_backend="gloo", distributed_timeout_minutes=3),
        rng=c.RNGConfig(seed=1234),
    )


def hugging_face(kind, folder, **changes):
    """Write a tiny random checkpoint of ``kind``, llama or qwen3, in BF16; return its tensors."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    } | changes
    made = LlamaForCausalLM(LlamaConfig(**sizes)) if kind == "llama" else Qwen3ForCausalLM(Qwen3Config(**sizes))
    model = made.to(torch.bfloat16)
    model.save_pretrained(folder)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def tokenizer(folder):
    """Write a tokenizer of three words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1, "[EOS]": 2}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[EOS]").save_pretrained(folder)
