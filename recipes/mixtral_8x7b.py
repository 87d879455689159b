"""``python recipes/mixtral_8x7b.py --dryrun``, or ``... --factory "fp8_mixtral_8x7b(precision=bf16_mixed)"
trainer.max_steps=100``."""

import nemo_run as run
from nemo.collections import llm

from nemo_fp8.recipes import mixtral_8x7b

if __name__ == "__main__":
    run.cli.main(llm.pretrain, default_factory=mixtral_8x7b)
