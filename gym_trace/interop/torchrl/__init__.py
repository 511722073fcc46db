"""TorchRL: steps as a memory-mapped TensorDict."""
