"""Tools to watch a run: phase times, metric files, progress display, profiler, GPU monitor, summary."""

from megatron_gvpo.core.json_files import read_metrics
from megatron_gvpo.observe.loggers.logger import MetricLogger
from megatron_gvpo.observe.profiler import ProfileWindow, profile_window
from megatron_gvpo.observe.progress import Progress
from megatron_gvpo.observe.summary import memory_report, plot_curve, time_report
from megatron_gvpo.observe.timer import PhaseTimer

__all__ = [
    "MetricLogger",
    "PhaseTimer",
    "ProfileWindow",
    "Progress",
    "memory_report",
    "plot_curve",
    "profile_window",
    "read_metrics",
    "time_report",
]
