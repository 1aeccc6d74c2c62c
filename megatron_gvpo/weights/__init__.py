"""How the trainer's weights reach rollout servers:
transports, receivers and the publisher that drives them.
"""
