"""``python -m nemo_fp8.cli``."""

from nemo_fp8.cli import main

main()
