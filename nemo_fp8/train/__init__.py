"""Training with real NeMo and Megatron: with TransformerEngine on a GPU, emulated where there is none.

Each module imports what it needs of NeMo and megatron-core; this one imports nothing, so that naming the
package costs nothing.
"""
