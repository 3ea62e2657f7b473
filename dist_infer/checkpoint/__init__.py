"""Weights from files: safetensors, GGUF and seeded dummies, each rank reads its own slices."""
