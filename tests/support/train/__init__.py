"""Tiny runs of NeMo and Megatron in processes of their own, and what is looked at in them."""
