"""A recipe whose ranks wait for ever; before that each writes its process down."""

import os
import time
from pathlib import Path


def recipe(precision):
    Path(os.environ["RANKS"], str(os.getpid())).touch()
    time.sleep(600)
