"""Train with NeMo and Megatron: with TransformerEngine on a GPU, and with its CPU implementation without one.

This module imports nothing; each module below imports what it needs of NeMo and megatron-core.
"""
