"""``python recipes/qwen3_8b.py --dryrun``, or ``... --factory "fp8_qwen3_8b(precision=bf16_mixed)"
trainer.max_steps=100``."""

import nemo_run as run
from nemo.collections import llm

from nemo_fp8.recipes import qwen3_8b

if __name__ == "__main__":
    run.cli.main(llm.pretrain, default_factory=qwen3_8b)
