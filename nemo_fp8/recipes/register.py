"""Imported by nemo-run through its entry point, so that its command line knows every recipe by name."""

from nemo_fp8.recipes import big, tiny

__all__ = ["big", "tiny"]
