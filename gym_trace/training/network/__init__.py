"""What is trained: a policy and a value as a network, and how it learns. It takes PyTorch."""
