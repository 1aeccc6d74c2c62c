"""Parts of device_check.py: one check of a GPU each."""
