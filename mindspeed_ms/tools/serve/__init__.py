"""HTTP server for generation: OpenAI's `/v1/completions` and `/v1/chat/completions`, Megatron's `/api`."""
