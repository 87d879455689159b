"""The demo's first part: NeMo's own llama3_8b pretraining recipe, with an FP8 plugin from this package."""

import fiddle as fdl
from nemo.collections import llm

from nemo_fp8 import bf16_with_fp8_blockwise_mixed

recipe = llm.llama3_8b.pretrain_recipe(name="pretrain", dir="/tmp/nemo", num_nodes=1, num_gpus_per_node=8)
recipe.trainer.plugins = bf16_with_fp8_blockwise_mixed()
print(recipe.trainer.plugins)

plugin = fdl.build(recipe.trainer.plugins)
print("\nThe built plugin writes these into Megatron's configs:")
for name, value in vars(plugin.dtype_config).items():
    if name.startswith(("bf16", "params_dtype", "fp8")):
        print(f"  {name:<28} {value}")
