"""Stand-ins for parts that only GPUs have; plugins of the engines among them."""
