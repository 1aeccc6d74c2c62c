"""Parts of scaling.py: a point, its ranks, and the plot."""
