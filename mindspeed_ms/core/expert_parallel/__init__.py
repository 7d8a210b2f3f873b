"""Expert parallelism: routing of tokens to experts, balance losses, capacity, token dispatchers."""
