"""Rollout servers:
one server's dialect, the pool of all servers, how they are started, and plugins inside them.
"""
