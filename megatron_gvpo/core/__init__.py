"""The ground floor:
errors, sections of a configuration, secrets, collectives, users' functions, names of metrics.
"""
