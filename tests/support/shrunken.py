"""NeMo's llama3_8b pretraining recipe, made small enough for a CPU."""

import nemo_run as run
from nemo.collections import llm

from nemo_fp8.experiments.stories import ByteTokenizer, StoryData
from nemo_fp8.factories import plugin_config


def llama3_8b(precision):
    recipe = llm.llama3_8b.pretrain_recipe(name="shrunken", num_nodes=1, num_gpus_per_node=2)
    recipe.trainer.plugins = plugin_config(precision)
    config = recipe.model.config
    config.num_layers, config.hidden_size, config.ffn_hidden_size = 3, 128, 256
    config.num_attention_heads, config.num_query_groups, config.seq_length, config.make_vocab_size_divisible_by = (
        4,
        2,
        64,
        128,
    )
    config.apply_rope_fusion = config.masked_softmax_fusion = config.persist_layer_norm = (
        config.cross_entropy_loss_fusion
    ) = False
    recipe.model.tokenizer = run.Config(ByteTokenizer)
    recipe.data = run.Config(StoryData, seq_length=64, micro_batch_size=2, global_batch_size=8)
    recipe.trainer.accelerator, recipe.trainer.limit_val_batches = "cpu", 0
    recipe.trainer.strategy.context_parallel_size, recipe.trainer.strategy.ddp.average_in_collective = (
        1,
        False,
    )  # gloo has no mean
    recipe.optim.config.lr, recipe.optim.lr_scheduler.warmup_steps, recipe.optim.lr_scheduler.min_lr = 1e-3, 2, 1e-4
    return recipe
