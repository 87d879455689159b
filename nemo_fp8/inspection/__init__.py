"""Measure what FP8 does to tensors: ``measure`` reads them, ``loss`` counts, ``advice`` says what to keep."""
