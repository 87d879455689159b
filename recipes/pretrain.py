"""Pretrain one of the models of ``nemo_fp8.recipes`` from NeMo-Run's command line.

    python recipes/llama3_8b.py --dryrun
    python recipes/llama3_8b.py --factory "fp8_llama3_8b(precision=bf16_mixed)" trainer.max_steps=100

``llama3_8b.py``, ``llama3_70b.py``, ``qwen3_8b.py`` and ``mixtral_8x7b.py`` are links to this file: the name under
which it is started is the recipe where no ``--factory`` is given. ``pretrain.py`` itself starts with ``llama3_8b``.
"""

import sys
from pathlib import Path

import nemo_run as run
from nemo.collections import llm

from nemo_fp8 import recipes

if __name__ == "__main__":
    name = Path(sys.argv[0]).stem
    run.cli.main(llm.pretrain, default_factory=getattr(recipes, name if name in recipes.RECIPES else "llama3_8b"))
