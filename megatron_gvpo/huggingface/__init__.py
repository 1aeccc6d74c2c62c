"""What a Hugging Face directory says:
config.json, architectures, tokenizer files, tensors of safetensors files.
"""
