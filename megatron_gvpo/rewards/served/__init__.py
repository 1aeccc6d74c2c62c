"""Rewards by models on servers: reward models, and judges that write their verdicts."""
