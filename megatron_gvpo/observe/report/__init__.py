"""The report of one or several runs: one HTML file with curves, samples and configurations.

`run` reads a run's directory, `samples` packs its saved responses, `page` writes the file. The page itself,
with its style and scripts, is in the folder `assets/`.
"""

from megatron_gvpo.observe.report.page import report_of, write_page
from megatron_gvpo.observe.report.run import Run, read_run

__all__ = ["Run", "read_run", "report_of", "write_page"]
