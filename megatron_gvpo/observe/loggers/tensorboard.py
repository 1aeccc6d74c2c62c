"""Writes metrics, sample tables and the configuration to TensorBoard event files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_gvpo.observe.alerts import Alert
from megatron_gvpo.observe.loggers.backend import Sample


class TensorBoardWriter:
    """Writes TensorBoard event files; a purge mark hides the steps after `keep_until`."""

    def __init__(self, directory: Path, keep_until: int, run_config: Mapping[str, Any] | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = partial(_report_thread, threading.excepthook)
        self._writer = SummaryWriter(str(directory), purge_step=keep_until + 1, flush_secs=10)
        if run_config is not None:
            import yaml

            text = yaml.safe_dump(dict(run_config), sort_keys=False)
            self._writer.add_text("config", f"```yaml\n{text}```", global_step=keep_until + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        for kind in {sample.kind: None for sample in samples}:
            text = "\n\n".join(_markdown(sample) for sample in samples if sample.kind == kind)
            self._writer.add_text(f"samples/{kind}", text, global_step=step)

    def tell(self, alert: Alert) -> None:
        self._writer.add_text("alerts", f"**{alert.rule}**\n\n    {alert}", global_step=alert.step)

    def close(self) -> None:
        self._writer.close()


def _markdown(sample: Sample) -> str:
    """The sample as indented blocks, in which TensorBoard shows every character as it is."""
    blocks = (text.replace("\n", "\n    ") for text in (sample.prompt, sample.response))
    return "**reward {:.4g}**\n\n    {}\n\n→\n\n    {}".format(sample.reward, *blocks)


def _report_thread(
    report: Callable[[threading.ExceptHookArgs], object], died: threading.ExceptHookArgs
) -> None:
    """Stay silent if TensorBoard's writer thread dies (of a full disk): the next `log` raises its error."""
    if not type(died.thread).__module__.startswith("tensorboard."):
        report(died)
