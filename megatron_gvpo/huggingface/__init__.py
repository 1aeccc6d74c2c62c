"""Reads a Hugging Face directory: config.json, architectures, tokenizer files, tensors of safetensors files."""
