"""What FP8 does to tensors, measured: ``measure`` reads, ``loss`` counts, ``advice`` says what to keep. ``report``
draws it."""
