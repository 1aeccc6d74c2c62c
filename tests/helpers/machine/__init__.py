"""Real programs of the machine: a browser, Slurm, image builds, NFS, Debian's packages, processes."""
