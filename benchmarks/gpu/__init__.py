"""FP8 on a GPU: ``make gpu``. What it measures is in parts.py, what was found in docs/benchmarks/gpu.md."""
