"""Starts rollout servers, watches over them and starts them again."""
