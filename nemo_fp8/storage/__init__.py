"""Tensors in files: ``safetensors``, Megatron's ``torch_dist``, and TransformerEngine's tensors in the latter, read
without TE."""
