"""The report of one or several runs: one HTML page with curves, samples and configurations.

`run` reads records; `samples` chooses saved responses, which `packing` packs; `page` collects the data and
writes the page; `watch` serves it while the runs go on. The page itself is in the folder `assets/`.
"""

from megatron_gvpo.observe.report.page import Reporter, page_text

__all__ = ["Reporter", "page_text"]
