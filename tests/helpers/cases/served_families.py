"""The families of docs/reference/models.md that SGLang and vLLM have served on a CPU in a test."""

from __future__ import annotations

# (engine, title of the family, dtype of the run), for test_family_servers.py.
SERVED = [
    ("vllm", "Kimi K2", "float32"),
    ("sglang", "Gemma 3 (text)", "float32"),
    ("sglang", "GLM-4.5, 4.6", "float32"),
    ("vllm", "GLM-4.5, 4.6", "float32"),
    ("vllm", "Gemma 3 (text)", "float32"),
    ("vllm", "GPT-OSS", "float32"),
    ("vllm", "Qwen3", "float32"),
    ("sglang", "Qwen3", "float32"),
    ("vllm", "Llama 3", "float32"),
    ("sglang", "Llama 3", "float32"),
    ("vllm", "Mistral", "float32"),
    ("sglang", "Mistral", "float32"),
    ("vllm", "OLMoE", "float32"),
    ("sglang", "OLMoE", "float32"),
    ("vllm", "EXAONE 4.0 (1.2B)", "float32"),
    ("vllm", "Gemma", "float32"),
    ("sglang", "Gemma", "float32"),
    ("vllm", "DeepSeek-V2", "float32"),
    ("vllm", "DeepSeek-V3", "float32"),
    ("vllm", "GLM-4.7-Flash", "float32"),
    ("vllm", "Qwen3.5", "bfloat16"),
    ("vllm", "Qwen3.5 MoE", "bfloat16"),
    ("vllm", "Qwen3-Next", "bfloat16"),
]
# The same, in test_engines.py.
SERVED_ELSEWHERE = [
    (engine, title, "float32") for engine in ("sglang", "vllm") for title in ("Qwen2", "Qwen3-MoE")
]
