"""Alerts: signs of trouble in a run's metrics, in words. `rules` has them as data, `finder` finds them."""

from megatron_gvpo.observe.alerts.finder import Alert, Finder, alerts_of

__all__ = ["Alert", "Finder", "alerts_of"]
