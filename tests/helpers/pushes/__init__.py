"""Trainers that push weights to real servers, and checks of what arrived."""
