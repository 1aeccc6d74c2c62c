"""Lets SGLang record routed experts on a CPU: it pins host memory through CUDA's runtime, which a CPU lacks.

Only tests use it. SGLang's own code records and returns the experts.
"""


def register() -> None:
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = lambda *_: None
