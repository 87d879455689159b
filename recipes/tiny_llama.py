"""``python recipes/tiny_llama.py --dryrun``; other settings: ``--factory "tiny_llama(precision=bf16_mixed)"
trainer.max_steps=100``."""

import nemo_run as run
from nemo.collections import llm

from nemo_fp8.experiments import tiny_llama

if __name__ == "__main__":
    run.cli.main(llm.pretrain, default_factory=tiny_llama)
