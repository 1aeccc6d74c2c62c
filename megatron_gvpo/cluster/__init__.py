"""Launches jobs on Slurm clusters, checks machines beforehand, and predicts memory and step time."""
