"""Writes jobs for Slurm, Kubernetes and SkyPilot, and checks machines beforehand."""
