"""What tests share: models, engines, runs, oracles. ``tests`` is on the path of pytest, and of every process that a
test starts."""

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
