"""A NeMo recipe in FP8: one line names the plugin, and the recipe trains as ever.

    .venv/bin/python examples/nemo_recipe.py

You see what the plugin writes into Megatron's configs, and ten steps of a small Llama on this machine, with a GPU or
without. NeMo's own recipes (``llm.llama3_8b.pretrain_recipe(...)``) take the same line.
"""

import fiddle as fdl

from nemo_fp8 import bf16_with_fp8_blockwise_mixed
from nemo_fp8.experiments import tiny_llama

recipe = tiny_llama(ranks=1, steps=10, dir="out/examples")
recipe.trainer.plugins = bf16_with_fp8_blockwise_mixed()
recipe.trainer.enable_checkpointing = False
recipe.log.ckpt = recipe.log.tensorboard = recipe.resume = None

for name, value in vars(fdl.build(recipe.trainer.plugins).dtype_config).items():
    if name.startswith("fp8"):
        print(f"{name:<28} {value}")

train = fdl.build(recipe)
train()
print(f"the loss after ten steps: {train.keywords['trainer'].callback_metrics['reduced_train_loss']:.3f}")
