"""Writes jobs for Slurm, Kubernetes and SkyPilot, checks machines beforehand, and predicts memory and step time."""
