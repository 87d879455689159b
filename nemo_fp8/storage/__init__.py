"""Read tensors from files: ``safetensors``, and Megatron's ``torch_dist`` with TransformerEngine's FP8 weights."""
