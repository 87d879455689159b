"""Proof that a person can look at: tables, plots, and one HTML file that needs nothing but itself.

``page`` writes the file, ``figures`` draws for it, ``inspect`` measures what FP8 does to a checkpoint. The package
itself imports nothing heavy, so that the command line stays light.
"""
