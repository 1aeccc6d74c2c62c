"""Responses that join a group without being ordinary samples, a block each."""
