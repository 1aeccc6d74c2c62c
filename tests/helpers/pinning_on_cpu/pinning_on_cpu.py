"""SGLang keeps the experts of its tokens in host memory that it pins through CUDA's runtime: not on a CPU.

For tests alone. What is recorded there, and told, stays its own.
"""


def register() -> None:
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = lambda *_: None
