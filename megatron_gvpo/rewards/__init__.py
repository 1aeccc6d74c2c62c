"""Rewards of responses: functions, reward models, judges and teachers."""
