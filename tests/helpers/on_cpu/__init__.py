"""Stand-ins for parts that only GPUs have, some of them as plugins of the engines."""
