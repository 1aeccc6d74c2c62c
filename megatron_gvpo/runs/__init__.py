"""The files of a run in its output directory: the lock, the earlier run there, the record of how it ran."""
