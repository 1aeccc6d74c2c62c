"""Reads a Hugging Face directory: config.json, architecture, tokenizer files, safetensors files."""
