"""Writes jobs for Slurm, Kubernetes and SkyPilot, checks machines beforehand, predicts memory and time."""
